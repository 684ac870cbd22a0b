"""Context exchange of equal slices: every block once, loads alike, and what bubble that leaves."""

from __future__ import annotations

import json

import pytest

from megatron_zbpp.analysis.checker import check
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.cli import main
from megatron_zbpp.ir import Placement, Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.mcore.settings import Settings
from megatron_zbpp.schedules import build
from megatron_zbpp.techniques.slices.balance import (
    Attention,
    balanced,
    exchanged,
    in_parts,
    loads,
    moves,
)
from megatron_zbpp.techniques.slices.graph import exchanging_context, of_one_slice


@pytest.mark.parametrize(('p', 'n'), [(2, 2), (4, 4), (4, 8), (8, 8), (3, 7), (4, 2)])
def test_every_block_is_computed_once_and_loads_differ_by_one(p, n):
    for tick in range(n):
        running = tuple((tick - rank) % n for rank in range(p))
        found = moves(running)
        assert len({move[:3] for move in found}) == len(found), 'no block twice'
        assert all(move.key < move.query == running[move.source] for move in found)
        own = [part + 0.5 for part in running]
        for move in found:
            own[move.source] -= 1
            own[move.target] += 1
        assert max(own) - min(own) <= 1 and sum(own) == sum(running) + p / 2
        made = loads(p, n)
        assert own == [made[rank][part].blocks for rank, part in enumerate(running)]
    moved = sum(load.moved for each in loads(p, n) for load in each)
    assert moved == 2 * sum(
        len(moves(tuple((tick - rank) % n for rank in range(p)))) for tick in range(n)
    )


def share(schedule: Schedule, costs: Costs) -> float:
    timeline = simulate(schedule, costs)
    busy = max(map(timeline.busy, range(schedule.num_ranks)))
    return 1 - busy / timeline.makespan


@pytest.mark.parametrize(
    ('name', 'most'), [('seq1f1b', 0.11), ('seq1f1b-zb', 0.03), ('seq-zb-v', 0.014)]
)
def test_uniform_slices_lose_what_they_gain_but_for_an_exchange(name, most):
    """With as many slices as ranks and 60 % of attention it is better than balanced sizes."""
    schedule, attention = build(name, 8, 16, num_slices=8), Attention(0.6)
    plain = Costs.uniform(schedule.placement)
    even = in_parts(plain, balanced(8, 131072, attention, plain), attention)
    found = exchanged(plain, schedule.placement, 8, attention)
    assert share(schedule, found) < most
    assert share(schedule, in_parts(plain, (1,) * 8, attention)) > 2.5 * share(schedule, found)
    assert simulate(schedule, found).makespan < simulate(schedule, even).makespan


def test_blocks_that_move_are_waited_for():
    placement, attention = Placement.loop(4), Attention(0.4)
    plain = Costs.uniform(placement)
    none, some = (exchanged(plain, placement, 4, attention, wire) for wire in (0.0, 0.01))
    for rank, row in enumerate(loads(4, 4)):
        assert sum(none.parts['F'][rank]) == pytest.approx(1)
        for part, load in enumerate(row):
            wait = some.parts['F'][rank][part] - none.parts['F'][rank][part]
            assert wait == pytest.approx(0.01 * load.moved)
            wait = some.parts['B'][rank][part] - none.parts['B'][rank][part]
            assert wait == pytest.approx(0.0175 * load.moved)
    assert none.parts['W'] == in_parts(plain, (1,) * 4, attention).parts['W']


def run(capsys, line: str) -> dict:
    assert main([*line.split(), '--json']) == 0
    return json.loads(capsys.readouterr().out)


def test_command_line(capsys, tmp_path):
    line = '--schedule slimpipe --pp 4 --microbatches 4 --slices 4 --attention 0.5'
    line += ' --vocab-parallel 0.2'
    slow, even, wired = (
        run(capsys, f'simulate {line} {more}')['makespan']
        for more in ('', '--context-exchange 0', '--context-exchange 0.02')
    )
    assert even < slow - 0.2 and even < wired
    file = tmp_path / 'slimpipe.json'
    assert main(f'convert {line} --context-exchange 0 -o {file}'.split()) == 0
    schedule = Schedule.from_json(file.read_text())
    check(schedule)
    again = f'simulate --file {file} --attention 0.5 --context-exchange 0 --vocab-parallel 0.2'
    capsys.readouterr()
    assert run(capsys, again)['makespan'] == pytest.approx(even)
    said = (
        'slimpipe has context exchange: simulated, does not train yet: make it without '
        '--context-exchange, of slices that take equal times: --slices balanced:N'
    )
    with pytest.raises(ValueError, match=said):
        Settings(schedule)
    assert of_one_slice(exchanging_context(build('seq1f1b', 2, 2).graph)).techniques == ()
    assert (
        main('simulate --schedule 1f1b --pp 2 --microbatches 2 --context-exchange 0'.split()) == 2
    )
    assert 'needs slices of one size: give --slices N' in capsys.readouterr().err
