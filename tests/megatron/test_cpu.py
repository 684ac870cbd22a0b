"""Megatron-Core on the CPU: armed in time or not at all, and seeds that reach the generator."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from commands import run


def test_too_late_is_an_error():
    code = 'import megatron.core; from megatron_zbpp.emulation import cpu; cpu.install()'
    done = run([sys.executable, '-c', code])
    assert done.returncode == 1
    assert 'call it before megatron.core is imported' in done.stderr


def seeded():
    """Random numbers after two seeds, from Megatron's model-parallel generator."""
    import torch
    from example import forget_groups
    from megatron.core import parallel_state, tensor_parallel

    from megatron_zbpp.emulation import cpu

    cpu.install()  # again: nothing happens
    parallel_state.initialize_model_parallel()
    drawn = []
    for seed in (1, 2, 1):
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        with tensor_parallel.get_cuda_rng_tracker().fork():
            drawn.append(torch.rand(3, device='cuda').tolist())
    forget_groups()
    return cpu.installed(), drawn


def test_seeds_are_applied(ranks):
    """A CUDA that never starts would queue them, and nothing would fail."""
    for installed, (one, two, again) in ranks(2).run(seeded):
        assert installed and one == again != two


def backwards():
    """Code inside a layer's backward that asks for CUDA gets the CPU, however it is started."""
    import torch

    class AsksForCuda(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return torch.full((2,), 2.0, device=torch.cuda.current_device()) * gradient

    gradients = []
    for start in (torch.Tensor.backward, torch.autograd.backward):
        x = torch.ones(2, requires_grad=True)
        start(AsksForCuda.apply(x), torch.tensor([1.0, 3.0]))
        gradients.append(x.grad.tolist())
    return gradients


def test_backward_keeps_to_the_cpu(ranks):
    assert ranks(2).run(backwards) == [[[2.0, 6.0]] * 2] * 2


def gathered(async_op):
    import torch
    import torch.distributed as dist

    sizes = [3, 0, 2]
    outputs = [torch.empty(size) for size in sizes]
    own = torch.full((sizes[dist.get_rank()],), float(dist.get_rank()))
    work = dist.all_gather(outputs, own, async_op=async_op)
    if async_op:
        work.wait()
    return torch.cat(outputs).tolist()


@pytest.mark.parametrize('async_op', [False, True])
def test_gathers_tensors_of_any_size(ranks, async_op):
    assert ranks(3).run(gathered, async_op) == [[0, 0, 0, 2, 2]] * 3


def leave(folder: Path, pairs: int = 4) -> None:
    """Prints how pairs of ranks end when a collective is over for them, while a thread of it is
    busy for longer: it lets go of many tensors."""
    from megatron_zbpp.emulation import cpu

    cpu.install()
    import torch
    import torch.distributed as dist

    for pair in range(pairs):
        ranks = []
        for rank in range(2):
            ranks.append(os.fork())
            if not ranks[-1]:
                met = f'file://{folder}/{pair}'
                dist.init_process_group('gloo', met, rank=rank, world_size=2)
                dist.all_reduce_coalesced([torch.zeros(1) for _ in range(30_000)])
                sys.exit()
        print([os.waitpid(rank, 0)[1] for rank in ranks])


def test_ends_after_its_threads(tmp_path):
    """Else one that takes the GIL while Python is ending aborts the process."""
    code = f'import pathlib, test_cpu; test_cpu.leave(pathlib.{tmp_path!r})'
    done = run([sys.executable, '-c', code], env={'PYTHONPATH': os.pathsep.join(sys.path)})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ['[0, 0]'] * 4, done.stderr
