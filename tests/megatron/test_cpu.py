"""Megatron-Core on the CPU: armed in time or not at all, and seeds that reach the generator."""

import os
import sys

import pytest
import torch
import torch.distributed as dist
from commands import run
from example import groups

from megatron_zbpp.emulation import cpu


def test_too_late_is_an_error():
    code = 'import megatron.core; from megatron_zbpp.emulation import cpu; cpu.install()'
    done = run([sys.executable, '-c', code])
    assert done.returncode == 1
    assert 'call it before megatron.core is imported' in done.stderr


@pytest.mark.on_ranks(2)
def test_seeds_are_applied():
    """A CUDA that never starts would queue them, and nothing would fail."""
    from megatron.core import tensor_parallel

    cpu.install()  # again: nothing happens
    drawn = []
    with groups():
        for seed in (1, 2, 1):
            tensor_parallel.model_parallel_cuda_manual_seed(seed)
            with tensor_parallel.get_cuda_rng_tracker().fork():
                drawn.append(torch.rand(3, device='cuda').tolist())
    one, two, again = drawn
    assert cpu.installed() and one == again != two


@pytest.mark.on_ranks(2)
def test_backward_keeps_to_the_cpu():
    """Code inside a layer's backward that asks for CUDA gets the CPU, however it is started."""

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
    assert gradients == [[2.0, 6.0]] * 2


@pytest.mark.on_ranks(3)
@pytest.mark.parametrize('async_op', [False, True])
def test_gathers_tensors_of_any_size(async_op):
    sizes = [3, 0, 2]
    outputs = [torch.empty(size) for size in sizes]
    own = torch.full((sizes[dist.get_rank()],), float(dist.get_rank()))
    work = dist.all_gather(outputs, own, async_op=async_op)
    if async_op:
        work.wait()
    assert torch.cat(outputs).tolist() == [0, 0, 0, 2, 2]


def leave(folder, pairs=4):
    """Prints how pairs of ranks end when a collective is over for them, while a thread of it is
    busy for longer: it lets go of many tensors."""
    cpu.install()
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
