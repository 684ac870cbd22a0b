"""Processes that are ranks of one job on one GPU.

NCCL refuses two ranks on one GPU of one host. Each rank says that it is on a host of its own
(`NCCL_HOSTID`), and NCCL talks through sockets: real communicators, kernels and order, no speed.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_NCCL = {
    'NCCL_NET': 'Socket',
    'NCCL_SOCKET_IFNAME': '=lo',
    'NCCL_IB_DISABLE': '1',
    'NCCL_P2P_DISABLE': '1',
    'NCCL_SHM_DISABLE': '1',
    'NCCL_CUMEM_ENABLE': '0',
    'NCCL_MNNVL_ENABLE': '0',
}


def shared_environment(rank: int) -> dict[str, str]:
    """Return what lets a rank share a GPU with others, and makes it compute the same each time."""
    bits = {'CUBLAS_WORKSPACE_CONFIG': ':4096:8'}
    return {**_NCCL, 'NCCL_HOSTID': f'host{rank}', 'GLOO_SOCKET_IFNAME': 'lo', **bits}


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    """Return what makes a process rank `rank` of `size` on this host's first GPU."""
    return {
        **shared_environment(rank),
        'RANK': str(rank),
        'LOCAL_RANK': '0',  # all of them on the first GPU
        'WORLD_SIZE': str(size),
        'MASTER_ADDR': '127.0.0.1',
        'MASTER_PORT': str(port),
        'OMP_NUM_THREADS': '1',
    }


def run(size: int, words: Sequence[str], logs: Path, seconds: float, **more: str) -> str:
    """Run `python words` on `size` ranks; return why it failed, empty: all ended with 0.

    Args:
        size: how many ranks.
        words: of the command, behind the interpreter.
        logs: a folder that takes a file of each rank.
        seconds: after which what still runs is ended: it hangs.
        more: of the environment of each.
    """
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = free.getsockname()[1]
    logs.mkdir(parents=True, exist_ok=True)
    processes = []
    for rank in range(size):
        with (logs / f'rank{rank}.log').open('w') as log:
            env = os.environ | environment(rank, size, port) | more
            made = subprocess.Popen(
                [sys.executable, *words], cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT
            )
            processes.append(made)
    try:
        return _wait(processes, time.monotonic() + seconds, seconds)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _wait(processes: list[subprocess.Popen], deadline: float, seconds: float) -> str:
    """Return once all have ended, or one has failed, or time is up."""
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        failed = [(rank, code) for rank, code in enumerate(codes) if code not in (None, 0)]
        if failed:
            return f'rank {failed[0][0]} ended with {failed[0][1]}'
        if all(code == 0 for code in codes):
            return ''
        time.sleep(0.05)
    left = [rank for rank, process in enumerate(processes) if process.poll() is None]
    return f'ranks {left} hang: they had not ended after {seconds:g} s'
