"""The executor on recorded streams: passes do not wait for the device, messages are in order."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from programs import pairs
from recorded import device
from stages import ROWS, WIDTH, LinearStage, reference
from torch.distributed import distributed_c10d

from megatron_zbpp.analysis.lowering import lower
from megatron_zbpp.ir import Pass
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.runtime.activations.copies import Partner
from megatron_zbpp.runtime.activations.store import ActivationStore
from megatron_zbpp.runtime.channels import Channels, Message
from megatron_zbpp.runtime.clock import clock_for
from megatron_zbpp.runtime.executor import Executor
from megatron_zbpp.runtime.measure import Iteration
from megatron_zbpp.runtime.weight_grads import WeightGradStore
from megatron_zbpp.schedules import build
from megatron_zbpp.techniques.evict.place import with_eviction

MICROBATCHES = 5


def by_the_host(self, transfer):
    """As `Partner.wait`, whose stream waits, and not the host."""
    for work in transfer.works:
        work.wait_for_data()


def execute(schedule, backend, waits_for_partner=True):
    """On each rank: what waited, races, the same after figures were asked for, and gradients."""
    broken = mock.patch.object(Partner, 'wait', by_the_host)
    try:
        with nullcontext() if waits_for_partner else broken:
            return _execute(schedule, backend)
    finally:
        for group in [*distributed_c10d._world.pg_map]:
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)  # with too many threads, ranks start anew


def _execute(schedule, backend):
    on, group = torch.device('cuda', 0), dist.new_group(backend=backend)
    rank, store, programs = dist.get_rank(), WeightGradStore(), lower(schedule)
    stages = {
        stage: LinearStage(store, stage, schedule.num_stages).to(on)
        for stage in schedule.placement.stages(rank)
    }
    activations = ActivationStore(on, small=1)
    activations.keep(p for stage in stages.values() for p in stage.parameters())
    partners = pairs(programs, saved=True)
    if partners:
        activations.join(Channels(group, partners, on, shapes=True, saved=True))
    executor = Executor(
        programs[rank],
        stages,
        Channels(group, pairs(programs), on),
        Message((ROWS, WIDTH), torch.float32, on),
        store,
        clock_for(on, counting=True),
        device.within,
        activations,
    )
    with device.recording() as passes:
        record = executor.run()
    assert any(found.moved for found in activations.bytes.values()) == moves(programs[rank])
    with device.recording() as figures:
        iteration = Iteration(schedule, group, record, executor.clock)
        assert iteration.held() and not device.look(figures).waits
        assert len(iteration.spans()) == len(record.passes)
    gradients = {s: tuple(p.grad.cpu() for p in each.parameters()) for s, each in stages.items()}
    return waits(passes), [*map(str, passes.races)], waits(figures), gradients


def waits(order):
    return [f'{wait.what} in {wait.within or None}' for wait in order.waits]


def moves(program):
    """Whether something that this rank's forwards save is with a partner meanwhile."""
    return any(isinstance(i, Pass) and i.kind == 'E' for i in program)


def check_gradients(schedule, results):
    _, expected = reference(schedule.num_stages, schedule.num_microbatches)
    for *_, gradients in results:
        for stage, own in gradients.items():
            assert all(map(torch.equal, own, expected[stage])), stage


def check_run(results, schedule):
    for passes, races, figures, _ in results:
        assert passes == [] and races == []
        assert figures == ['event.synchronize in None'], 'once, for all marks'
    check_gradients(schedule, results)


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
    check_gradients(schedule, results)
