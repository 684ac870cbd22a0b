"""A plan of freezing: its phases, its draws, its file."""

import sys
from collections import Counter
from pathlib import Path

import pytest
from published import published

from megatron_zbpp import Costs, Pass, Placement, build, simulate
from megatron_zbpp.ir import F, W
from megatron_zbpp.partitioning.freeze_plans import FreezePlan, freeze

SCHEDULE = build('zb-h1', 2, 4)
OWN = [p for order in SCHEDULE.passes for p in order if p.kind in ('W', 'BW')]


def plan(ratio=0.5, **changes):
    fields = {'warm_up': 100, 'unit': 100} | changes
    return FreezePlan(SCHEDULE, tuple((p, ratio) for p in OWN), 7.0, 9.0, **fields)


def test_phases_of_the_paper():
    """Warm-up, monitoring, and then the shares grow until three units behind the warm-up."""
    made = plan()
    assert (made.monitoring, made.full) == (range(100, 200), 400)
    assert [made.share(step) for step in (0, 99, 199, 200, 300, 400, 9999)] == [
        0, 0, 0, 0, 0.5, 1, 1,
    ]  # fmt: skip
    short = plan(warm_up=1, unit=1)
    assert (short.monitoring, short.full, short.share(31)) == (range(1, 31), 31, 1.0)


def test_as_many_as_the_share_says():
    made = plan()
    assert made.left_out(150, 1, 0, 8) == frozenset()
    assert len(made.left_out(300, 1, 0, 8)) == 2
    assert len(made.left_out(400, 1, 0, 8)) == 4
    assert made.left_out(400, 1, 7, 8) == frozenset(), 'not planned'
    assert len(made.left_out(400, 0, 0, 5)) == round(0.5 * 5)
    whole = plan(1.0)
    assert len(whole.left_out(400, 0, 0, 8)) == 8
    assert len(whole.left_out(400, 1, 0, 8)) == 7, 'the last stage keeps one'
    assert whole.left_out(400, 1, 0, 1) == frozenset()
    again = plan(0.3, seed=4)
    assert FreezePlan.from_json(again.to_json()) == again
    assert again.stages == pytest.approx((0.3, 0.3))
    # alike wherever they are made; new every ten steps, and for each microbatch and seed
    made = plan(0.25)
    drawn = made.left_out(400, 1, 0, 40)
    assert plan(0.25).left_out(409, 1, 0, 40) == drawn
    others = (made.left_out(410, 1, 0, 40), made.left_out(400, 1, 1, 40))
    assert drawn not in (*others, plan(0.25, seed=1).left_out(400, 1, 0, 40))


def test_the_first_stage_leaves_out_front_layers_more_often():
    """The front layer, whose gradient comes last, about ten times as often as the hindmost."""
    counts = {stage: Counter() for stage in (0, 1)}
    for stage, counted in counts.items():
        for step in range(400, 40400, 10):
            counted.update(plan(0.1).left_out(step, stage, 0, 10))
    front, back = counts[0][9], counts[0][0]
    assert 7 < front / back < 14
    assert max(counts[1].values()) < 1.3 * min(counts[1].values())


def test_command(zbpp):
    case = '--schedule zb-h1 --pp 4 --microbatches 8 --most 0.5 --warm-up 5 --unit 7'
    assert 'wrote' in zbpp(f'freeze {case} -o freeze.json')
    made = FreezePlan.from_json(Path('freeze.json').read_text())
    assert (made.warm_up, made.unit) == (5, 7)
    assert (made.makespan, made.without) == pytest.approx((23, 27))
    assert max(made.stages) == pytest.approx(0.5)
    assert all(p.kind != F for p, _ in made.ratios) and Pass(W, 0, 0).kind == W


# ---- TimelyFreeze's programme on answers that are known, and what `zbpp freeze` says.


@pytest.mark.parametrize(('name', 'p', 'm', 'answers'), published(__file__, 'freezing'))
def test_known_answers(name, p, m, answers):
    schedule = build(name, p, m)
    costs = Costs.of((1.0,) * p, (1.0,) * p, (1.0,) * p)
    third = costs.with_times(**dict.fromkeys('FBW', (1e-3,) * p))
    for most, makespan, mean in answers:
        told = []
        found = freeze(schedule, costs, most, told.append)
        assert told == sorted(told) and told[-1] == 1.0, 'progress'
        assert (found.makespan, found.mean) == pytest.approx((makespan, mean))
        # makespans and times far below one unit are as they are
        seconds = freeze(schedule, third, most)
        assert (seconds.makespan, seconds.without) == pytest.approx(
            (1e-3 * makespan, 1e-3 * found.without), rel=1e-6
        )
        assert found.without == pytest.approx(simulate(schedule, costs).makespan)
        assert all(found.stage(stage) <= most + 1e-6 for stage in range(p))


def test_which_passes():
    """Of two ranks and two microbatches: the first backward there, the second here."""
    found = freeze(build('1f1b', 2, 2), Costs.of((1.0,) * 2, (1.0,) * 2, (1.0,) * 2), 0.5)
    assert {str(p): round(ratio, 6) for p, ratio in found.ratios.items()} == {
        '0BW0': 0, '0BW1': 1, '1BW0': 1, '1BW1': 0,
    }  # fmt: skip
    costs = Costs.of((1.0,) * 2, (1.0,) * 2, (0.0, 2.0), comm=0.5, speeds=(1.0, 2.0))
    schedule = build('zb-h1', 2, 3)
    found = freeze(schedule, costs, 0.0)
    assert found.makespan == pytest.approx(simulate(schedule, costs).makespan)
    assert {p.stage for p in found.ratios} == {1} and found.stage(0) == 0.0
    assert found.mean == 0.0
    none = Costs.of((1.0,) * 2, (1.0,) * 2, (0.0,) * 2)
    assert freeze(schedule, none).ratios == {} and freeze(schedule, none).mean == 0.0


def test_without_or_tools(monkeypatch):
    monkeypatch.setitem(sys.modules, 'ortools.linear_solver.pywraplp', None)
    with pytest.raises(ValueError, match='needs OR-tools'):
        freeze(build('1f1b', 2, 2), Costs.uniform(Placement.loop(2)))
