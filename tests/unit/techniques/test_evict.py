"""Activations on a partner, whatever the order: within the limit, proven, and no pass moves.

BPipe: both of a pair at the bound, with as few evictions as were derived.
"""

import pytest
from figures import held, span
from oracle import programs_always_end
from orders import without
from published import published

from megatron_zbpp import Costs, Schedule, build, check
from megatron_zbpp.analysis.deadlock import DeadlockError, Rule, prove
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.analysis.program import Receive, Send
from megatron_zbpp.techniques.base import with_copies
from megatron_zbpp.techniques.evict import b_pipe, bound, with_eviction
from megatron_zbpp.techniques.offload import with_offload
from megatron_zbpp.techniques.recompute import with_recomputation


def evictions(schedule: Schedule) -> list[int]:
    """Of each rank."""
    return [sum(q.kind == 'E' for q in order) for order in schedule.passes]


def evicted(schedule: Schedule, limits, costs: Costs | None = None, stages=None) -> Schedule:
    costs = costs or Costs.uniform(schedule.placement)
    return with_eviction(schedule, stages or range(schedule.num_stages), costs, limits)


@pytest.mark.parametrize('row', published(__file__, 'evictions of any order'), ids=str)
def test_all_ranks_meet_the_bound_of_bpipe(row):
    """In 27 sizes, partners included, with no more evictions than were known to do, or BPipe's."""
    p, *counts = row
    for m, fewest in zip((p, 2 * p, 3 * p + 1), counts, strict=True):
        schedule = evicted(build('1f1b', p, m), [float(bound(p))] * p)
        check(schedule)
        assert max(held(schedule)) <= bound(p), m
        assert sum(evictions(schedule)) <= min(fewest, sum(evictions(b_pipe(p, m)))), m


def test_the_rank_in_the_middle_is_its_own_partner():
    """And nothing moves where there is room."""
    plain = build('zb-v', 4, 8)
    assert evicted(plain, [4.0] * 4) is plain
    plain = build('gpipe', 5, 8)
    schedule = evicted(plain, [4.0] * 5)
    check(schedule)
    assert {rank for rank, p in schedule if p.kind == 'E'} == {0, 1, 3, 4}


@pytest.mark.parametrize('rules', [{}, {'synchronises': True}, {'in_order': True}])
@pytest.mark.parametrize(('name', 'evicting'), [('zb-v', {0, 1}), ('zb-h1', {0}), ('bpipe', {0})])
def test_whatever_rank_acts_next_it_ends(name, evicting, rules):
    """One or both of a pair evict, in other orders than 1F1B's, too: by looking at every state."""
    made = b_pipe(4, 4) if name == 'bpipe' else evicted(build(name, 2, 4), [1.5, 1.5])
    assert {rank for rank, p in made if p.kind == 'E'} == evicting
    assert programs_always_end(check(made).programs, **rules)


def test_beside_what_runs_again_and_what_is_on_the_host():
    """Three chunks, one of each."""
    plain = build('interleaved', 4, 8, num_chunks=3)
    costs = with_copies(Costs.uniform(plain.placement), 0.2, 'EK')
    costs = costs.with_amounts(input=(0.01,) * 12)
    schedule = with_recomputation(plain, range(4, 8), costs)
    schedule = with_offload(schedule, range(8, 12), costs)
    before = peak(schedule, costs)
    schedule = with_eviction(schedule, range(4), costs, [0.7 * before[0], *(before[1:])])
    check(schedule)
    assert {p.kind for _, p in schedule} >= {*'ROLEK'}
    assert {p.stage for _, p in schedule if p.kind == 'E'} == {0}
    assert peak(schedule, costs)[0] < before[0]
    plain = build('gpipe', 2, 6)
    costs = Costs.uniform(plain.placement).with_amounts(input=(0.25, 0.25))
    schedule = with_eviction(with_recomputation(plain, [0], costs), [0], costs, [1.75, 9.0])
    check(schedule)
    assert any(p.kind == 'E' for _, p in schedule)
    assert peak(schedule, costs)[0] <= 1.75 < peak(with_recomputation(plain, [0], costs), costs)[0]


# ---- BPipe: both of a pair at the bound, with as few evictions as were derived.


@pytest.mark.parametrize('row', published(__file__, 'BPipe'), ids=str)
def test_evictions(row):
    p, *counts = row
    for k, expected in zip((1, 2, 4), counts, strict=True):
        assert evictions(b_pipe(p, k * p))[: p // 2] == expected


@pytest.mark.parametrize('p', [1, 2, 3, 4, 5, 6, 7, 8, 12])
def test_both_of_a_pair_are_at_the_bound(p):
    """A partner is charged its own most, and the most that it ever stores."""
    for m in {1, p, 2 * p, 2 * p + 1}:
        schedule, plain = b_pipe(p, m), build('1f1b', p, m)
        check(schedule)
        most, before = held(schedule), held(plain)
        assert max(most) <= bound(p) and span(schedule) == span(plain)
        for rank, partner in ((rank, p - 1 - rank) for rank in range(p // 2)):
            if evictions(schedule)[rank]:
                assert most[rank] == bound(p) and most[partner] > before[partner]
        assert without(schedule, 'EK') == plain.passes


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
        sent = [i for i in program if isinstance(i, Send) and i.saved and i.consumer.kind == 'E']
        assert len(sent) == evictions(schedule)[rank]


def test_a_partner_that_posts_late_is_a_deadlock():
    """The proof knows connections of what is saved."""
    programs = list(check(b_pipe(4, 4)).programs)
    late = [i for i in programs[3] if isinstance(i, Receive) and i.saved]
    programs[3] = (*(i for i in programs[3] if i not in late), *late)
    with pytest.raises(DeadlockError, match=r'rank 0 waits at send\(what 0F1 saved to rank 3\)'):
        prove(programs, Rule.RENDEZVOUS)
