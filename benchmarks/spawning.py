"""Ranks of a benchmark as processes of this machine, on gloo, with one thread each."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import torch.multiprocessing as mp

# without warnings about what only a GPU has
_ENVIRONMENT = {
    'OMP_NUM_THREADS': '1',
    'PYTHONWARNINGS': 'ignore',
    'TORCH_CPP_LOG_LEVEL': 'ERROR',
    'GLOO_SOCKET_IFNAME': 'lo',
}


def spawned(function: Callable, num_ranks: int, job: Any) -> Iterator[Any]:
    """What `function(rank, job, port, queue)` puts into `queue` on any rank, as it comes.

    Raises:
        RuntimeError: a rank failed; the message has its traceback.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    queue = mp.get_context('spawn').SimpleQueue()
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = free.getsockname()[1]
    processes = mp.spawn(function, (job, port, queue), nprocs=num_ranks, join=False)
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


def join(rank: int, num_ranks: int, port: int) -> None:
    """Makes Megatron run on the CPU, with one pipeline of all ranks."""
    import torch
    import torch.distributed as dist

    from megatron_zbpp import cpu

    torch.set_num_threads(1)
    cpu.install()
    address = f'tcp://127.0.0.1:{port}'
    dist.init_process_group('gloo', init_method=address, rank=rank, world_size=num_ranks)
    from megatron.core import parallel_state, tensor_parallel

    from benchmarks.groups import shared_groups

    with shared_groups():
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=num_ranks)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
