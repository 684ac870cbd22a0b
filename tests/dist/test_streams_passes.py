"""The executor on recorded streams: passes do not wait for the device, messages are in order."""

import functools
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from programs import pairs
from recorded import device
from stages import Pipeline, require_same
from torch.distributed import distributed_c10d
from vocabulary import executor as executor_of_shards
from vocabulary import reference as reference_of_shards
from vocabulary import split_1f1b

from megatron_zbpp import Costs, Pass
from megatron_zbpp.analysis.lowering import lower
from megatron_zbpp.runtime import collectives
from megatron_zbpp.runtime.activations.copies import Partner
from megatron_zbpp.runtime.channels import Channels
from megatron_zbpp.runtime.clock import clock_for
from megatron_zbpp.runtime.measure import Iteration
from megatron_zbpp.schedules import build
from megatron_zbpp.techniques.evict import with_eviction

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


def check_run(results, schedule):
    for passes, races, figures, _ in results:
        assert passes == [] and races == []
        assert figures == ['event.synchronize in None'], 'once, for all marks'
    require_same(schedule, (made for *_, made in results))


@pytest.mark.parametrize('name', ['1f1b', 'zb-v'])
def test_nothing_waits(cuda_ranks, name):
    schedule = build(name, 2, MICROBATCHES)
    check_run(cuda_ranks(2).run(execute, schedule, 'nccl'), schedule)


def with_partner():
    """On two ranks: activations of the first go to the second, and come back."""
    schedule = build('zb-h2', 2, MICROBATCHES)
    costs = Costs.uniform(schedule.placement)
    return with_eviction(schedule, range(2), costs, limits=[2.0, 2 * MICROBATCHES])


def test_what_goes_to_a_partner_is_in_order(cuda_ranks):
    """Who uses its memory waits for the transfers, and not the host."""
    schedule = with_partner()
    check_run(cuda_ranks(2).run(execute, schedule, 'nccl'), schedule)


def test_transfers_that_nobody_waits_for(cuda_ranks):
    """A seeded race."""
    results = cuda_ranks(2).run(execute, with_partner(), 'nccl', False)
    assert any(
        'does not wait for recv on stream' in race for _, races, *_ in results for race in races
    )


def test_messages_that_go_by_way_of_the_host(cuda_ranks):
    """Ranks that share a GPU talk over gloo: only the copies wait, and not in a pass."""
    schedule = build('zb-v', 2, MICROBATCHES)
    results = cuda_ranks(2).run(execute, schedule, 'gloo')
    for passes, races, _, _ in results:
        copies = {'pageable copy to the host in None', 'pageable copy to the device in None'}
        assert set(passes) == copies and races == []
    require_same(schedule, (made for *_, made in results))


# ---- Collectives on recorded streams: beside the passes, which neither wait nor race.


P, M = 2, 5


@ending_groups
def collect(waiting):
    """Return what waited in which pass, races, losses and gradients."""
    schedule = split_1f1b(P, M)
    pipeline, group = (dist.new_group(backend='nccl') for _ in range(2))
    channels = Channels(pipeline, pairs(lower(schedule)), ON)
    run, stage, shard = executor_of_shards(
        *(schedule, channels, group, ON, clock_for(ON, counting=True)), named=device.within
    )
    blind = mock.patch.object(collectives, '_arrived', lambda found, *_: found)
    with nullcontext() if waiting else blind, device.recording() as order:
        run.run()
    assert not run._collectives._open
    losses = [loss.item() for loss in shard.losses]
    gradients = [p.grad.cpu() for p in stage.parameters()], shard.gradient.cpu()
    return waits(order), [*map(str, order.races)], losses, gradients


def test_passes_wait_for_the_result_alone(cuda_ranks):
    results = cuda_ranks(P).run(collect, True)
    losses, gradients, words = reference_of_shards(P, M)
    for rank, (waited, races, made, (grads, _)) in enumerate(results):
        assert waited == [] and races == []
        torch.testing.assert_close(made, losses, rtol=1e-5, atol=1e-5)
        for found, expected in zip(grads, gradients[rank], strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    found = torch.cat([own for *_, (_, own) in results])
    torch.testing.assert_close(found, words, rtol=1e-4, atol=1e-5)


def test_a_result_that_nobody_waits_for_is_a_race(cuda_ranks):
    """So that the test above can fail."""
    assert all(races for _, races, *_ in cuda_ranks(P).run(collect, False))
