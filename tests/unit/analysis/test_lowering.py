"""Lowering: messages in one global order, receives posted in time, no deadlock."""

import cProfile
import pstats
from collections import defaultdict
from dataclasses import replace
from random import Random
from unittest import mock

import oracle
import pytest
from grids import grid
from hypothesis import given, settings
from hypothesis import strategies as st
from orders import by_hand
from paths import ROOT
from programs import Timing, awaited_early, in_flight, posted_later, spinning
from published import published

from megatron_zbpp import Costs, Pass, Placement, build, check, simulate
from megatron_zbpp.analysis import lowering
from megatron_zbpp.analysis.checker import is_mirrored
from megatron_zbpp.analysis.deadlock import DeadlockError, prove
from megatron_zbpp.analysis.lowering import lower, usual_costs
from megatron_zbpp.analysis.program import (
    BY_TAKER,
    EARLY,
    LATE,
    LATEST,
    RECEIVES,
    Exchange,
    Hand,
    Receive,
    Send,
)
from megatron_zbpp.analysis.run_ahead import evaluation, passes_ahead, rank_order
from megatron_zbpp.ir import chain
from megatron_zbpp.schedules import own_families
from megatron_zbpp.techniques.slices.place import in_slices
from megatron_zbpp.techniques.vocabulary.graph import USUAL_SHARE
from megatron_zbpp.techniques.vocabulary.place import (
    in_shards,
    with_embedding,
    with_shard_times,
    with_shards,
)

schedules = st.builds(
    build, st.sampled_from(['1f1b', 'zb-h1', 'zb-v']), st.integers(2, 5), st.integers(1, 9)
)
receives = st.sampled_from(RECEIVES)


@given(schedules, receives)
def test_every_message_has_both_ends(schedule, receives):
    programs = lower(schedule, receives)
    sends, receives, hands = set(), set(), 0
    for rank, program in enumerate(programs):
        assert [i for i in program if isinstance(i, Pass)] == list(schedule.passes[rank])
        for at, i in enumerate(program):
            if isinstance(i, Send):
                sends.add((rank, i.peer, i.consumer))
                # what a pass made is sent before the next one runs
                assert i.producer == [p for p in program[:at] if isinstance(p, Pass)][-1]
            elif isinstance(i, Receive):
                receives.add((i.peer, rank, i.consumer))
                assert i.consumer in program[at:]
            hands += isinstance(i, Hand)
    assert sends == receives
    # every F but the last stage's hands on, and every B but the first stage's
    assert len(sends) + hands == 2 * (schedule.num_stages - 1) * schedule.num_microbatches


@given(schedules, receives, st.integers(0, 2**32).map(Random))
def test_what_is_not_under_way_has_come(schedule, receives, random):
    """Whichever rank acts next: of each channel all but so many messages have been taken."""
    programs = lower(schedule, receives)
    cursor, arrived, sent = [0] * len(programs), set(), defaultdict(list)
    taken = [set() for _ in programs]
    expected = [{i.consumer for i in program if isinstance(i, Receive)} for program in programs]
    running = set(range(len(programs)))
    while running:
        rank = random.choice(sorted(running))
        i = programs[rank][cursor[rank]]
        if isinstance(i, Pass):
            if i in expected[rank] and i not in arrived:
                continue  # it waits for its message
            taken[rank].add(i)
        elif isinstance(i, Send):
            arrived.add(i.consumer)
            sent[rank, i.peer].append(i.consumer)
            assert taken[i.peer].issuperset(sent[rank, i.peer][: -i.under_way])
        cursor[rank] += 1
        if cursor[rank] == len(programs[rank]):
            running.remove(rank)


def test_few_messages_are_under_way():
    """In 1F1B as many forwards as a rank holds, and a gradient while the next is made."""
    for rank, program in enumerate(lower(build('1f1b', 4, 32))):
        most = defaultdict(int)
        for i in program:
            if isinstance(i, Send):
                most[i.peer - rank] = max(most[i.peer - rank], i.under_way)
        assert most.get(1, 0) <= 4 - rank
        assert most.get(-1, 0) <= 4


TIMES = ((1, 1, 1), (1, 1.3, 0.7), (1, 1.4, 0.9))  # of F, B and W


def slowdown(schedule, receives, costs, **ways: bool) -> float:
    """Time over that where each message leaves at once."""
    programs = lower(schedule, receives)
    at_once = Timing(programs, costs, streams=False, in_order=False).makespan
    return Timing(programs, costs, **ways).makespan / at_once


@pytest.mark.parametrize('times', TIMES)
@pytest.mark.parametrize('receives', [EARLY, LATE])
@pytest.mark.parametrize('name', ['1f1b', 'interleaved', 'zb-h1', 'zb-2p', 'zb-v', 'v-half'])
def test_messages_travel_while_their_receiver_computes(name, receives, times):
    """Where receives begin behind the passes launched before them, and where all begins in order:
    hardly slower than where each message leaves at once, at a tenth of a rank's F a message."""
    schedule = build(name, 8, 32)
    costs = replace(Costs.uniform(schedule.placement, *times), comm=0.1)
    for streams, in_order in ((True, False), (False, True), (True, True)):
        assert slowdown(schedule, receives, costs, streams=streams, in_order=in_order) <= 1.003


# ---- When receives are posted: fewer are in flight, fewer kernels spin beside passes, for nothing.


PAGE = ROOT / 'docs' / 'gpu-tips.md'


@pytest.mark.parametrize('name', ['1f1b', 'zb-h1', 'zb-v', 'dualpipe-v'])
def test_fewer_receives_are_in_flight(name):
    """The later they are posted; how many: numbers.json."""
    for m in (8, 16):
        schedule = build(name, 4, m)
        counted = [in_flight(lower(schedule, receives)) for receives in RECEIVES]
        assert counted == sorted(counted, reverse=True) and counted[0][0] > counted[-1][0]


@pytest.mark.parametrize('name', ['1f1b', 'zb-h1', 'zb-2p', 'zb-v', 'dualpipe-v', 'interleaved'])
def test_the_page_says_how_long_they_spin(name):
    """Neither do sends in their place: of both, the page names the share for late receives."""
    schedule = build(name, 4, 16)
    shares = {receives: spinning(schedule, lower(schedule, receives)) for receives in RECEIVES}
    early, late, latest = (round(100 * shares[receives][0]) for receives in RECEIVES)
    either = round(100 * shares[LATE][1])
    assert f'| `{name}` | {early} | {late} | {latest} | {either} |' in PAGE.read_text()
    for of_either in (0, 1):
        parts = [shares[receives][of_either] for receives in RECEIVES]
        assert parts == sorted(parts, reverse=True)


@pytest.mark.parametrize(('message', 'most'), [(0.1, 1.045), (0.01, 1.005)])
@pytest.mark.parametrize('name', ['1f1b', 'interleaved', 'zb-h1', 'zb-v'])
def test_what_the_latest_costs(name, message, most):
    """Little, where messages are short: see the page."""
    schedule = build(name, 8, 32)
    costs = replace(Costs.uniform(schedule.placement), comm=message)
    for in_order in (False, True):
        assert slowdown(schedule, LATEST, costs, streams=True, in_order=in_order) <= most


# messages of forwards, for how many of them a rank waits before a pass that does not take them: as
# receives are posted late, and by takers
WAITS = {
    '1f1b': (48, 24, 0), 'zb-h1': (48, 39, 0), 'bpipe': (48, 24, 0), 'interleaved': (112, 104, 12),
    'zb-v': (96, 90, 33), 'v-half': (96, 60, 2), 'v-min': (96, 47, 1), 'dualpipe-v': (96, 90, 32),
}  # fmt: skip


@pytest.mark.parametrize('name', WAITS)
def test_shapes_are_awaited_by_the_pass_that_takes_the_message(name):
    """Or earlier, where passes that synchronise would stop for ever."""
    schedule = build(name, 4, 16)
    by_taker = lower(schedule, BY_TAKER)
    sent, late, left = WAITS[name]
    assert awaited_early(lower(schedule, LATE)) == (late, sent)
    assert awaited_early(by_taker) == (left, sent)
    for receive, later in posted_later(by_taker):
        if receive.consumer.kind == 'F':
            with pytest.raises(DeadlockError):
                prove(later)


def test_an_evaluation_waits_for_what_it_takes():
    for name in WAITS:
        programs = lower(evaluation(build(name, 4, 16)), BY_TAKER)
        assert awaited_early(programs)[0] == (2 if name in ('zb-v', 'dualpipe-v') else 0)


# ---- A collective ends when all ranks have entered it: none may first run a pass that ends later.


def latest(schedule, costs):
    """By how much the last rank enters a collective behind the last contribution, in forwards."""
    ends = simulate(schedule, costs).by_pass
    late = 0.0
    for program in lowering.lower(schedule):
        now = 0.0
        for each in program:
            if isinstance(each, Pass):
                now = ends[each][1]
            elif isinstance(each, Exchange):
                late = max(late, now - max(ends[p][1] for p in each.producers))
    return late


def made(name, share):
    host = build(name, 8, 16)
    costs = with_shard_times(Costs.uniform(host.placement), host.placement, share)
    return in_shards(host, costs), costs


@pytest.mark.parametrize('name', ['1f1b', 'zb-h1', 'zb-v'])
def test_all_ranks_enter_before_the_last_contribution(name):
    """By the costs that a schedule was made for, else by what shards usually take.

    The latency by which programs are written makes some hundredths.
    """
    for share, known in ((USUAL_SHARE, False), (0.5, True), (0.8, True)):
        schedule, costs = made(name, share)
        own = replace(schedule, costs=costs) if known else schedule
        assert latest(own, costs) < 0.2
    # as programs were where S and T took no time
    untimed = Costs.uniform(schedule.placement, comm=0.01)
    with mock.patch.object(lowering, 'usual_costs', lambda _: untimed):
        assert latest(schedule, costs) > 0.3


def calls(name: str, p: int, m: int) -> float:
    """Calls for each pass, to build and to check a schedule."""
    chain.cache_clear()
    profile = cProfile.Profile()
    schedule = profile.runcall(build, name, p, m)
    profile.runcall(check, schedule)
    return pstats.Stats(profile).total_calls / sum(map(len, schedule.passes))


@pytest.mark.parametrize(
    ('name', 'small', 'large'),
    [
        ('1f1b', (8, 64), (8, 512)),
        ('1f1b', (8, 512), (64, 64)),
        ('zb-v', (4, 64), (4, 256)),
        ('zb-v', (4, 256), (16, 64)),
        ('zb-v', (32, 8), (128, 8)),  # fewer microbatches than ranks
        pytest.param('zb-v', (64, 16), (256, 16), marks=pytest.mark.full),
        ('interleaved', (4, 256), (32, 32)),
        ('dualpipe-v', (4, 256), (16, 64)),
        ('dualpipe', (4, 256), (16, 64)),
        ('chimera', (4, 256), (16, 64)),
        pytest.param('dualpipe', (8, 64), (64, 512), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_calls_for_each_pass_do_not_grow(name, small, large):
    assert calls(name, *large) < 1.5 * calls(name, *small)


# ---- What may run ahead: closed under what it needs, and never mixed up on the way.


def test_what_a_rank_hands_to_itself_may_run_ahead():
    """Two stages that follow each other on the first rank: both forwards of each microbatch."""
    orders = '0F0 1F0 0F1 1F1 1BW0 0BW0 1BW1 0BW1', '2F0 3F0 2F1 3F1 3BW0 2BW0 3BW1 2BW1'
    assert passes_ahead(by_hand(Placement((0, 0, 1, 1)), 2, *orders)) == (4, 0)


@pytest.mark.parametrize(
    ('name', 'counts'), [('zb-2p', (7, 5, 3, 0)), ('zb-h1', (4, 3, 2, 0)), ('1f1b', (4, 3, 2, 0))]
)
def test_warm_up_is_ahead(name, counts):
    """The chain of ranks follows the stages."""
    assert passes_ahead(build(name, 4, 16)) == counts
    assert rank_order(Placement.loop(3, 2)) == rank_order(Placement.v(3)) == (0, 1, 2)


# ---- Evaluations: an order that is made for forwards alone.


EVALUATED = [each.name for each in own_families(every=True) if not each.asynchronous]
PLACEMENTS = Placement.loop(3, 2), Placement.v(2), Placement.wave(2, 3), Placement((1, 0, 0, 1, 0))


ROUNDING = 1e-12  # sums of times have other orders


def times_ideal(schedule):
    """Time over that of the busiest rank, if stages and messages take what programs assume."""
    timeline = simulate(schedule, Costs.uniform(schedule.placement, comm=0.01))
    return timeline.makespan / max(map(timeline.busy, range(schedule.num_ranks)))


def require_in_order(schedule, evaluated):
    """It runs the same forwards, deadlock-free, and each stage's in the order of microbatches."""
    check(evaluated)
    for own, order in zip(schedule.forward_only().passes, evaluated.passes, strict=True):
        assert sorted(own) == sorted(order)
        for stage in {p.stage for p in order}:
            own = [(p.microbatch, p.slice) for p in order if (p.kind, p.stage) == ('F', stage)]
            assert own == sorted(own)


@grid(name=EVALUATED, size=((2, 3), (4, 8), (4, 6), (6, 7), (8, 32)))
def test_every_family(name, size):
    """It is never slower than the order that was made for backwards, nor are more messages open."""
    try:
        schedule = build(name, *size)
    except ValueError:
        pytest.skip('the family does not know this size')
    before, evaluated = schedule.forward_only(), evaluation(schedule)
    require_in_order(schedule, evaluated)
    assert times_ideal(evaluated) <= times_ideal(before)
    assert in_flight(lower(evaluated))[1] <= max(1, in_flight(lower(before))[1])
    assert is_mirrored(evaluated) >= is_mirrored(before)


@pytest.mark.parametrize(('name', 'before', 'after'), published(__file__, 'evaluation'))
def test_it_takes_what_forwards_take(name, before, after):
    schedule = build(name, 8, 32)
    assert times_ideal(schedule.forward_only()) == pytest.approx(before, abs=5e-4)
    assert times_ideal(evaluation(schedule)) == pytest.approx(after, abs=5e-4)


@grid(name=('1f1b', 'zb-v', 'v-min', 'interleaved'), cut=(1, 3), embedding=(False, True))
def test_shards_of_the_vocabulary_and_slices(name, cut, embedding):
    schedule = with_shards(in_slices(name, 4, 8, cut))
    schedule = with_embedding(schedule) if embedding else schedule
    evaluated = evaluation(schedule)
    require_in_order(schedule, evaluated)
    ahead, own = (simulate(s, usual_costs(s)) for s in (schedule.forward_only(), evaluated))
    assert own.makespan <= ahead.makespan * (1 + ROUNDING)


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from(PLACEMENTS), st.integers(1, 5))
def test_any_plan(seed, placement, m):
    """A user's own order, on any placement."""
    schedule = oracle.random_schedule(Random(seed), placement, m)
    evaluated = evaluation(schedule)
    require_in_order(schedule, evaluated)
    assert times_ideal(evaluated) <= times_ideal(schedule.forward_only()) * (1 + ROUNDING)
