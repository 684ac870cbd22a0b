"""The checker: refuses every malformed schedule, with the place, and no other."""

import re
from collections import Counter
from random import Random

import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import posted_earlier

from megatron_zbpp.analysis import checker as module
from megatron_zbpp.analysis.checker import ScheduleError, check
from megatron_zbpp.analysis.deadlock import prove
from megatron_zbpp.analysis.lowering import lower
from megatron_zbpp.analysis.program import EARLY, Receive, Send
from megatron_zbpp.ir import BW, KINDS, B, F, Pass, Placement, Schedule, Together, W
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.graph import chain
from megatron_zbpp.schedules import build, names
from megatron_zbpp.techniques.offload.graph import offload


def schedule_of(placement: Placement, num_microbatches: int, *orders: str) -> Schedule:
    passes = [map(Pass.parse, order.split()) for order in orders]
    return Schedule.of('x', placement, num_microbatches, passes)


def schedule_like(schedule: Schedule, orders: list[list[Pass]]) -> Schedule:
    return Schedule.of('like', schedule.placement, schedule.num_microbatches, orders)


def is_legal(schedule: Schedule) -> bool:
    try:
        check(schedule)
    except ScheduleError:
        return False
    return True


# ---- What is refused, and how it is said.

FIRST, SECOND = '0F0 0F1 0B0 0W0 0BW1', '1F0 1B0 1F1 1B1 1W0 1W1'


def test_split_and_fused_may_meet():
    check(schedule_of(Placement.loop(2), 2, FIRST, SECOND))


@pytest.mark.parametrize(
    ('first', 'cell', 'says'),
    [
        ('0F0 0B0 0W0 0BW1', '[0BW1]', 'never does the forward of microbatch 1 .*: add 0F1'),
        ('0F0 0F1 0B0 0BW1', '[0BW1]', 'never does the weight gradient .* 0 on stage 0: add 0W0$'),
        ('0F0 0F1 0W0 0BW1', '[0W0]', 'never does the input gradient .* 0 on stage 0: add 0B0$'),
        ('0F0 0F1 0B0 0W0', '[___]', 'input gradient of microbatch 1 .*: add 0B1 or 0BW1$'),
        ('0F0 0F1 0F0 0B0 0W0 0BW1', '[0F0]', '0F0 on rank 0 repeats the forward that 0F0'),
        ('0F0 0F1 0B0 0BW0 0BW1', '[0BW0]', '0BW0 .* repeats the input gradient that 0B0 has'),
        ('0F0 0F1 0BW0 0W0 0BW1', '[0W0]', '0W0 .* repeats the weight gradient that 0BW0 has'),
        ('1F0 0F0 0F1 0B0 0W0 0BW1', '[1F0]', '1F0 does not belong on rank 0: .* on rank 1'),
        ('0F0 0F1 0B0 0W0 0BW1 0F2', '[0F2]', '0F2 does not .* microbatches 0 to 1 only'),
        ('0F0 0F1 0B0 0W0 0BW1 7F0', '[7F0]', '7F0 does not .* stages 0 to 1 only'),
        ('0F1 0F0 0B0 0W0 0BW1', '[0F1]', '0F1 on rank 0 comes before 0F0: each forward of'),
        ('0F0 0F1 0B1 0B0 0W0 0W1', '[0B1]', '0B1 .* comes before 0B0: each input gradient of'),
        ('0F0 0F1 0B0 0BW1 0W0', '[0BW1]', '0BW1 .* comes before 0W0: each weight gradient of'),
        ('0B0 0F0 0F1 0W0 0BW1', '[0B0]', '0B0 on rank 0 comes before 0F0, which it needs'),
        ('0F0 0F1 0W0 0B0 0BW1', '[0W0]', '0W0 on rank 0 comes before 0B0, which it needs'),
    ],
)
def test_refusals(first, cell, says):
    with pytest.raises(ScheduleError) as caught:
        check(schedule_of(Placement.loop(2), 2, first, SECOND))
    assert re.search(says, caught.value.what)
    what, *grid = str(caught.value).splitlines()
    assert what == caught.value.what
    assert cell in grid[0].split() and grid[1].split() == ['rank', '1', *SECOND.split()]


def test_names_a_long_cycle():
    placement = Placement.loop(3, 2)
    orders = ('3F0 0F0', '1F0 4F0', '2F0 5F0')
    with pytest.raises(ScheduleError) as caught:
        check(schedule_of(placement, 1, *orders))
    assert caught.value.what == (
        'deadlock, a cycle: rank 0 at 3F0 waits for 2F0, still to come on rank 2; '
        'rank 2 at 2F0 waits for 1F0, still to come on rank 1; '
        'rank 1 at 1F0 waits for 0F0, still to come on rank 0: '
        'move an awaited pass to before the one that waits'
    )


def test_a_cell_waits_for_what_any_of_it_needs():
    """Its first pass could run by itself; the other's gradient comes behind what it makes."""
    cell = Together((Pass(F, 0, 1), Pass(BW, 0, 0)))
    waiting = [Pass(kind, 1, i) for kind in (F, BW) for i in range(2)]
    schedule = Schedule.of(
        'x', Placement.loop(2), 2, [[Pass(F, 0, 0), cell, Pass(BW, 0, 1)], waiting]
    )
    with pytest.raises(ScheduleError) as caught:
        check(schedule)
    assert caught.value.what == (
        'deadlock, a cycle: rank 0 at (0F1&0BW0) waits for 1BW0, still to come on rank 1; '
        'rank 1 at 1F1 waits for 0F1, still to come on rank 0: '
        'move an awaited pass to before the one that waits'
    )


def test_nobody_waits_for_a_copy_that_a_microbatch_does_without():
    cell = Together((Pass(F, 1, 1), Pass(BW, 1, 0)))
    first = [Pass(F, 0, 0), Pass(BW, 0, 0), Pass(F, 0, 1), Pass(BW, 0, 1)]
    graph = offload(chain(2), [1])
    orders = [first, [Pass(F, 1, 0), cell, Pass(BW, 1, 1)]]
    with pytest.raises(ScheduleError, match=r'rank 1 at \(1F1&1BW0\) waits for 0F1, still to come'):
        check(Schedule.of('x', Placement.loop(2), 2, orders, graph))


def test_refuses_an_unknown_kind():
    schedule = Schedule.of('x', Placement.loop(1), 1, [[Pass(F, 0, 0), Pass('R', 0, 0)]])
    with pytest.raises(ScheduleError, match="0R0 does not belong on rank 0: its kind 'R' is none"):
        check(schedule)


def test_refuses_no_microbatches_and_missing_ranks():
    with pytest.raises(ScheduleError, match='0 microbatches: a schedule needs'):
        check(schedule_of(Placement.loop(1), 0, ''))
    with pytest.raises(ScheduleError, match='passes of 1 ranks on a placement of 2'):
        check(schedule_of(Placement.loop(2), 1, '0F0 0BW0'))


def test_forward_only():
    """Legal if every pass is F; one lone backward makes it a training schedule with holes."""
    check(schedule_of(Placement.loop(2), 2, '0F0 0F1', '1F0 1F1'))
    with pytest.raises(ScheduleError, match='input gradient of microbatch 0 on stage 0'):
        check(schedule_of(Placement.loop(2), 1, '0F0', '1F0 1BW0'))


def test_a_large_grid_shows_only_the_place():
    schedule = build('zb-h1', 32, 64)
    orders = list(map(list, schedule.passes))
    orders[20].remove(Pass(W, 20, 30))
    with pytest.raises(ScheduleError, match='never does the weight gradient of') as caught:
        check(schedule_like(schedule, orders))
    _, above, *grid, below = str(caught.value).splitlines()
    assert (above, below) == ('(14 more above)', '(5 more below)')
    assert [line.split()[1] for line in grid] == [str(rank) for rank in range(14, 27)]
    assert '[20W31]' in grid[6] and max(map(len, grid)) <= 100


def test_programs_that_cannot_run_are_refused(monkeypatch):
    """As all were whose receives were posted a pass early: with the rule, and the places."""

    def lower_too_early(schedule, receives):
        prove(posted_earlier(lower(schedule, EARLY), 1))

    monkeypatch.setattr(module, 'lower', lower_too_early)
    with pytest.raises(ScheduleError, match='synchronisation: rank 0 waits at 0F1 for') as error:
        check(build('zb-h1', 2, 4))
    first, second = str(error.value).splitlines()[1:]
    assert '0F0 [0F1] 0B0' in first and '[1F0] 1B0' in second


# ---- Memory.


def test_memory_limit():
    schedule = build('1f1b', 4, 8)
    check(schedule, memory_limit=4)
    says = 'rank 0 holds activations of 4 at 0F3, 4 at its peak, above the limit of 3.5'
    with pytest.raises(ScheduleError, match=says) as caught:
        check(schedule, memory_limit=3.5)
    assert '[0F3]' in str(caught.value)


def test_memory_limit_in_the_units_of_the_costs():
    schedule = build('1f1b', 2, 4)
    costs = Costs.of((1, 1), (1, 1), (1, 1), activation=(100, 500))
    check(schedule, memory_limit=500, costs=costs)
    with pytest.raises(ScheduleError, match='rank 1 holds activations of 500 at 1F0'):
        check(schedule, memory_limit=499, costs=costs)
    with pytest.raises(ValueError, match='costs of 4 stages do not fit'):
        check(schedule, memory_limit=499, costs=Costs.uniform(Placement.v(2)))


@pytest.mark.parametrize('limit', [-1, float('nan')])
def test_memory_limit_must_be_an_amount(limit):
    with pytest.raises(ValueError, match=f'memory limit {limit} is not an amount'):
        check(build('1f1b', 2, 4), memory_limit=limit)


def test_a_limit_of_thirds_is_met():
    """7/3 of an activation fit into a limit of 7/3, whatever was rounded on the way."""
    schedule = oracle.random_schedule(Random(1), Placement.loop(1, 3), 5)
    peak = Counter(p.kind for p in schedule.passes[0])[F] / 3
    for limit in (peak, round(peak, 9)):
        check(schedule, memory_limit=limit)


# ---- The library passes.


@pytest.mark.parametrize('name', names())
@pytest.mark.parametrize('p', range(2, 6))
def test_every_family_is_accepted(name, p):
    for m in (1, 2, 3, p, 2 * p, 2 * p + 1):
        check(build(name, p, m))
        check(build(name, p, m).forward_only())
        check(build(name, p, m).reversed())


# ---- Mutants. (torch 2.13's validator lets duplicates and waits in a circle through.)


seeds = st.integers(0, 2**32)


@st.composite
def valid(draw) -> Schedule:
    """A schedule of the library, or any legal one."""
    p, m = draw(st.integers(2, 4)), draw(st.integers(1, 5))
    name = draw(st.sampled_from([*names(plain=True), 'random']))
    if name != 'random':
        return build(name, p, m)
    placement = draw(st.sampled_from([Placement.loop(p), Placement.v(p), Placement.wave(2, 3)]))
    return oracle.random_schedule(Random(draw(seeds)), placement, m)


@given(st.data(), valid())
def test_dropped(data, schedule):
    orders = list(map(list, schedule.passes))
    order = data.draw(st.sampled_from(orders))
    order.pop(data.draw(st.integers(0, len(order) - 1)))
    assert not is_legal(schedule_like(schedule, orders))


@given(st.data(), valid())
def test_duplicated(data, schedule):
    orders = list(map(list, schedule.passes))
    p = data.draw(st.sampled_from([p for order in orders for p in order]))
    order = data.draw(st.sampled_from(orders))
    order.insert(data.draw(st.integers(0, len(order))), p)
    assert not is_legal(schedule_like(schedule, orders))


@given(st.data(), valid())
def test_moved_to_another_rank(data, schedule):
    orders = list(map(list, schedule.passes))
    source, target = data.draw(st.permutations(range(len(orders))))[:2]
    p = orders[source].pop(data.draw(st.integers(0, len(orders[source]) - 1)))
    orders[target].insert(data.draw(st.integers(0, len(orders[target]))), p)
    assert not is_legal(schedule_like(schedule, orders))


@given(st.data(), valid())
def test_retargeted(data, schedule):
    """To another kind, stage or microbatch, known or not."""
    orders = list(map(list, schedule.passes))
    order = data.draw(st.sampled_from(orders))
    at = data.draw(st.integers(0, len(order) - 1))
    p = order[at]
    order[at] = data.draw(
        st.one_of(
            st.sampled_from([*KINDS, 'R', '']).map(lambda kind: p._replace(kind=kind)),
            st.integers(-1, 9).map(lambda stage: p._replace(stage=stage)),
            st.integers(-1, 6).map(lambda microbatch: p._replace(microbatch=microbatch)),
        ).filter(lambda other: other != p)
    )
    assert not is_legal(schedule_like(schedule, orders))


def depends(later: Pass, earlier: Pass) -> bool:
    """Whether `later` comes after `earlier` in every legal schedule that has both."""
    if later.stage == earlier.stage and later.microbatch > earlier.microbatch:
        jobs = ((F,), (B, BW), (W, BW))
        return any(later.kind in kinds and earlier.kind in kinds for kinds in jobs)
    if later.microbatch != earlier.microbatch or earlier.kind == W:
        return False
    if earlier.kind == F:
        return later.kind != F or later.stage > earlier.stage
    if later.kind == F or earlier.kind == later.kind == W:
        return False
    return later.stage < earlier.stage or (later.kind, later.stage) == (W, earlier.stage)


@given(st.data(), valid())
def test_swapped_across_a_dependency(data, schedule):
    orders = list(map(list, schedule.passes))
    order = data.draw(st.sampled_from(orders))
    pairs = [(i, j) for j in range(len(order)) for i in range(j) if depends(order[j], order[i])]
    i, j = data.draw(st.sampled_from(pairs))
    order[i], order[j] = order[j], order[i]
    assert not is_legal(schedule_like(schedule, orders))


# ---- Brute force on small cases: the same verdict, yes or no.

SMALL = (
    (Placement.loop(1), 2, (F, B, W)),
    (Placement.loop(1, 2), 1, (F, B, W)),
    (Placement.loop(2), 1, (F, B, W)),
    (Placement.v(2), 1, (F, BW)),
    (Placement.loop(2), 2, (F, BW)),
    (Placement.loop(3), 1, (F, B)),
    (Placement.loop(3), 2, (F,)),
    (Placement.v(2), 2, (F,)),
)


@pytest.mark.parametrize(('placement', 'm', 'kinds'), SMALL)
def test_every_order_of_small_schedules(placement, m, kinds):
    verdicts = Counter()
    for schedule in oracle.all_orders(placement, m, kinds):
        verdict = is_legal(schedule)
        assert verdict == oracle.legal(schedule), schedule.passes
        verdicts[verdict] += 1
    assert verdicts[False] and bool(verdicts[True]) == (kinds != (F, B))


PLACEMENTS = (Placement.loop(2), Placement.loop(3), Placement.v(2), Placement((1, 0, 0, 1, 0)))


@settings(max_examples=500)
@given(seeds, st.sampled_from(PLACEMENTS), st.integers(1, 3))
def test_agrees_with_brute_force(seed, placement, m):
    random = Random(seed)
    schedule = oracle.random_schedule(random, placement, m)
    assert is_legal(schedule)
    assert oracle.legal(schedule)
    for change in (oracle.shuffled, oracle.reordered):
        other = change(random, schedule)
        assert is_legal(other) == oracle.legal(other)


@settings(max_examples=200)
@given(seeds, st.sampled_from(PLACEMENTS[:3]))
def test_programs_of_accepted_schedules_always_end(seed, placement):
    """With sends that wait for their receive, whichever rank acts next."""
    schedule = oracle.random_schedule(Random(seed), placement, 2)
    assert oracle.programs_always_end(lower(schedule))


def test_the_oracle_sees_programs_that_deadlock():
    a, b = Pass(F, 1, 0), Pass(F, 1, 1)
    send_a, send_b = Send(Pass(F, 0, 0), a, 1), Send(Pass(F, 0, 1), b, 1)
    receive_a, receive_b = Receive(Pass(F, 0, 0), a, 0), Receive(Pass(F, 0, 1), b, 0)
    assert oracle.programs_always_end(((send_a, send_b), (receive_a, receive_b, a, b)))
    assert not oracle.programs_always_end(((send_a, send_b), (receive_b, receive_a, a, b)))
    assert not oracle.programs_always_end(((send_a, send_b), (receive_a, b, receive_b, a)))
    both_send = (Send(a, b, 1), Receive(a, a, 1)), (Send(a, a, 0), Receive(a, b, 0))
    assert not oracle.programs_always_end(both_send)
