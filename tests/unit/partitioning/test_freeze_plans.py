"""A plan of freezing: its phases, its draws, its file."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from megatron_zbpp.cli import main
from megatron_zbpp.ir import F, Pass, W
from megatron_zbpp.partitioning.freeze_plans import FreezePlan
from megatron_zbpp.schedules import build

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


def test_the_last_stage_keeps_one():
    made = plan(1.0)
    assert len(made.left_out(400, 0, 0, 8)) == 8
    assert len(made.left_out(400, 1, 0, 8)) == 7
    assert made.left_out(400, 1, 0, 1) == frozenset()


def test_draws():
    """Alike wherever they are made; new every ten steps, and for each microbatch and seed."""
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


def test_file():
    made = plan(0.3, seed=4)
    assert FreezePlan.from_json(made.to_json()) == made
    assert made.stages == pytest.approx((0.3, 0.3))


@pytest.mark.parametrize(
    ('change', 'said'),
    [
        ({'format': 'other'}, "'format'"),
        ({'ratios': [1]}, "'ratios'"),
        ({'ratios': {'0W0': 'x'}}, '0W0'),
        ({'ratios': {'0W0': 2}}, 'is no share'),
        ({'ratios': {'0W9': 0.5}}, '0W9 is no pass of zb-h1'),
        ({'ratios': {'0F0': 0.5}}, '0F0 is no pass of zb-h1 with weights'),
        ({'warm_up': 0}, 'warm_up 0'),
        ({'unit': 0}, 'unit 0'),
        ({'more': 0}, "'more' is not known"),
    ],
    ids=str,
)
def test_odd_files(change, said):
    with pytest.raises(ValueError) as error:
        FreezePlan.from_json(json.dumps(json.loads(plan().to_json()) | change))
    assert said in str(error.value)


@pytest.mark.parametrize(
    ('given', 'said'),
    [
        (['--most', '1.5'], "argument --most: '1.5' is not possible: give a number from 0 to 1"),
        (['--most', '-1'], 'give a number from 0 to 1'),
        (['--warm-up', '0'], 'give a whole number from 1 up'),
        (['--unit', '-3'], 'give a whole number from 1 up'),
        (['--times', 'nowhere.json'], "'nowhere.json': No such file or directory: give F,B,W or"),
        (['--schedule', '1f1b', '-o', 'x.json'], '1f1b has no W passes'),
        (['-o', 'no/where.json'], 'no/where.json: No such file or directory: give another path'),
    ],
    ids=str,
)
def test_odd_commands(given, said, capsys, tmp_path, monkeypatch):
    """One line each, with the cure, and no file."""
    monkeypatch.chdir(tmp_path)
    try:
        status = main(['freeze', *'--schedule zb-h1 --pp 2 --microbatches 2'.split(), *given])
    except SystemExit as stop:
        status = stop.code
    error = capsys.readouterr().err
    assert status == 2 and said in error and error.count('\n') == 1
    assert not [*tmp_path.iterdir()]


def test_command(tmp_path, capsys):
    file = tmp_path / 'freeze.json'
    case = '--schedule zb-h1 --pp 4 --microbatches 8 --most 0.5 --warm-up 5 --unit 7'.split()
    assert main(['freeze', *case, '-o', str(file)]) == 0
    assert 'wrote' in capsys.readouterr().out
    made = FreezePlan.from_json(file.read_text())
    assert (made.warm_up, made.unit) == (5, 7)
    assert (made.makespan, made.without) == pytest.approx((23, 27))
    assert max(made.stages) == pytest.approx(0.5)
    assert all(p.kind != F for p, _ in made.ratios) and Pass(W, 0, 0).kind == W
