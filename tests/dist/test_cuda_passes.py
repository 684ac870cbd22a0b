"""The executor on CUDA's double: passes that do not wait for the device, messages in order."""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cuda_double import GPU, Cuda
from programs import pairs
from stages import ROWS, WIDTH, LinearStage, reference

from devtools import nccl
from megatron_zbpp.analysis.lowering import lower
from megatron_zbpp.analysis.program import Send
from megatron_zbpp.ir import F, Pass
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
from megatron_zbpp.techniques.offload.place import offloaded

MICROBATCHES = 5


class LookingStage(LinearStage):
    """Asks for the sum of its input, in each backward."""

    def backward(self, received, output, gradient):
        output.detach().sum().item()
        return super().backward(received, output, gradient)


def received_by_the_host(incoming):
    """As `Incoming.wait`, whose stream waits, and not the host."""
    incoming.work._work.wait()
    return incoming.tensor


def sends_overwritten(self, tensor, send, _original=Channels.send):
    """As `Channels.send`, with a tensor that is used for something else right after."""
    tensor = tensor.clone()
    _original(self, tensor, send)
    tensor.zero_()


def by_the_host(self, transfer):
    """As `Partner.wait`, whose stream waits, and not the host."""
    for work in transfer.works:
        work._work.wait()


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
    patch = mock.patch.object(*place, replacement) if place else nullcontext()
    device = nccl.Device() if backend == nccl.NAME else nullcontext()
    with device, Cuda(nccl.Group if backend == nccl.NAME else None) as cuda, patch:
        on, group = torch.device('cuda', GPU), dist.group.WORLD
        if backend == nccl.NAME:
            everywhere = {nccl.NAME: ['cpu', 'cuda']}
            with mock.patch.dict(dist.Backend.backend_capability, everywhere):
                group = dist.new_group(backend=nccl.NAME)
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
            cuda.within,
            activations,
        )
        cuda.calls.clear()
        record = executor.run()
        passes, races = cuda.waits, list(cuda.races)
        assert any(found.moved for found in activations.bytes.values()) == moves(programs[rank])
        iteration = Iteration(schedule, group, record, executor.clock)
        cuda.calls.clear()
        assert iteration.held() and not cuda.waits
        assert len(iteration.spans()) == len(record.passes)
        figures = [call.what for call in cuda.calls if call.waits]
    gradients = {s: tuple(p.grad for p in stage.parameters()) for s, stage in stages.items()}
    return passes, races, figures, gradients


def moves(program):
    """Whether something that this rank's forwards save is elsewhere meanwhile."""
    return any(isinstance(i, Pass) and i.kind in ('O', 'E') for i in program)


def check_gradients(schedule, results):
    _, expected = reference(schedule.num_stages, schedule.num_microbatches)
    for *_, gradients in results:
        for stage, own in gradients.items():
            assert all(map(torch.equal, own, expected[stage])), stage


@pytest.mark.parametrize('name', ['1f1b', 'zb-h1', 'zb-v'])
def test_nothing_waits_on_nccl(ranks, name):
    schedule = build(name, 2, MICROBATCHES)
    results = ranks(2).run(execute, schedule, nccl.NAME, 'nothing')
    for passes, races, figures, _ in results:
        assert passes == [] and races == []
        assert figures == ['event.synchronize'], 'once, for all marks'
    check_gradients(schedule, results)


@pytest.mark.parametrize(
    'schedule',
    [offloaded(build('po', 2, MICROBATCHES), 'all'), build('bpipe', 4, MICROBATCHES)],
    ids=['on the host', 'on a partner'],
)
def test_what_moves_is_in_order(ranks, schedule):
    """Copies and transfers beside the passes: who uses memory waits for them, and not the host."""
    results = ranks(schedule.num_ranks).run(execute, schedule, nccl.NAME, 'nothing')
    for passes, races, _, _ in results:
        assert passes == [] and races == []
    check_gradients(schedule, results)


@pytest.mark.parametrize(('schedule', 'broken'), [
    (offloaded(build('po', 2, MICROBATCHES), 'all'), 'copies'),
    (build('bpipe', 4, MICROBATCHES), 'transfers'),
])  # fmt: skip
def test_memory_that_nobody_waits_for(ranks, schedule, broken):
    results = ranks(schedule.num_ranks).run(execute, schedule, nccl.NAME, broken)
    assert any(races for _, races, *_ in results)


def test_messages_that_go_by_way_of_the_host(ranks):
    """Ranks that share a GPU talk over gloo: only the copies wait, and not in a pass."""
    schedule = build('zb-v', 2, MICROBATCHES)
    results = ranks(2).run(execute, schedule, 'gloo', 'nothing')
    for passes, races, _, _ in results:
        copies = {'pageable copy to the host in None', 'pageable copy to the device in None'}
        assert set(passes) == copies and races == []
    check_gradients(schedule, results)


def test_a_pass_that_waits_is_named(ranks):
    schedule = build('zb-h1', 2, MICROBATCHES)
    results = ranks(2).run(execute, schedule, nccl.NAME, 'a look in B')
    for rank, (passes, *_) in enumerate(results):
        backwards = [f'{rank}B{m}' for m in range(MICROBATCHES)]
        assert passes == [f'aten._local_scalar_dense.default in {b}' for b in backwards]


def test_a_receive_that_nobody_waits_for(ranks):
    results = ranks(2).run(execute, build('zb-h1', 2, MICROBATCHES), nccl.NAME, 'no wait')
    races = [race for _, found, *_ in results for race in found]
    assert any('in 1F0 does not wait for recv' in race for race in races)


def test_a_send_that_is_overwritten(ranks):
    results = ranks(2).run(execute, build('zb-h1', 2, MICROBATCHES), nccl.NAME, 'overwritten')
    for _, races, *_ in results:
        assert 'aten.zero_.default in None does not wait for send' in races


def sent(backend):
    """How many sends a rank holds: right after one, once it has left, and when asked to let go."""
    device = nccl.Device() if backend == nccl.NAME else nullcontext()
    with device:
        group = dist.new_group(backend=backend)
        channels = Channels(group, [(0, 1)], torch.device('cpu'))
        message = Message((ROWS, WIDTH), torch.float32, torch.device('cpu'))
        held = []

        def look():
            held.append(sum(map(len, channels._unfinished.values())))

        if channels.rank == 0:
            channels.send(torch.ones(ROWS, WIDTH), Send(Pass(F, 0, 0), Pass(F, 1, 0), 1, 2))
            channels.let_go()
            look()
        dist.barrier()  # now the peer takes it
        if channels.rank == 1:
            channels.post(message, 0).wait()
        dist.barrier()
        if channels.rank == 0 and backend == nccl.NAME:
            ((work, *_),) = channels._unfinished[1]
            work.wait()
        look()
        channels.let_go()
        look()
        channels.finish()
        look()
        dist.barrier()
    return held


def test_what_has_left_is_let_go(ranks):
    """At the next pass, whether it sends or not; on gloo, which cannot tell, at the end."""
    assert ranks(2).run(sent, nccl.NAME)[0] == [1, 1, 0, 0]
    assert ranks(2).run(sent, 'gloo')[0] == [1, 1, 1, 0]


def test_each_pass_lets_go(ranks):
    for passes, asked in ranks(2).run(letting_go, build('zb-h1', 2, MICROBATCHES)):
        assert asked == passes == 3 * MICROBATCHES


def letting_go(schedule):
    """How many passes a rank ran, and how often it asked what has left."""
    with mock.patch.object(Channels, 'let_go', autospec=True) as asked:
        programs, store, rank = lower(schedule), WeightGradStore(), dist.get_rank()
        on = torch.device('cpu')
        executor = Executor(
            programs[rank],
            {rank: LinearStage(store, rank, schedule.num_stages)},
            Channels(dist.group.WORLD, pairs(programs), on),
            Message((ROWS, WIDTH), torch.float32, on),
            store,
            clock_for(on),
        )
        return len(executor.run().passes), asked.call_count
