"""The benchmark of partitions at its smallest: all do the same work, and what it says is so."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from paths import ROOT

from benchmarks.partition import cases, cli, two_hosts


def run(folder, *flags):
    """The script as a user calls it: what it printed, and its JSON."""
    file = folder / 'result.json'
    command = [sys.executable, 'scripts/benchmark_partition.py', '--pp', '2', '--microbatches', '4']
    command += ['--layers', '4', '--seconds-per-microbatch', '0.04', '--planning', '0.3']
    done = subprocess.run(
        [*command, '--rounds', '1', '--json', str(file), *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {'XDG_CACHE_HOME': str(folder)},
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout, json.loads(file.read_text())


def test_costs_partition_iterations(tmp_path):
    """Costs by least squares of a real model, then the even split beside the better ones."""
    measuring = ['--measure', '--hidden-size', '64', '--seq-length', '16', '--words', '512']
    text, result = run(tmp_path, *measuring, '--samples', '1', '--slow', '1:1.5', '--busy')
    assert 'gradients are equal to the bit' in text
    even, zb_v, stock, plan = result['rows']
    assert (even['layout'], zb_v['layout']) == ('Ett|ttL', 'Et|t|t|tL')
    assert stock['predicted_ms'] <= even['predicted_ms']
    assert plan['predicted_ms'] <= min(zb_v['predicted_ms'], stock['predicted_ms']) + 1e-9
    for row in result['rows']:
        assert row['median_ms'] > 0.99 * row['predicted_ms']
    assert result['layout'] == 'Ett|ttL' and len(result['stages_s']) == 2


@pytest.mark.full
@pytest.mark.skipif(two_hosts.missing() is not None, reason=f'no two hosts: {two_hosts.missing()}')
def test_two_hosts(tmp_path):
    """The message of 64 KiB takes 26 ms at 20 megabits a second, and no less."""
    text, result = run(tmp_path, '--link-mbit', '20', '--rows', '1024')
    assert 'gradients are equal to the bit' in text
    even, *_ = result['rows']
    free = cases.entries(
        cases.scaled(cases.gpt(4, 3.0), 0.04, 0.0), cases.machines(2, None, 1, 0.0), 4, 0.1
    )[0]
    assert even['predicted_ms'] > 1e3 * free.predicted + 40
    assert even['median_ms'] > 1e3 * free.predicted + 40


@pytest.mark.parametrize(
    ('flags', 'said'),
    [
        (['--pp', '1'], '--pp 1 is too small'),
        (['--slow', '9:2'], '--slow 9:2: give RANK:FACTOR'),
        (['--layers', '3'], '--layers 3 is too small'),
        (['--busy'], '--busy is about the rank of --slow'),
    ],
)
def test_odd_flags(capsys, flags, said):
    with pytest.raises(SystemExit):
        cli.main(flags)
    assert said in capsys.readouterr().err
