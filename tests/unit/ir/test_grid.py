from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_zbpp.ir import Schedule
from megatron_zbpp.ir.grid import grid
from megatron_zbpp.schedules import build


@pytest.fixture
def schedule() -> Schedule:
    return build('zb-v', 6, 40)


def test_small_one_whole() -> None:
    assert grid(build('1f1b', 2, 2)) == (
        'rank 0   0F0   0F1   0BW0  0BW1\nrank 1   1F0   1BW0  1F1   1BW1'
    )


@pytest.mark.parametrize('cell', [(0, 0), (3, 100), (5, 239)])
@pytest.mark.parametrize('width', [30, 80, 200])
def test_marked_cell_is_in_the_cut(schedule: Schedule, cell: tuple[int, int], width: int) -> None:
    rank, index = cell
    lines = grid(schedule, [cell], width=width).splitlines()
    assert f'[{schedule.passes[rank][index]}]' in lines[rank]
    assert sum(line.count('[') for line in lines) == 1
    assert max(map(len, lines)) <= width
    assert len(lines) == 6


def test_missing_pass_is_an_empty_marked_cell(schedule: Schedule) -> None:
    short = replace(schedule, passes=(*schedule.passes[:5], schedule.passes[5][:-1]))
    assert grid(short, [(5, 239)]).splitlines()[5].endswith('[___]')


def test_many_ranks_are_cut_around_the_mark() -> None:
    lines = grid(build('1f1b', 64, 2), [(40, 1)], height=5).splitlines()
    assert lines[0] == '(38 more above)'
    assert lines[3].startswith('rank 40') and '[40F1]' in lines[3]
    assert lines[-1] == '(21 more below)'


def test_each_rank_is_cut_around_its_own_mark(schedule: Schedule) -> None:
    lines = grid(schedule, [(0, 10), (4, 200)]).splitlines()
    assert f'[{schedule.passes[0][10]}]' in lines[0]
    assert f'[{schedule.passes[4][200]}]' in lines[4]


def test_what_is_cut_off_is_marked() -> None:
    """Behind the passes that are shown, where there are more."""
    schedule = build('1f1b', 2, 8)
    whole, cut = grid(schedule, width=1000), grid(schedule, width=40)
    assert '…' not in whole
    assert all(line.endswith('…') and len(line) <= 40 for line in cut.splitlines())
