"""A pool of processes, one a rank, that stays for many cases: starting them is what costs."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch.multiprocessing as mp


class RankError(AssertionError):
    """A rank raised; the message holds the tracebacks of all that did."""


class Ranks:
    """`size` processes in one gloo group; `run` calls a function on all of them.

    Ranks of an unpickled function import its module, so it must be at the top of one.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[mp.Process] = []
        self._connections: list[Connection] = []
        atexit.register(self.stop)

    def run(self, function: Callable, *args: Any, timeout: float = 300) -> list[Any]:
        """`function(*args)` on every rank; its results by rank.

        Raises:
            RankError: it raised on some rank, or did not end in `timeout` seconds. The processes
                are then gone; the next call starts new ones.
        """
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send((function, args))
        results, errors = [], []
        for rank, connection in enumerate(self._connections):
            if (errors and not connection.poll(5)) or not connection.poll(timeout):
                errors.append(f'rank {rank}: no answer')
                continue
            try:
                failed, value = connection.recv()
            except EOFError:
                failed, value = True, 'died'
            (errors if failed else results).append(f'rank {rank}: {value}' if failed else value)
        if errors:
            self.stop()
            raise RankError('\n'.join(errors))
        return results

    def stop(self) -> None:
        """Ends the processes and whatever they started."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(5)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
        self._processes, self._connections = [], []

    def _start(self) -> None:
        with socket.socket() as free:
            free.bind(('127.0.0.1', 0))
            port = free.getsockname()[1]
        context = mp.get_context('spawn')
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, port, theirs))
            process.start()  # no daemon: saving a checkpoint starts a process of its own
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)


def _serve(rank: int, size: int, port: int, connection: Connection) -> None:
    """Answers calls until the parent is gone."""
    os.setsid()  # so that saving's helper process can be ended with it
    os.environ |= {
        'RANK': str(rank),
        'LOCAL_RANK': str(rank),
        'WORLD_SIZE': str(size),
        'MASTER_ADDR': '127.0.0.1',
        'MASTER_PORT': str(port),
        'GLOO_SOCKET_IFNAME': 'lo',
    }
    import torch

    from megatron_zbpp import cpu

    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        cpu.install(alias_sends=False)  # the executor keeps what it sends by itself
    torch.distributed.init_process_group('gloo')
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            return
        try:
            connection.send((False, function(*args)))
        except BaseException:  # reported to the test, SystemExit included
            connection.send((True, traceback.format_exc()))
