"""The executor on recorded streams: passes do not wait for the device, messages are in order."""

from __future__ import annotations

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
from megatron_zbpp.runtime import channels
from megatron_zbpp.runtime.activations.copies import Copies
from megatron_zbpp.runtime.activations.partner import Partner
from megatron_zbpp.runtime.activations.store import ActivationStore
from megatron_zbpp.runtime.channels import Channels, Message
from megatron_zbpp.runtime.clock import clock_for
from megatron_zbpp.runtime.executor import Executor
from megatron_zbpp.runtime.observe.measure import Iteration
from megatron_zbpp.runtime.weight_grads import WeightGradStore
from megatron_zbpp.schedules import build
from megatron_zbpp.techniques.evict.place import with_eviction
from megatron_zbpp.techniques.offload.place import offloaded

MICROBATCHES = 5


def with_partner(name):
    """On two ranks: activations of the first go to the second, and come back."""
    schedule = build(name, 2, MICROBATCHES)
    costs = Costs.uniform(schedule.placement)
    return with_eviction(
        schedule, range(schedule.num_stages), costs, limits=[2.0, 2 * MICROBATCHES]
    )


ON_HOST, ON_PARTNER = offloaded(build('po', 2, MICROBATCHES), 'all'), with_partner('zb-h2')


class LookingStage(LinearStage):
    """Asks for the sum of its input, in each backward."""

    def backward(self, received, output, gradient):
        output.detach().sum().item()
        return super().backward(received, output, gradient)


def received_by_the_host(incoming):
    """As `Incoming.wait`, whose stream waits, and not the host."""
    incoming.work.wait_for_data()
    return incoming.tensor


def sends_overwritten(self, tensor, send, _original=Channels.send):
    """As `Channels.send`, with a tensor that is used for something else right after."""
    tensor = tensor.clone()
    _original(self, tensor, send)
    tensor.zero_()


def by_the_host(self, transfer):
    """As `Partner.wait`, whose stream waits, and not the host."""
    for work in transfer.works:
        work.wait_for_data()


# what is broken: by name, the class of the stages, and what replaces what
BROKEN = {
    'nothing': (LinearStage, None, None),
    'a look in B': (LookingStage, None, None),
    'no wait': (LinearStage, (channels.Incoming, 'wait'), received_by_the_host),
    'overwritten': (LinearStage, (Channels, 'send'), sends_overwritten),
    'copies': (LinearStage, (Copies, 'wait'), lambda self, mark: None),
    'transfers': (LinearStage, (Partner, 'wait'), by_the_host),
}


def execute(schedule, backend, broken):
    """On each rank: what waited, races, the same after figures were asked for, and gradients."""
    stage_class, place, replacement = BROKEN[broken]
    try:
        with mock.patch.object(*place, replacement) if place else nullcontext():
            return _execute(schedule, backend, stage_class)
    finally:
        for group in [*distributed_c10d._world.pg_map]:
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)  # with too many threads, ranks start anew


def _execute(schedule, backend, stage_class):
    on, group = torch.device('cuda', 0), dist.new_group(backend=backend)
    rank, store, programs = dist.get_rank(), WeightGradStore(), lower(schedule)
    stages = {
        stage: stage_class(store, stage, schedule.num_stages).to(on)
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
    """Whether something that this rank's forwards save is elsewhere meanwhile."""
    return any(isinstance(i, Pass) and i.kind in ('O', 'E') for i in program)


def check_gradients(schedule, results):
    _, expected = reference(schedule.num_stages, schedule.num_microbatches)
    for *_, gradients in results:
        for stage, own in gradients.items():
            assert all(map(torch.equal, own, expected[stage])), stage


@pytest.mark.parametrize('name', ['1f1b', 'zb-h1', 'zb-v'])
def test_nothing_waits(cuda_ranks, name):
    schedule = build(name, 2, MICROBATCHES)
    results = cuda_ranks(2).run(execute, schedule, 'nccl', 'nothing')
    for passes, races, figures, _ in results:
        assert passes == [] and races == []
        assert figures == ['event.synchronize in None'], 'once, for all marks'
    check_gradients(schedule, results)


@pytest.mark.parametrize('schedule', [ON_HOST, ON_PARTNER], ids=['on the host', 'on a partner'])
def test_what_moves_is_in_order(cuda_ranks, schedule):
    """Copies and transfers beside the passes: who uses memory waits for them, and not the host."""
    results = cuda_ranks(2).run(execute, schedule, 'nccl', 'nothing')
    for passes, races, _, _ in results:
        assert passes == [] and races == []
    check_gradients(schedule, results)


@pytest.mark.parametrize(
    ('schedule', 'broken', 'said'),
    [(ON_HOST, 'copies', 'copy to the'), (ON_PARTNER, 'transfers', 'recv on stream')],
    ids=['copies', 'transfers'],
)
def test_memory_that_nobody_waits_for(cuda_ranks, schedule, broken, said):
    results = cuda_ranks(2).run(execute, schedule, 'nccl', broken)
    assert any(said in race for _, races, *_ in results for race in races)


def test_messages_that_go_by_way_of_the_host(cuda_ranks):
    """Ranks that share a GPU talk over gloo: only the copies wait, and not in a pass."""
    schedule = build('zb-v', 2, MICROBATCHES)
    results = cuda_ranks(2).run(execute, schedule, 'gloo', 'nothing')
    for passes, races, _, _ in results:
        copies = {'pageable copy to the host in None', 'pageable copy to the device in None'}
        assert set(passes) == copies and races == []
    check_gradients(schedule, results)


def test_a_pass_that_waits_is_named(cuda_ranks):
    schedule = build('zb-h1', 2, MICROBATCHES)
    results = cuda_ranks(2).run(execute, schedule, 'nccl', 'a look in B')
    for rank, (passes, *_) in enumerate(results):
        backwards = [f'{rank}B{m}' for m in range(MICROBATCHES)]
        assert passes == [f'aten::_local_scalar_dense in {b}' for b in backwards]


def test_a_receive_that_nobody_waits_for(cuda_ranks):
    results = cuda_ranks(2).run(execute, build('zb-h1', 2, MICROBATCHES), 'nccl', 'no wait')
    races = [race for _, found, *_ in results for race in found]
    assert any('in 1F0 does not wait for recv on stream' in race for race in races)


def test_a_send_that_is_overwritten(cuda_ranks):
    results = cuda_ranks(2).run(execute, build('zb-h1', 2, MICROBATCHES), 'nccl', 'overwritten')
    for _, races, *_ in results:
        found = 'aten::zero_ on stream 0 in no pass does not wait for send on stream'
        assert any(race.startswith(found) for race in races)
