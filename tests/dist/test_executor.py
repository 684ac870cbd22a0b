"""The executor on plain torch stages: schedules that no one chose, to the bit."""

from __future__ import annotations

from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from programs import awaited_early, pairs
from stages import ROWS, WIDTH, LinearStage, reference, uneven

from megatron_zbpp.analysis.checker import check
from megatron_zbpp.analysis.lowering import lower
from megatron_zbpp.analysis.program import BY_TAKER, LATE, Receive
from megatron_zbpp.ir import BW, F, Pass, Schedule, W
from megatron_zbpp.runtime.channels import Channels, Message
from megatron_zbpp.runtime.clock import HostClock
from megatron_zbpp.runtime.executor import Executor
from megatron_zbpp.runtime.weight_grads import WeightGradStore
from megatron_zbpp.schedules import build


def execute(
    schedule: Schedule,
    train: bool = True,
    separate: bool = False,
    varying: bool = False,
    receives: str = LATE,
):
    """Runs `schedule` on each rank: by stage (losses, gradients, those complete), and the rest."""
    programs = lower(schedule, receives)
    rank, store = dist.get_rank(), WeightGradStore()
    stages = {
        stage: LinearStage(store, stage, schedule.num_stages, *([uneven] if varying else []))
        for stage in schedule.placement.stages(rank)
    }
    shape = None if varying else (ROWS, WIDTH)
    message = Message(shape, torch.float32, torch.device('cpu'))
    channels = Channels(
        dist.group.WORLD, pairs(programs), message.device, separate=separate, shapes=varying
    )
    executor = Executor(programs[rank], stages, channels, message, store, HostClock())
    with torch.set_grad_enabled(train):
        record = executor.run()
    assert not store.pending and not store.deferring
    made = {
        s: (m.losses, tuple(p.grad for p in m.parameters()), m.complete) for s, m in stages.items()
    }
    return made, record.passes, record.live


def check_run(ranks, schedule, separate=False, varying=False):
    check(schedule)
    receives = BY_TAKER if varying else LATE
    results = ranks(schedule.num_ranks).run(execute, schedule, True, separate, varying, receives)
    rows = [uneven] if varying else []
    losses, gradients = reference(schedule.num_stages, schedule.num_microbatches, True, *rows)
    for rank, (made, passes, live) in enumerate(results):
        assert tuple(passes) == schedule.passes[rank]
        assert live[-1] == 0
        for stage, (own, grads, complete) in made.items():
            assert len(complete) == len(grads) and all(map(torch.equal, complete, grads))
            assert stage < schedule.num_stages - 1 or own == losses
            for gradient, expected in zip(grads, gradients[stage], strict=True):
                assert torch.equal(gradient, expected), stage


@pytest.mark.parametrize('m', [1, 2, 5, 8])
@pytest.mark.parametrize('name', ['1f1b', 'zb-h1', 'zb-v'])
@pytest.mark.parametrize('p', [2, 4])
def test_gradients_to_the_bit(ranks, p, name, m):
    check_run(ranks, build(name, p, m))


@pytest.mark.parametrize('separate', [False, True])
@pytest.mark.parametrize('name', ['1f1b', 'zb-h1', 'zb-v', 'interleaved'])
def test_messages_of_any_shape(ranks, name, separate):
    check_run(ranks, build(name, 4, 7), separate, varying=True)


def shapes_awaited(schedule, receives):
    """Runs on each rank: before each pass that waits for shapes, the passes that they are for."""
    program, passes = lower(schedule, receives)[dist.get_rank()], []
    own = [i for i in program if isinstance(i, Receive) and i.consumer.kind == F]
    left = {i.peer: [each.consumer for each in own if each.peer == i.peer] for i in own}
    awaited, ask, begin = {}, Channels.ask, Executor._begin_waiting

    def asking(channels, peer):
        consumer, shape = left[peer].pop(0), ask(channels, peer)

        def waiting():
            awaited.setdefault(str(passes[-1]), []).append(str(consumer))
            return shape()

        return waiting

    def beginning(executor, p):
        passes.append(p)
        begin(executor, p)

    with (
        mock.patch.object(Channels, 'ask', asking),
        mock.patch.object(Executor, '_begin_waiting', beginning),
    ):
        execute(schedule, varying=True, receives=receives)
    assert not any(left.values())
    return awaited


@pytest.mark.parametrize('name', ['1f1b', 'zb-h1', 'zb-v'])
def test_a_pass_waits_for_its_own_shape(ranks, name):
    """Not for those of messages that later passes take, but where the proof wants it."""
    schedule = build(name, 4, 7)
    early, count = awaited_early(lower(schedule, BY_TAKER))
    assert early == (0 if name != 'zb-v' else 6)
    each = ranks(4).run(shapes_awaited, schedule, BY_TAKER)
    waits = [(p, taker) for awaited in each for p, takers in awaited.items() for taker in takers]
    assert len(waits) == count
    assert sum(p != taker for p, taker in waits) == early
    before = ranks(4).run(shapes_awaited, schedule, LATE)
    assert sum(p != t for awaited in before for p, takers in awaited.items() for t in takers) > 6


def left_to_w(schedule):
    """How many weight gradients a rank leaves to W, of one layer a stage."""
    with mock.patch.object(WeightGradStore, 'defer', autospec=True, side_effect=_defer) as left:
        execute(schedule)
    return left.call_count


_defer = WeightGradStore.defer


@pytest.mark.parametrize('name', ['1f1b', 'zb-h1', 'dualpipe-v'])
def test_what_is_one_pass_runs_whole(ranks, name):
    """Of a pass BW autograd runs B and W at once, also in a schedule that splits others."""
    schedule = build(name, 2, 8)
    for rank, left in enumerate(ranks(2).run(left_to_w, schedule)):
        kinds = Counter(p.kind for p in schedule.passes[rank])
        assert left == kinds[W]
        assert bool(kinds[BW]) == (name != 'zb-h1') and bool(kinds[W]) == (name != '1f1b')
    check_run(ranks, schedule)


def uneven_groups():
    """As Megatron makes them: ranks are in different numbers of groups before."""
    for members in ([0, 3], [1], [1, 2]):
        dist.new_group(members)


def test_a_group_for_each_direction(ranks):
    """What NCCL needs, here on gloo."""
    ranks(4).run(uneven_groups)
    check_run(ranks, build('zb-v', 4, 5), separate=True)
    check_run(ranks, build('zb-h1', 4, 5), separate=True)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_valid_order(ranks, data):
    """Shuffled schedules: whatever the checker accepts runs, and gives the same bits.

    Also where each microbatch has a shape of its own.
    """
    schedule = build(data.draw(st.sampled_from(['zb-h1', 'zb-v'])), 2, data.draw(st.integers(1, 5)))
    orders = [list(order) for order in schedule.passes]
    for _ in range(data.draw(st.integers(0, 12))):
        order = data.draw(st.sampled_from(orders))
        at = data.draw(st.integers(0, len(order) - 2))
        order[at], order[at + 1] = order[at + 1], order[at]
        try:
            check(Schedule.of('shuffled', schedule.placement, schedule.num_microbatches, orders))
        except ValueError:  # not valid: take it back
            order[at], order[at + 1] = order[at + 1], order[at]
    if data.draw(st.booleans()):  # fuse what can be: W right behind its B
        orders = [_fused(order) for order in orders]
    shuffled = Schedule.of('shuffled', schedule.placement, schedule.num_microbatches, orders)
    check_run(ranks, shuffled, varying=data.draw(st.booleans()))


def _fused(order):
    """`order` with every B that its own W follows at once as one BW."""
    fused: list[Pass] = []
    for p in order:
        if p.kind == 'W' and fused[-1] == p._replace(kind='B'):
            fused[-1] = p._replace(kind='BW')
        else:
            fused.append(p)
    return fused


@pytest.mark.parametrize('name', ['1f1b', 'zb-v'])
def test_forward_only(ranks, name):
    schedule = build(name, 2, 4).forward_only()
    results = ranks(2).run(execute, schedule, False)
    losses, _ = reference(schedule.num_stages, 4, train=False)
    last = schedule.placement.only_route[-1]
    made, _, live = results[last]
    assert made[schedule.num_stages - 1][0] == losses
    assert not any(live), 'evaluation keeps no activations'


def letting_go(schedule):
    """How many passes a rank ran, and how often it asked what has left."""
    with mock.patch.object(Channels, 'let_go', autospec=True) as asked:
        _, passes, _ = execute(schedule)
        return len(passes), asked.call_count


def test_each_pass_lets_go(ranks):
    for passes, asked in ranks(2).run(letting_go, build('zb-h1', 2, 5)):
        assert asked == passes == 3 * 5


def fail_in_forward(schedule):
    """An error in a pass reaches the caller, and leaves nothing in the store."""
    store = WeightGradStore()
    program = tuple(p for p in schedule.passes[0])

    class Failing(LinearStage):
        def backward(self, *args):
            super().backward(*args)
            raise RuntimeError('in B')

    stages = {0: Failing(store, 0, 1)}
    message = Message((ROWS, WIDTH), torch.float32, torch.device('cpu'))
    channels = Channels(dist.group.WORLD, (), message.device)
    try:
        Executor(program, stages, channels, message, store, HostClock()).run()
    except RuntimeError as error:
        return str(error), store.pending
    return None


def test_error_leaves_nothing_behind(ranks):
    assert ranks(2).run(fail_in_forward, build('zb-h1', 1, 2)) == [('in B', 0)] * 2
