"""BPipe: both of a pair at the bound, with as few evictions as were derived."""

from __future__ import annotations

import pytest
from oracle import programs_always_end

from megatron_zbpp.analysis.checker import ScheduleError, check
from megatron_zbpp.analysis.deadlock import DeadlockError, Rule, prove
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.analysis.program import Receive, Send
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import Pass
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.schedules import build
from megatron_zbpp.techniques.evict.place import b_pipe, bound

# p: evictions of each rank at m = p, 2p, 4p
EVICTIONS = {
    4: ((2, 0), (4, 0), (8, 0)),
    6: ((2, 2, 0), (6, 4, 0), (12, 8, 0)),
    8: ((3, 2, 2, 0), (7, 6, 4, 0), (15, 12, 8, 0)),
    10: ((4, 3, 2, 2, 0), (8, 8, 6, 4, 0), (20, 16, 12, 8, 0)),
    12: ((5, 4, 3, 2, 2, 0), (10, 9, 9, 6, 4, 0), (23, 20, 18, 13, 8, 0)),
    16: ((7, 6, 5, 4, 3, 2, 2, 0), (14, 12, 11, 11, 9, 6, 4, 0), (29, 29, 25, 22, 18, 14, 8, 0)),
}


def evictions(schedule):
    """Of each rank."""
    return tuple(sum(q.kind == 'E' for q in order) for order in schedule.passes)


@pytest.mark.parametrize('p', EVICTIONS)
def test_evictions(p):
    for k, expected in zip((1, 2, 4), EVICTIONS[p], strict=True):
        assert evictions(b_pipe(p, k * p))[: p // 2] == expected


@pytest.mark.parametrize('p', [1, 2, 3, 4, 5, 6, 7, 8, 12])
def test_both_of_a_pair_are_at_the_bound(p):
    """A partner is charged its own most, and the most that it ever stores."""
    for m in {1, p, 2 * p, 2 * p + 1}:
        schedule, plain = b_pipe(p, m), build('1f1b', p, m)
        check(schedule)
        costs = Costs.uniform(schedule.placement)
        held = peak(schedule, costs)
        assert max(held) <= bound(p)
        for rank in range(p // 2):
            if evictions(schedule)[rank]:
                partner = p - 1 - rank
                assert held[rank] == bound(p) and held[partner] > peak(plain, costs)[partner]
        assert simulate(schedule, costs).makespan == simulate(plain, costs).makespan
        passes = tuple(tuple(q for q in order if q.kind not in 'EK') for order in schedule.passes)
        assert passes == plain.passes


@pytest.mark.parametrize('p', [4, 5, 8])
def test_what_is_saved_goes_to_the_partner_and_back(p):
    """Sent right behind the forward, taken back before the pass that takes memory for it."""
    schedule = b_pipe(p, 2 * p)
    programs = check(schedule).programs
    for rank, program in enumerate(programs):
        partner = programs[p - 1 - rank]
        for i in (i for i in program if isinstance(i, Send) and i.saved):
            received = Receive(i.producer, i.consumer, rank, saved=True)
            assert i.peer == p - 1 - rank and received in partner
            if i.consumer.kind == 'E':
                assert program.index(i) > program.index(i.producer)
                assert i.producer.kind == 'F' and program.index(i) < program.index(i.consumer)
            else:
                assert partner.index(received) + 1 == partner.index(i.consumer)
        count = evictions(schedule)[rank]
        assert (
            sum(isinstance(i, Send) and i.saved and i.consumer.kind == 'E' for i in program)
            == count
        )


@pytest.mark.parametrize('p', [4, 5, 6, 8, 12])
def test_programs_hold_no_more(p):
    """Own activations, and those that are kept for the partner, in the order of each program."""
    for m in (p, 2 * p + 1):
        for program in check(b_pipe(p, m)).programs:
            held = kept = 0
            for i in program:
                if isinstance(i, Pass):
                    held += {'F': 1, 'K': 1, 'E': -1, 'BW': -1}[i.kind]
                elif isinstance(i, Receive) and i.saved:
                    kept += i.consumer.kind == 'E'
                elif isinstance(i, Send) and i.saved:
                    kept -= i.consumer.kind == 'K'
                assert held + kept <= bound(p)


def test_a_partner_that_posts_late_is_a_deadlock():
    """The proof knows connections of what is saved."""
    programs = list(check(b_pipe(4, 4)).programs)
    late = [i for i in programs[3] if isinstance(i, Receive) and i.saved]
    programs[3] = (*(i for i in programs[3] if i not in late), *late)
    with pytest.raises(DeadlockError, match=r'rank 0 waits at send\(what 0F1 saved to rank 3\)'):
        prove(programs, Rule.RENDEZVOUS)


@pytest.mark.parametrize('rules', [{}, {'synchronises': True}, {'in_order': True}])
def test_whatever_rank_acts_next_it_ends(rules):
    """By looking at every state that four ranks can reach."""
    assert programs_always_end(check(b_pipe(4, 4)).programs, **rules)


def test_memory_limit_counts_what_is_stored():
    with pytest.raises(ScheduleError, match=r'rank'):
        check(b_pipe(4, 8), memory_limit=2)
    check(b_pipe(4, 8), memory_limit=3)
