"""Megatron-Core on the CPU: armed in time or not at all, and seeds that reach the generator."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import run


def test_too_late_is_an_error():
    code = 'import megatron.core; from megatron_zbpp import cpu; cpu.install()'
    done = run([sys.executable, '-c', code])
    assert done.returncode == 1
    assert 'call it before megatron.core is imported' in done.stderr


def seeded():
    """Random numbers after two seeds, from Megatron's model-parallel generator."""
    import torch
    from example import forget_groups
    from megatron.core import parallel_state, tensor_parallel

    from megatron_zbpp import cpu

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


class Slow:
    """Something that Python's end takes a while for."""

    def __del__(self, sleep=time.sleep):
        sleep(2)


def joined(rank: int, meeting_place: Path) -> object:
    """A group of all two ranks, beside the world."""
    from megatron_zbpp import cpu

    cpu.install()
    import torch.distributed as dist

    dist.init_process_group('gloo', f'file://{meeting_place}', rank=rank, world_size=2)
    group = dist.new_group()
    dist.barrier()
    return group


def leave(rank: int, meeting_place: Path, late: bool) -> None:
    """Rank 0 ends with a collective that rank 1 joins `late`, or never."""
    joined(rank, meeting_place)
    import torch
    import torch.distributed as dist

    if rank == 0:
        sys.slow = Slow()
    else:
        time.sleep(1)
    if rank == 0 or late:
        dist.all_gather([torch.zeros(1), torch.zeros(1)], torch.zeros(1), async_op=rank == 0)


def fail(rank: int, meeting_place: Path) -> None:
    """Rank 0 fails amid a collective; rank 1 waits for it in another group."""
    group = joined(rank, meeting_place)
    import torch
    import torch.distributed as dist

    if rank == 0:
        dist.all_reduce(torch.zeros(1), async_op=True)
        raise ValueError('what failed')
    dist.broadcast(torch.zeros(1), 0, group)


def both(code: str, tmp_path: Path) -> subprocess.CompletedProcess:
    """Rank 0's end, beside rank 1, of `code`."""
    code = f'import pathlib, test_cpu; place = pathlib.{tmp_path / "met"!r}; test_cpu.{code}'
    commands = [[sys.executable, '-c', code.replace('RANK', str(rank))] for rank in (0, 1)]
    path = {'PYTHONPATH': os.pathsep.join(sys.path)}
    with subprocess.Popen(commands[1], env={**os.environ, **path}, stderr=subprocess.PIPE):
        return run(commands[0], env=path)


@pytest.mark.parametrize('late', [True, False])
def test_ends_with_a_collective_on_its_way(late, tmp_path):
    """Else its thread, done with a tensor while Python is ending, aborts the process."""
    done = both(f'leave(RANK, place, {late})', tmp_path)
    assert done.returncode == 0, done.stderr


def test_fails_at_once_with_a_collective_on_its_way(tmp_path):
    """Rank 1 hears of it when the process has ended, so that must wait for nothing."""
    done = both('fail(RANK, place)', tmp_path)
    assert done.returncode == 1, done.stderr
    assert done.stderr.rstrip().endswith('ValueError: what failed')
