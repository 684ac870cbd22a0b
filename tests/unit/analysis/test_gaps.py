"""The gaps of a schedule, and what `zbpp bubbles` says of them."""

from __future__ import annotations

import json

import pytest

from megatron_zbpp import Costs, build, simulate
from megatron_zbpp.analysis.waits import gaps
from megatron_zbpp.cli import main
from megatron_zbpp.schedules import names


def test_gaps_of_1f1b():
    """By hand: p = 2, m = 2, F 1, BW 2."""
    timeline = simulate(build('1f1b', 2, 2), Costs.uniform(build('1f1b', 2, 2).placement))
    found = [
        (g.rank, g.where, g.start, g.length, str(g.before), str(g.after)) for g in gaps(timeline)
    ]
    assert found == [
        (0, 'inside', 2, 2, '0F1', '0BW0'),
        (0, 'inside', 6, 1, '0BW0', '0BW1'),
        (1, 'start', 0, 1, 'None', '1F0'),
        (1, 'end', 7, 2, '1BW1', 'None'),
    ]
    assert [g.length for g in gaps(timeline, least=1)] == [2, 2]


@pytest.mark.parametrize('name', names())
def test_gaps_and_passes_are_the_whole_time(name):
    schedule = build(name, 4, 6)
    timeline = simulate(schedule, Costs.uniform(schedule.placement, 1, 1.3, 0.6, comm=0.2))
    for rank in range(4):
        idle = sum(gap.length for gap in gaps(timeline) if gap.rank == rank)
        assert idle + timeline.busy(rank) == pytest.approx(timeline.makespan)


def test_command(capsys):
    case = '--schedule 1f1b --pp 2 --microbatches 2'.split()
    assert main(['bubbles', *case, '--json']) == 0
    found = json.loads(capsys.readouterr().out)['gaps']
    assert found[0] == {
        'rank': 0, 'start': 2, 'length': 2, 'before': '0F1', 'after': '0BW0', 'where': 'inside',
    }  # fmt: skip
    assert main(['bubbles', *case, '--least', '1']) == 0
    assert '2 gaps, 4 in all' in capsys.readouterr().out
