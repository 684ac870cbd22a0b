"""Ranks of a benchmark as processes of this machine, on gloo, with one thread each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
import torch.multiprocessing as mp
from tqdm import tqdm

Sample = TypeVar('Sample')

# without warnings about what only a GPU has
_ENVIRONMENT = {
    'OMP_NUM_THREADS': '1',
    'PYTHONWARNINGS': 'ignore',
    'TORCH_CPP_LOG_LEVEL': 'ERROR',
    'GLOO_SOCKET_IFNAME': 'lo',
}


def spawned(function: Callable, num_ranks: int, job: Any) -> Iterator[Any]:
    """Yield what `function(rank, job, port, queue)` puts into `queue` on any rank, as it comes.

    Raises:
        RuntimeError: a rank failed; the message has its traceback.
    """
    queue = mp.get_context('spawn').SimpleQueue()
    # held here: no port is looked for that another program may take before a rank listens
    meeting = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
    with _environment():
        arguments = job, meeting.port, queue
        processes = mp.spawn(function, arguments, nprocs=num_ranks, join=False)
    try:
        ended = False
        while not ended or not queue.empty():
            ended = ended or processes.join(0.0 if not queue.empty() else 0.05)
            while not queue.empty():
                yield queue.get()
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        raise RuntimeError(str(error)) from None
    finally:
        for process in processes.processes:
            process.terminate()


@contextmanager
def _environment() -> Iterator[None]:
    """Inside, processes start with `_ENVIRONMENT`, but for what the user has set."""
    before = dict(os.environ)
    os.environ.update(_ENVIRONMENT | before)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def collected(
    found: Iterable[tuple[int, Sample | None]], titles: Sequence[str], rounds: int
) -> list[list[Sample]]:
    """Return the samples of each of several, which take turns; None does not count. Shows progress.

    Args:
        found: (index of the one measured, its sample).
        titles: of those that are measured.
        rounds: in which each has its turn, after one that does not count.
    """
    samples: list[list[Sample]] = [[] for _ in titles]
    total = len(titles) * (rounds + 1)
    with tqdm(total=total, desc='starting', unit='run', disable=None) as bar:
        for index, sample in found:
            bar.set_description(f'{titles[index]:27}')
            bar.update()
            if sample is not None:
                samples[index].append(sample)
    return samples


@contextmanager
def joined(
    rank: int, num_ranks: int, port: int | str | None, meeting: str = '', **sizes: int
) -> Iterator[None]:
    """Inside, Megatron runs on the CPU, with groups of those sizes on ranks that leave together.

    Args:
        rank, num_ranks: of this process, and of all.
        port: where `spawned` lets them meet; or a file, where their networks differ; None: they do
            not, this one runs alone, and its messages take no time and carry nothing.
        meeting: another name for each time that these ranks meet.
        sizes: as Megatron's `initialize_model_parallel` takes them.
    """
    import torch

    from megatron_zbpp.emulation import cpu

    torch.set_num_threads(1)
    cpu.install()
    if port is None:
        from torch.testing._internal.distributed import fake_pg

        store = fake_pg.FakeStore()
    elif isinstance(port, str):
        store = dist.FileStore(port, num_ranks)
    else:
        store = dist.PrefixStore(meeting, dist.TCPStore('127.0.0.1', port, is_master=False))
    backend = 'fake' if port is None else 'gloo'
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks)
    from megatron.core import parallel_state, tensor_parallel

    from benchmarks.common.groups import shared_groups

    with shared_groups():
        parallel_state.initialize_model_parallel(**sizes)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    yield
    dist.barrier()
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():  # else the group of all ranks was one of Megatron's
        dist.destroy_process_group()
