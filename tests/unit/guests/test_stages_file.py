"""The file of stages that a trace leaves: commands simulate and profile by its messages."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.cli import main
from megatron_zbpp.guests.tracing import Tracer
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.schedules import build


@pytest.fixture
def trace(tmp_path):
    """A trace whose last hops take longer than others of the same ranks, and how long it took."""
    schedule = build('zb-v', 2, 6)
    costs = replace(Costs.uniform(schedule.placement, comm=0.25), hops=[(0, 0), (0, 0), (1, 1)])
    measured = simulate(schedule, costs)
    tracer = Tracer(tmp_path)
    tracer.draw(measured)
    return tmp_path / 'stages.json', measured.makespan


def simulated(capsys, file) -> float:
    flags = ['--schedule', 'zb-v', '--pp', '2', '--microbatches', '6']
    assert main(['simulate', *flags, '--times', str(file), '--json']) == 0
    return json.loads(capsys.readouterr().out)['makespan']


def test_simulated_as_it_was(trace, tmp_path, capsys):
    file, took = trace
    assert json.loads(file.read_text())['hops'] == [[0, 0], [0, 0], [1, 1]]
    assert json.loads(file.read_text())['routes'] == [[0, 1, 1, 0]]
    assert simulated(capsys, file) == pytest.approx(took)
    old = {name: own for name, own in json.loads(file.read_text()).items() if name != 'hops'}
    (tmp_path / 'old.json').write_text(json.dumps(old))
    assert simulated(capsys, tmp_path / 'old.json') < took - 1


def test_profile_hands_them_on(trace, tmp_path, capsys):
    file, took = trace
    again = tmp_path / 'again.json'
    flags = ['--layout', 'Et|t|t|tL', '-o', str(tmp_path / 'layers.json')]
    assert main(['profile', str(file), *flags, '--write-times', str(again)]) == 0
    capsys.readouterr()
    assert json.loads(again.read_text())['routes'] == [[0, 1, 1, 0]]
    assert simulated(capsys, again) == pytest.approx(took)
