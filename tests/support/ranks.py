"""Processes, one a rank, that stay for all tests: starting them is what costs.

Each is a fork of one that has imported Megatron already.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import importlib.util
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from typing import Any

import compiled
import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# of a rank between two calls; and how many more than the last look has left, before the next look
_MOST_THREADS, _MORE_THREADS = 24, 12
# with so many left, ranks start anew: on what holds their groups Python has no hold; more where
# tests of a module keep Megatron's groups for each other
_TOO_MANY, _WITH_KEPT = 60, 150
_SERVERS = 2  # neighbours are forks of different ones: their sets of texts have other orders
_LONGEST = timedelta(minutes=30)  # that a group waits, unless it is told
_LAST_WORDS = 5  # seconds for the others to answer when a rank has failed


class RankError(AssertionError):
    """A rank raised; the message holds the tracebacks of all that did."""


class Pool:
    """As many processes as the largest group had; a smaller group is made of the first of them.

    So idle ones are few: each holds memory.
    `prepare` is called before Megatron is imported in the processes that are forked; where a GPU
    is, in each fork. Unless it sees to that (not `emulated`), what asks for CUDA gets the CPU.
    """

    def __init__(self, prepare: Callable | None = None, *args: Any, emulated: bool = True) -> None:
        self.prepared = torch.cuda.is_available(), emulated, prepare, args
        self._servers: list[tuple[mp.Process, Connection]] = []
        self._processes: list[psutil.Process] = []
        self._connections: list[Connection] = []
        self._stacks: list[int] = []
        self._joined = 0
        self._keeps = False  # whether ranks have Megatron's groups for the next call
        self._store: dist.Store | None = None
        atexit.register(self.stop)

    def run(self, size: int, function: Callable, args: tuple, timeout: float) -> list[Any]:
        """`function(*args)` on the ranks of a group of `size`: see `Ranks.run`."""
        if self._outworn():
            self._end_ranks()
        try:
            self._start(size)
            if self._joined != size:
                # held here: no port is looked for that another program may take meanwhile
                self._store = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
                self._call(size, _join, (size, self._store.port), timeout)
                self._joined = size
            return self._call(size, function, args, timeout)
        except BaseException:  # whatever it is: answers may still be on their way
            self._end_ranks()
            raise

    def _outworn(self) -> bool:
        """Whether a rank ended after its last answer, or has too many threads."""
        most = _WITH_KEPT if self._keeps else _TOO_MANY
        try:
            return any(each.num_threads() > most for each in self._processes)
        except psutil.NoSuchProcess:
            return True

    def stop(self) -> None:
        """Ends the processes and whatever they started."""
        self._end_ranks()
        for process, connection in self._servers:
            connection.close()
            process.join()
        self._servers = []

    def _end_ranks(self) -> None:
        for connection in self._connections:
            connection.close()
        psutil.wait_procs(self._processes, timeout=5)
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        psutil.wait_procs(self._processes)
        for file in self._stacks:
            os.close(file)
        self._processes, self._connections, self._stacks = [], [], []
        self._joined, self._keeps = 0, False

    def _start(self, size: int) -> None:
        for rank in range(len(self._processes), size):
            if rank % _SERVERS == len(self._servers):
                self._servers.append(self._server())
            _, server = self._servers[rank % _SERVERS]
            ours, theirs = mp.Pipe()
            server.send(rank)
            self._stacks.append(os.memfd_create('stacks'))
            for handle in theirs.fileno(), self._stacks[-1]:
                reduction.send_handle(server, handle, None)
            self._processes.append(psutil.Process(server.recv()))
            theirs.close()
            self._connections.append(ours)

    def _server(self) -> tuple[mp.Process, Connection]:
        context = mp.get_context('spawn')
        ours, theirs = context.Pipe()
        process = context.Process(target=_fork_ranks, args=(theirs, *self.prepared))
        process.start()  # no daemon: it has children, which have some where they save a checkpoint
        theirs.close()
        return process, ours

    def _call(self, size: int, function: Callable, args: tuple, timeout: float) -> list[Any]:
        connections = self._connections[:size]
        for connection in connections:
            connection.send((function, args))
        results, errors = {}, {}
        self._keeps = doomed = False
        waiting = dict(zip(connections, range(size), strict=True))
        deadline = time.monotonic() + timeout
        while waiting and (ready := wait([*waiting], max(0, deadline - time.monotonic()))):
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    failed, value, keeps, ends = connection.recv()
                except EOFError:
                    failed, value, keeps, ends = True, 'died', False, False
                self._keeps |= keeps
                doomed |= ends
                (errors if failed else results)[rank] = value
                if failed:  # others may wait for it, and for ever
                    deadline = min(deadline, time.monotonic() + _LAST_WORDS)
        errors |= {rank: f'no answer\n{self._at(rank)}' for rank in waiting.values()}
        if errors:
            raise RankError('\n'.join(f'rank {rank}: {errors[rank]}' for rank in sorted(errors)))
        if doomed:  # by a watchdog, which would strike in a later call
            self._end_ranks()
        return [results[rank] for rank in range(size)]

    def _at(self, rank: int) -> str:
        """The stacks of a rank's threads, as Python tells them while it waits in C, too."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._processes[rank].send_signal(signal.SIGUSR1)
            time.sleep(1)
        written = os.fstat(self._stacks[rank]).st_size
        return os.pread(self._stacks[rank], written, 0).decode(errors='replace')


@dataclass(frozen=True)
class Ranks:
    """A group of `size` processes of `pool`: gloo, and NCCL for tensors of a GPU.

    Ranks of an unpickled function import its module, so it must be at the top of one.
    """

    size: int
    pool: Pool

    def run(self, function: Callable, *args: Any, timeout: float = 200) -> list[Any]:
        """`function(*args)` on every rank; its results by rank.

        Raises RankError if a rank raised or did not end in time: the next call starts new
        processes.
        """
        return self.pool.run(self.size, function, args, timeout)


def _join(size: int, port: int) -> None:
    """Leaves the group that this rank is in, for one of the first `size` ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ |= {'WORLD_SIZE': str(size), 'MASTER_PORT': str(port)}
    os.environ['TORCHELASTIC_USE_AGENT_STORE'] = 'True'  # the store is kept by who starts ranks
    dist.init_process_group(os.environ.get('RANKS_BACKEND', 'gloo'))


def _fork_ranks(
    connection: Connection, gpu: bool, emulated: bool, prepare: Callable | None, prepared: tuple
) -> None:
    """Makes a rank of each number that comes, on the pipe that comes with it, until none can."""
    torch.set_num_threads(1)
    # Megatron's queue of what it has saved is in a process that would import the script again, and
    # torch with it: longer than a training. One that is forked has both.
    spawning: Any = mp.get_context('spawn')
    spawning.Manager = mp.get_context('fork').Manager
    _share_device()
    make_ready = functools.partial(_make_ready, emulated, prepare, prepared)
    if not gpu:
        make_ready()
        _import_megatron()
    gc.collect()
    gc.freeze()
    context, ranks = mp.get_context('fork'), []
    while True:
        ended = wait([connection, *(each.sentinel for each in ranks)])
        for each in [each for each in ranks if each.sentinel in ended]:
            each.join()
            ranks.remove(each)
        if connection in ended:
            try:
                rank = connection.recv()
            except EOFError:
                return
            theirs = Connection(reduction.recv_handle(connection))
            stacks = reduction.recv_handle(connection)
            given = rank, theirs, connection, stacks, make_ready if gpu else None
            ranks.append(context.Process(target=_serve, args=given))
            ranks[-1].start()
            theirs.close()
            os.close(stacks)
            connection.send(ranks[-1].pid)


def _share_device() -> None:
    """One thread carries the messages of all gloo groups, as it wakes 100 times a second."""
    group, make = dist.ProcessGroupGloo, dist.ProcessGroupGloo.__init__
    device = functools.cache(group.create_default_device)

    def make_on_device(
        self: Any, store: dist.Store, rank: int, size: int, timeout: timedelta = _LONGEST
    ) -> None:
        options = group._Options()
        options._devices, options._timeout = [device()], timeout
        make(self, store, rank, size, options)

    group.__init__ = make_on_device


def _make_ready(emulated: bool, prepare: Callable | None, prepared: tuple) -> None:
    from megatron_zbpp.emulation import cpu

    if not emulated:
        pass
    elif torch.cuda.is_available():
        from shared_gpu import join_gpu

        join_gpu(int(os.environ['RANK']))
    else:
        cpu.install(alias_sends=False)  # the executor keeps what it sends by itself
    if prepare is not None:
        prepare(*prepared)


def _import_megatron() -> None:
    """Imports what nearly every test of it needs, unless a checkout takes its place in some.

    What a server has not imported, each of its forks does: with the training loop, 450 modules.
    """
    if 'MEGATRON_LM' in os.environ or importlib.util.find_spec('megatron') is None:
        return
    names = ['pretrain_gpt', 'torch._dynamo', 'sympy']  # the last two: the first step and backward
    names += ['pytest', 'models', 'megatron_zbpp.mcore.plugin']
    if importlib.util.find_spec('megatron.training') is not None:
        names += ['megatron.training.training', 'megatron_zbpp.launch', 'nvidia', 'pretrain_script']
    for name in names:
        importlib.import_module(name)
    if compiled.DONE.exists():
        compiled.load()
    if 'nvidia' in names:
        sys.modules['nvidia'].read_descriptions_once()


def _serve(
    rank: int,
    connection: Connection,
    parents: Connection,
    stacks: int,
    make_ready: Callable | None,
) -> None:
    """Answers calls until the parent is gone."""
    parents.close()
    faulthandler.register(signal.SIGUSR1, stacks)
    os.setsid()  # so that saving's helper process can be ended with it
    os.environ |= {'RANK': str(rank), 'MASTER_ADDR': '127.0.0.1', 'GLOO_SOCKET_IFNAME': 'lo'}
    os.environ.setdefault('LOCAL_RANK', str(rank))
    if make_ready is not None:
        make_ready()
    most = _MOST_THREADS
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            return
        keeps = False
        try:
            value = function(*args)
            keeps = _keeps_groups()
            # whether a watchdog is to end this process, since a training that it watched has failed
            watched = any(thread.name == 'watchdog' for thread in threading.enumerate())
            connection.send((False, value, keeps, not keeps and watched))
        except BaseException:  # reported to the test, SystemExit included
            connection.send((True, traceback.format_exc(), keeps, False))
        if not keeps and psutil.Process().num_threads() > most:
            let_go()
            if psutil.Process().num_threads() > most:  # held by what was in use before
                gc.unfreeze()
                let_go()
            # a look takes longer than most calls, and what one has left the next leaves, too
            most = max(_MOST_THREADS, psutil.Process().num_threads() + _MORE_THREADS)


def _keeps_groups() -> bool:
    """Whether a function has left Megatron's groups to the next one, and not by an error."""
    state = sys.modules.get('megatron.core.parallel_state')
    return state is not None and state.model_parallel_is_initialized()


def let_go() -> None:
    """Frees groups that nobody uses: each has threads that wake 100 times a second.

    What holds them goes in turns: modules when graphs are gone that held them, then their groups.
    What is still in use then, mostly Python's modules, is not looked at again: a look at all of it
    takes as long as a small training.
    """
    for _ in range(3):
        gc.collect()
    gc.freeze()
