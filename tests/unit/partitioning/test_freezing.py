"""TimelyFreeze's programme on answers that are known, and what `zbpp freeze` says."""

from __future__ import annotations

import json
import sys

import pytest

from megatron_zbpp import Costs, Placement, build, simulate
from megatron_zbpp.cli import main
from megatron_zbpp.ir import Pass
from megatron_zbpp.partitioning.freeze_plans import freeze

ANSWERS = {  # (schedule, p, m): for each most, makespan and mean share
    ('1f1b', 2, 2): {0: (9, 0), 0.25: (8, 0.25), 0.5: (7, 0.5), 0.9: (6.2, 0.7), 1: (6, 0.75)},
    ('1f1b', 2, 4): {
        0: (15, 0), 0.25: (13, 0.25), 0.5: (12, 0.375), 0.9: (10.4, 0.775), 1: (10, 0.875),
    },
    ('1f1b', 4, 4): {
        0: (21, 0), 0.25: (17.5, 0.25), 0.5: (16, 0.4375), 0.9: (14.4, 0.675), 1: (14, 0.75),
    },
    ('zb-h1', 4, 8): {0: (27, 0), 0.5: (23, 0.5), 0.9: (22, 0.625)},
}  # fmt: skip


@pytest.mark.parametrize('case', ANSWERS, ids=lambda case: '-'.join(map(str, case)))
def test_known_answers(case):
    name, p, m = case
    schedule = build(name, p, m)
    costs = Costs.of((1.0,) * p, (1.0,) * p, (1.0,) * p)
    for most, (makespan, mean) in ANSWERS[case].items():
        found = freeze(schedule, costs, most)
        assert (found.makespan, found.mean) == pytest.approx((makespan, mean))
        assert found.without == pytest.approx(simulate(schedule, costs).makespan)
        assert all(found.stage(stage) <= most + 1e-6 for stage in range(p))


def test_times_in_seconds():
    """Makespans and times far below one unit are as they are."""
    third = (1e-3,) * 2
    found = freeze(build('1f1b', 2, 4), Costs.of(third, third, third), 0.5)
    assert (found.makespan, found.without) == pytest.approx((12e-3, 15e-3), rel=1e-6)


@pytest.mark.parametrize('most', [0.0, 0.5])
def test_progress(most):
    told = []
    freeze(build('1f1b', 2, 2), Costs.of((1.0,) * 2, (1.0,) * 2, (1.0,) * 2), most, told.append)
    assert told == sorted(told) and told[-1] == 1.0


def test_which_passes():
    """Of two ranks and two microbatches: the first backward there, the second here."""
    found = freeze(build('1f1b', 2, 2), Costs.of((1.0,) * 2, (1.0,) * 2, (1.0,) * 2), 0.5)
    assert {str(p): round(ratio, 6) for p, ratio in found.ratios.items()} == {
        '0BW0': 0, '0BW1': 1, '1BW0': 1, '1BW1': 0,
    }  # fmt: skip


def test_speeds_messages_and_stages_without_weights():
    costs = Costs.of((1.0,) * 2, (1.0,) * 2, (0.0, 2.0), comm=0.5, speeds=(1.0, 2.0))
    schedule = build('zb-h1', 2, 3)
    found = freeze(schedule, costs, 0.0)
    assert found.makespan == pytest.approx(simulate(schedule, costs).makespan)
    assert {p.stage for p in found.ratios} == {1} and found.stage(0) == 0.0
    assert found.mean == 0.0
    none = Costs.of((1.0,) * 2, (1.0,) * 2, (0.0,) * 2)
    assert freeze(schedule, none).ratios == {} and freeze(schedule, none).mean == 0.0


def test_what_cannot_be(monkeypatch):
    costs = Costs.uniform(Placement.loop(2))
    with pytest.raises(ValueError, match=r'1\.5 is no share'):
        freeze(build('1f1b', 2, 2), costs, 1.5)
    monkeypatch.setitem(sys.modules, 'ortools.linear_solver.pywraplp', None)
    with pytest.raises(ValueError, match='needs OR-tools'):
        freeze(build('1f1b', 2, 2), costs)


def test_command(capsys):
    case = '--schedule 1f1b --pp 2 --microbatches 2 --most 0.5'.split()
    assert main(['freeze', *case, '--json']) == 0
    found = json.loads(capsys.readouterr().out)
    assert found['makespan'] == pytest.approx(7) and found['without_freezing'] == pytest.approx(9)
    assert found['stages'] == pytest.approx([0.5, 0.5])
    assert {str(Pass.parse(name)) for name in found['ratios']} == set(found['ratios'])
    assert main(['freeze', *case]) == 0
    said = capsys.readouterr().out
    assert 'makespan 7, without freezing 9: 22.2% less, for 50.0%' in said and 'another' in said
