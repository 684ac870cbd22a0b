"""What programs bear: every rule of a backend, and what the proof says of those that do not."""

import itertools
import time
from collections import Counter
from random import Random

import oracle
import pytest
from grids import grid
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import posted_earlier, posted_later, side_by_side

from megatron_zbpp import Pass, Placement, build
from megatron_zbpp.analysis.deadlock import EVERY_RULE, DeadlockError, Rule, prove
from megatron_zbpp.analysis.lowering import lower
from megatron_zbpp.analysis.program import BY_TAKER, EARLY, LATE, LATEST, RECEIVES, Receive, Send
from megatron_zbpp.analysis.run_ahead import passes_ahead, passes_run_ahead, rank_order, split
from megatron_zbpp.schedules import names

SETS = [
    Rule.RENDEZVOUS,
    Rule.RENDEZVOUS | Rule.SYNCHRONISATION,
    Rule.RENDEZVOUS | Rule.LAUNCH_ORDER,
    EVERY_RULE,
]
seeds = st.integers(0, 2**32)
EVERY_TIME = (*RECEIVES, BY_TAKER)
PLACEMENTS = (Placement.loop(2), Placement.loop(3), Placement.v(2), Placement((1, 0, 0, 1, 0)))


def cases(name, sizes, microbatches):
    """A family's schedules for training and evaluation, where it has them."""
    for p, m in itertools.product(sizes, microbatches):
        try:
            schedule = build(name, p, m)
        except ValueError:
            continue
        yield schedule
        yield schedule.forward_only()


@grid(name=names(), microbatches=((1, 8), (2, 9), (3, 12), (4, 6), (5, 16)), receives=EVERY_TIME)
def test_every_family_bears_every_rule(name, microbatches, receives):
    """Whole, with forwards run ahead by any number of ranks, and several pipelines together."""
    for schedule in cases(name, (2, 3, 4, 8), microbatches):
        programs = lower(schedule, receives)
        prove(programs, EVERY_RULE)
        counts = passes_ahead(schedule)
        for ranks_ahead in {1, schedule.num_ranks // 2, schedule.num_ranks}:
            ahead = passes_run_ahead(schedule, counts, ranks_ahead)
            parts = [split(program, ahead) for program in programs]
            prove([begun + rest for begun, rest in parts], EVERY_RULE)
            require_closed(programs, parts)
        require_forwards(schedule, ahead)
        prove(list(side_by_side(programs, programs)), EVERY_RULE)


def require_closed(programs, parts):
    """All that is sent ahead is received ahead: nothing of a dropped forward is on the way."""
    for program, (begun, rest) in zip(programs, parts, strict=True):
        assert Counter(program) == Counter(begun + rest)
    sent, received = (
        sorted(i.consumer for begun, _ in parts for i in begun if isinstance(i, end))
        for end in (Send, Receive)
    )
    assert sent == received


def require_forwards(schedule, ahead):
    """What is ahead of all ranks needs nothing from behind."""
    order, rank_of = rank_order(schedule.placement), schedule.placement.only_route
    assert passes_ahead(schedule)[order[-1]] == 0
    for p in ahead:
        assert p.kind == 'F'
        if p.stage:
            assert p._replace(stage=p.stage - 1) in ahead
            assert order.index(rank_of[p.stage - 1]) <= order.index(rank_of[p.stage])


@settings(max_examples=60)
@given(seeds, st.sampled_from(PLACEMENTS), st.integers(1, 4), st.sampled_from(EVERY_TIME))
def test_any_valid_schedule_bears_every_rule(seed, placement, m, receives):
    lower(oracle.random_schedule(Random(seed), placement, m), receives)


@settings(max_examples=150)
@given(seeds, st.sampled_from(PLACEMENTS[:3]), st.sampled_from(SETS))
def test_agrees_with_brute_force(seed, placement, rules):
    """Receives posted anywhere before their pass: the same verdict, whichever rank acts next."""
    random = Random(seed)
    programs = lower(oracle.random_schedule(random, placement, 2))
    programs = tuple(tuple(moved(random, program)) for program in programs)
    try:
        prove(programs, rules)
        ends = True
    except ValueError:
        ends = False
    synchronises, in_order = Rule.SYNCHRONISATION in rules, Rule.LAUNCH_ORDER in rules
    assert ends == oracle.programs_always_end(programs, synchronises, in_order)


def moved(random, program):
    """`program` with some receives a few places earlier."""
    program = list(program)
    for at, i in enumerate(program):
        if isinstance(i, Receive) and random.random() < 0.3:
            program.insert(max(0, at - random.randint(1, 3)), program.pop(at))
    return program


@pytest.mark.parametrize('name', ['1f1b', 'zb-h1', 'zb-h2', 'zb-v', 'v-half', 'interleaved'])
def test_a_pass_earlier_is_stuck_where_passes_synchronise(name):
    """What was posted a pass early for all backends: the proof names the rule and the places."""
    programs = posted_earlier(lower(build(name, 4, 8), EARLY), 1)
    prove(programs, Rule.RENDEZVOUS)
    with pytest.raises(DeadlockError, match='rendezvous, device synchronisation:') as error:
        prove(programs)
    assert error.value.rules == Rule.RENDEZVOUS | Rule.SYNCHRONISATION
    for rank, at in error.value.cells:
        p = [i for i in programs[rank] if isinstance(i, Pass)][at]
        assert error.value.stuck[rank].startswith(str(p))
        assert f'rank {rank} waits at {p} for receive(for ' in str(error.value)


@pytest.mark.parametrize('receives', [LATE, LATEST])
@pytest.mark.parametrize(('name', 'limits'), [
    ('1f1b', 0), ('zb-h1', 0), ('zb-2p', 4), ('v-half', 6), ('zb-v', 6), ('dualpipe-v', 12),
])  # fmt: skip
def test_a_pass_later_is_stuck_where_the_sender_waits(name, limits, receives):
    """Of one receive the limit may be its place: behind the next pass its sender waits for ever."""
    programs, stuck = lower(build(name, 4, 8), receives), []
    for receive, later in posted_later(programs):
        try:
            prove(later)
        except DeadlockError as error:
            assert error.rules == Rule.RENDEZVOUS
            assert f'for {receive.consumer}' in str(error)
            stuck.append(receive)
    assert len(stuck) == limits


def test_earlier_still_is_stuck_in_launch_order():
    programs = posted_earlier(lower(build('gpipe', 2, 4), EARLY), 2)
    with pytest.raises(DeadlockError, match='rendezvous, launch order: rank 0 waits at') as error:
        prove(programs, Rule.RENDEZVOUS | Rule.LAUNCH_ORDER)
    assert 'receive(for' in str(error.value)
    # two ranks that both send first hang where sends rendezvous
    a, b = [[Pass('F', stage, i) for i in range(2)] for stage in range(2)]
    programs = (
        (a[0], Send(a[0], b[1], 1), Receive(b[0], a[1], 1), a[1]),
        (b[0], Send(b[0], a[1], 0), Receive(a[0], b[1], 0), b[1]),
    )
    with pytest.raises(DeadlockError, match='by the rules of rendezvous: rank 0 waits at send'):
        prove(programs)
    # though one is open: it is for a pass that comes later
    a, b = [[Pass('F', stage, i) for i in range(2)] for stage in range(2)]
    send, other = Send(a[0], b[1], 1), Send(b[0], a[1], 0, saved=True)
    programs = ((Receive(b[0], a[1], 1), a[0], send, a[1]), (b[0], other, Send(b[0], a[1], 0)))
    with pytest.raises(DeadlockError) as error:
        prove(programs)
    assert error.value.stuck == {0: str(send), 1: str(other)}
    a, b = Pass('F', 1, 0), Pass('F', 1, 1)
    made = Pass('F', 0, 0)
    programs = (
        (made, Send(made, a, 1), Send(made, b, 1)),
        (Receive(made, b, 0), Receive(made, a, 0), a, b),
    )
    with pytest.raises(ValueError, match='rank 0 sends what 0F0 made for 1F0 where rank 1 awaits'):
        prove(programs)


def test_replicas_that_differ_are_refused():
    """Collectives couple pipelines: another order of passes in one of them may close a circle."""
    one, other = build('1f1b', 2, 4), build('gpipe', 2, 4)
    prove(list(side_by_side(lower(one), lower(one), lower(one))))
    with pytest.raises(DeadlockError, match=r'all-reduce in .* of ranks 0, 2'):
        prove(list(side_by_side(lower(one), lower(other))))
    early = posted_earlier(lower(one, EARLY), 1)
    with pytest.raises(DeadlockError, match='device synchronisation'):
        prove(list(side_by_side(lower(one), early)))


def test_proof_is_linear():
    """Sixteen times the microbatches, about sixteen times as long."""
    seconds = []
    for m in (16, 256):
        programs = lower(build('zb-h1', 8, m))
        taken = []
        for _ in range(5):
            start = time.thread_time()
            prove(programs)
            taken.append(time.thread_time() - start)
        seconds.append(min(taken))
    assert seconds[1] < 40 * seconds[0]
