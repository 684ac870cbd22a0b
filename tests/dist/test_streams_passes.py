"""Passes with collectives, and passes on recorded streams: whoever takes something waits for it."""

import functools
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from programs import pairs
from recorded import device
from stages import Pipeline, message_of, require_same
from test_nccl import MODES
from torch.distributed import distributed_c10d
from vocabulary import CPU, executor, reference, split_1f1b

from devtools import nccl
from megatron_zbpp import Costs
from megatron_zbpp.analysis.lowering import lower
from megatron_zbpp.analysis.program import Exchange
from megatron_zbpp.ir import Pass
from megatron_zbpp.runtime import collectives
from megatron_zbpp.runtime.activations.copies import Partner
from megatron_zbpp.runtime.channels import Channels, Message
from megatron_zbpp.runtime.clock import HostClock, clock_for
from megatron_zbpp.runtime.collectives import Collectives
from megatron_zbpp.runtime.executor import Executor
from megatron_zbpp.runtime.measure import Iteration
from megatron_zbpp.runtime.weight_grads import WeightGradStore
from megatron_zbpp.schedules import build
from megatron_zbpp.techniques.evict import with_eviction


def train(p, m):
    run, stage, shard = executor(split_1f1b(p, m))
    return made_by(run.run(), stage, shard)


def made_by(record, stage, shard):
    losses = [each.item() for each in shard.losses]
    gradients = [w.grad.cpu() for w in stage.parameters()]
    return record.passes, losses, gradients, shard.gradient.cpu()


def require_right(p, m, results):
    losses, gradients, words = reference(p, m)
    for rank, (passes, made, grads, _) in enumerate(results):
        assert tuple(passes) == split_1f1b(p, m).passes[rank]
        assert made == pytest.approx(losses, rel=1e-5)
        for found, expected in zip(grads, gradients[rank], strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    found = torch.cat([each[-1] for each in results])
    torch.testing.assert_close(found, words, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('p', [4, pytest.param(2, marks=pytest.mark.full)])
def test_losses_and_gradients_are_those_of_one_process(ranks, p):
    require_right(p, 6, ranks(p).run(train, p, 6))


def train_on_nccl(p, m, mode):
    with nccl.Device(**MODES[mode]) as device:
        schedule = split_1f1b(p, m)
        pipeline, group = (dist.new_group(backend=nccl.NAME) for _ in range(2))
        channels = Channels(pipeline, pairs(lower(schedule)), CPU)
        run, stage, shard = executor(schedule, channels, group, named=device.passing)
        record = run.run()
        device.synchronize()
    return made_by(record, stage, shard)


@pytest.mark.parametrize(
    'mode',
    ['both', *(pytest.param(mode, marks=pytest.mark.full) for mode in MODES if mode != 'both')],
)
def test_it_ends_whatever_nccl_makes_wait(ranks, mode):
    require_right(4, 6, ranks(4).run(train_on_nccl, 4, 6, mode))


def test_without_a_group_for_them_collectives_are_refused():
    program, store = lower(split_1f1b(2, 2))[0], WeightGradStore()
    actions = {'S': print, 'T': print}
    with pytest.raises(NotImplementedError, match=r'^broadcast\(hidden for 2S0\) is a collective'):
        Executor(program, {}, None, message_of(), store, HostClock(), actions=actions)


SHARDS = Pass('S', 2, 0), Pass('S', 3, 0)
GATHER = Exchange('all-gather', 'statistics', None, SHARDS, SHARDS)
MESSAGE = Message((2,), torch.float32, CPU)


class Failing(Exception):
    """An error in what a rank contributes."""


@pytest.mark.on_ranks(2)
def test_an_error_beside_the_passes_is_raised_by_whoever_comes_next():
    reduce = Exchange('reduce', 'vocabulary', 1, SHARDS, SHARDS[1:], after='statistics')
    collectives = Collectives(dist.new_group(), (0, 1), CPU, {'vocabulary': (MESSAGE,)})
    collectives.begin(GATHER, torch.ones(2))

    def part(gathered):
        raise Failing(len(gathered))

    reduced = collectives.begin(reduce, part)
    for late in (reduced.wait, lambda: collectives.begin(GATHER, torch.ones(2))):
        with pytest.raises(Failing, match='2'):
            late()


@pytest.mark.on_ranks(2)
def test_memory_of_a_collective_is_let_go_of_with_a_later_result():
    """Not at the end of the iteration: each holds hidden states."""
    collectives = Collectives(dist.new_group(), (0, 1), CPU, {})
    results = [collectives.begin(GATHER, torch.full((1,), float(k))) for k in range(3)]
    assert [each.item() for each in results[1].wait()] == [1, 1]
    assert len(collectives._open) == 1
    collectives.finish()
    assert not collectives._open


@pytest.mark.on_ranks(2)
def test_who_broadcasts_does_not_wait_for_the_others():
    broadcast = Exchange('broadcast', 'hidden', 0, (Pass('F', 1, 0),), SHARDS)
    collectives = Collectives(dist.new_group(), (0, 1), CPU, {'hidden': (MESSAGE,)})
    root, start, begun = dist.get_rank() == 0, collectives._start, []

    def started(job):
        begun.append(start(job))
        return pytest.fail if root else begun[0]

    with mock.patch.object(collectives, '_start', started):
        sent = collectives.begin(broadcast, torch.ones(2) if root else None)
    assert sent.wait().tolist() == [1, 1]
    begun[0]()


MICROBATCHES = 5
ON = torch.device('cuda', 0)


def by_the_host(self, transfer):
    """As `Partner.wait`, whose stream waits, and not the host."""
    for work in transfer.works:
        work.wait_for_data()


def ending_groups(function):
    """With too many threads, ranks start anew."""

    @functools.wraps(function)
    def call(*args):
        try:
            return function(*args)
        finally:
            for group in [*distributed_c10d._world.pg_map]:
                if group is not dist.group.WORLD:
                    dist.destroy_process_group(group)

    return call


@ending_groups
def execute(schedule, backend, waits_for_partner=True):
    """On each rank: what waited, races, the same after figures were asked for, and gradients."""
    group, clock = dist.new_group(backend=backend), clock_for(ON, counting=True)
    pipeline = Pipeline(schedule, group, on=ON, clock=clock, named=device.within)
    executor = pipeline.executor()
    broken = mock.patch.object(Partner, 'wait', by_the_host)
    with nullcontext() if waits_for_partner else broken, device.recording() as passes:
        record = executor.run()
    assert any(pipeline.moved.values()) == moves(pipeline.programs[pipeline.rank])
    with device.recording() as figures:
        iteration = Iteration(schedule, group, record, clock)
        assert iteration.held() and not device.look(figures).waits
        assert len(iteration.spans()) == len(record.passes)
    return waits(passes), [*map(str, passes.races)], waits(figures), pipeline.made


def waits(order):
    return [f'{wait.what} in {wait.within or None}' for wait in order.waits]


def moves(program):
    """Whether something that this rank's forwards save is with a partner meanwhile."""
    return any(isinstance(i, Pass) and i.kind == 'E' for i in program)


def with_partner():
    """On two ranks: activations of the first go to the second, and come back."""
    schedule = build('zb-h2', 2, MICROBATCHES)
    costs = Costs.uniform(schedule.placement)
    return with_eviction(schedule, range(2), costs, limits=[2.0, 2 * MICROBATCHES])


@pytest.mark.parametrize('name', ['1f1b', 'zb-v', 'with partner'])
def test_nothing_waits(cuda_ranks, name):
    """Who uses memory of what goes to a partner waits for the transfers, and not the host."""
    schedule = with_partner() if name == 'with partner' else build(name, 2, MICROBATCHES)
    results = cuda_ranks(2).run(execute, schedule, 'nccl')
    for passes, races, figures, _ in results:
        assert passes == [] and races == []
        assert figures == ['event.synchronize in None'], 'once, for all marks'
    require_same(schedule, (made for *_, made in results))


def test_transfers_that_nobody_waits_for(cuda_ranks):
    """A seeded race."""
    results = cuda_ranks(2).run(execute, with_partner(), 'nccl', False)
    said = [race for _, races, *_ in results for race in races]
    assert any('does not wait for recv on stream' in race for race in said)


def test_messages_that_go_by_way_of_the_host(cuda_ranks):
    """Ranks that share a GPU talk over gloo: only the copies wait, and not in a pass."""
    schedule = build('zb-v', 2, MICROBATCHES)
    results = cuda_ranks(2).run(execute, schedule, 'gloo')
    for passes, races, _, _ in results:
        copies = {'pageable copy to the host in None', 'pageable copy to the device in None'}
        assert set(passes) == copies and races == []
    require_same(schedule, (made for *_, made in results))


@ending_groups
def collect(waiting):
    """Return what waited in which pass, races, and what was made."""
    schedule = split_1f1b(2, MICROBATCHES)
    pipeline, group = (dist.new_group(backend='nccl') for _ in range(2))
    channels = Channels(pipeline, pairs(lower(schedule)), ON)
    run, stage, shard = executor(
        *(schedule, channels, group, ON, clock_for(ON, counting=True)), named=device.within
    )
    blind = mock.patch.object(collectives, '_arrived', lambda found, *_: found)
    with nullcontext() if waiting else blind, device.recording() as order:
        record = run.run()
    assert not run._collectives._open
    return waits(order), [*map(str, order.races)], made_by(record, stage, shard)


def test_passes_wait_for_the_result_alone(cuda_ranks):
    results = cuda_ranks(2).run(collect, True)
    assert all(waited == races == [] for waited, races, _ in results)
    require_right(2, MICROBATCHES, [made for *_, made in results])


def test_a_result_that_nobody_waits_for_is_a_race(cuda_ranks):
    """So that the test above can fail."""
    assert all(races for _, races, _ in cuda_ranks(2).run(collect, False))
