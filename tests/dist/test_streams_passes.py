"""Passes with collectives, and passes on recorded streams: whoever takes something waits for it."""

import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from grids import some
from recorded import device
from stages import CPU, Pipeline, message_of, require_same
from test_nccl import MODES, pipeline_on
from torch.distributed import distributed_c10d
from vocabulary import executor, reference, split_1f1b

from devtools import nccl
from megatron_zbpp import Costs
from megatron_zbpp.analysis.lowering import lower
from megatron_zbpp.analysis.program import Exchange
from megatron_zbpp.ir import Pass
from megatron_zbpp.runtime.channels import Message
from megatron_zbpp.runtime.clock import HostClock, clock_for
from megatron_zbpp.runtime.collectives import Collectives
from megatron_zbpp.runtime.executor import Executor
from megatron_zbpp.runtime.measure import Iteration
from megatron_zbpp.runtime.weight_grads import WeightGradStore
from megatron_zbpp.schedules import build
from megatron_zbpp.techniques.evict import with_eviction


def train(p, m, mode):
    with pipeline_on(mode) as options:
        of_collectives = dist.new_group(backend=nccl.NAME) if mode else None
        run, stage, shard = executor(split_1f1b(p, m), of_collectives=of_collectives, **options)
        record = run.run()
    return made_by(record, stage, shard)


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


@some('mode', [None, 'both'], *MODES)
def test_losses_and_gradients_are_those_of_one_process(ranks, mode):
    """On gloo, and whatever NCCL makes wait."""
    require_right(4, 6, ranks(4).run(train, 4, 6, mode))


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
def execute(schedule, backend):
    """On each rank: what waited, races, the same after figures were asked for, and gradients."""
    group, clock = dist.new_group(backend=backend), clock_for(ON, counting=True)
    pipeline = Pipeline(schedule, group, on=ON, clock=clock, named=device.within)
    executor = pipeline.executor()
    with device.recording() as passes:
        record = executor.run()
    assert any(pipeline.moved.values()) == moves(pipeline.programs[pipeline.rank])
    with device.recording() as figures:
        iteration = Iteration(schedule, group, record, clock)
        assert iteration.held() and not device.waits(figures)
        assert len(iteration.spans()) == len(record.passes)
    return device.waits(passes), [*map(str, passes.races)], device.waits(figures), pipeline.made


def moves(program):
    """Whether something that this rank's forwards save is with a partner meanwhile."""
    return any(isinstance(i, Pass) and i.kind == 'E' for i in program)


def with_partner():
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


def test_messages_that_go_by_way_of_the_host(cuda_ranks):
    """Ranks that share a GPU talk over gloo: only the copies wait, and not in a pass."""
    schedule = build('zb-v', 2, MICROBATCHES)
    results = cuda_ranks(2).run(execute, schedule, 'gloo')
    for passes, races, _, _ in results:
        copies = {'pageable copy to the host in None', 'pageable copy to the device in None'}
        assert set(passes) == copies and races == []
    require_same(schedule, (made for *_, made in results))


@ending_groups
def collect():
    """Return what waited in which pass, races, and what was made."""
    groups = [dist.new_group(backend='nccl') for _ in range(2)]
    options = {'clock': clock_for(ON, counting=True), 'named': device.within}
    run, stage, shard = executor(split_1f1b(2, MICROBATCHES), *groups, ON, **options)
    with device.recording() as order:
        record = run.run()
    assert not run._collectives._open
    return device.waits(order), [*map(str, order.races)], made_by(record, stage, shard)


def test_passes_wait_for_the_result_alone(cuda_ranks):
    results = cuda_ranks(2).run(collect)
    assert all(waited == races == [] for waited, races, _ in results)
    require_right(2, MICROBATCHES, [made for *_, made in results])
