"""Collectives on recorded streams: beside the passes, which neither wait nor race."""

from contextlib import nullcontext
from unittest import mock

import torch
import torch.distributed as dist
from programs import pairs
from recorded import device
from torch.distributed import distributed_c10d
from vocabulary import executor, reference, split_1f1b

from megatron_zbpp.analysis.lowering import lower
from megatron_zbpp.runtime import collectives
from megatron_zbpp.runtime.channels import Channels
from megatron_zbpp.runtime.clock import clock_for

P, M = 2, 5
ON = torch.device('cuda', 0)


def execute(waits):
    """Return what waited in which pass, races, losses and gradients."""
    blind = mock.patch.object(collectives, '_arrived', lambda found, *_: found)
    with nullcontext() if waits else blind:
        return _execute()


def _execute():
    schedule = split_1f1b(P, M)
    pipeline, group = (dist.new_group(backend='nccl') for _ in range(2))
    try:
        channels = Channels(pipeline, pairs(lower(schedule)), ON)
        run, stage, shard = executor(
            *(schedule, channels, group, ON, clock_for(ON, counting=True)), named=device.within
        )
        with device.recording() as order:
            run.run()
        waited = [f'{wait.what} in {wait.within or None}' for wait in order.waits]
        assert not run._collectives._open
        losses = [loss.item() for loss in shard.losses]
        gradients = [p.grad.cpu() for p in stage.parameters()], shard.gradient.cpu()
        return waited, [*map(str, order.races)], losses, gradients
    finally:
        for made in [*distributed_c10d._world.pg_map]:
            if made is not dist.group.WORLD:
                dist.destroy_process_group(made)


def test_passes_wait_for_the_result_alone(cuda_ranks):
    results = cuda_ranks(P).run(execute, True)
    losses, gradients, words = reference(P, M)
    for rank, (waited, races, made, (grads, _)) in enumerate(results):
        assert waited == [] and races == []
        torch.testing.assert_close(made, losses, rtol=1e-5, atol=1e-5)
        for found, expected in zip(grads, gradients[rank], strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    found = torch.cat([own for *_, (_, own) in results])
    torch.testing.assert_close(found, words, rtol=1e-4, atol=1e-5)


def test_a_result_that_nobody_waits_for_is_a_race(cuda_ranks):
    """So that the test above can fail."""
    assert all(races for _, races, *_ in cuda_ranks(P).run(execute, False))
