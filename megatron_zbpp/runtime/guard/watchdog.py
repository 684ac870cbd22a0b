"""Ends a process whose pipeline no longer moves, and says where it stood.

A thread looks at what the main thread does, several times in each `timeout`. From the first pass
on nothing is out of its sight: what is not a pass or a collective of the pipeline is a pause, such
as saving, evaluating or loading data, and has a limit of its own, which is generous. A main thread
that sits in a C++ wait cannot be interrupted, so the process is ended.

A launcher (torchrun, SLURM) ends the other ranks by SIGTERM as soon as one has died. Python runs
signal handlers between two bytecodes of its main thread, which may never come; but it also writes
the signal's number to a file descriptor at once, where the watching thread reads it. The process by
which Megatron writes checkpoints has the sockets of its rank: peers hear nothing of a rank that is
killed while its writer lives, so children end with their rank.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import multiprocessing
import os
import platform
import select
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta
from math import inf
from multiprocessing import spawn
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from megatron_zbpp.runtime import compat
from megatron_zbpp.runtime.executor import Executor
from megatron_zbpp.runtime.guard import Unwatched, activities
from megatron_zbpp.runtime.guard.culprit import Heartbeats, RankStatus

_PR_SET_PDEATHSIG = 1  # prctl(2)
_KILLED = 128 + signal.SIGKILL
# what a spawned child runs first: it has none of our modules
_FIRST = (
    f'import ctypes, os; ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGKILL)}); '
    f'os.getppid() == {{parent}} or os._exit({_KILLED}); '
)
_forking = threading.local()  # which thread, and of which process
_installed = False


def end_with_parent() -> None:
    """Let children of the main thread, from now on, be killed when this process ends.

    Children are those that are forked, and those that multiprocessing spawns.

    Linux only. Children of other threads stay as they are: the kernel ends a child with the thread
    that has forked it.
    """
    global _installed
    if _installed or not sys.platform.startswith('linux'):
        return
    _installed = True
    libc = ctypes.CDLL(None, use_errno=True)  # loaded before a fork: a child may not load

    def before() -> None:
        _forking.parent = os.getpid()
        _forking.main = _on_main_thread()

    def after_in_child() -> None:
        if not _forking.main:
            return
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != _forking.parent:  # it has ended meanwhile
            os._exit(_KILLED)

    os.register_at_fork(before=before, after_in_child=after_in_child)
    original = spawn.get_command_line

    @functools.wraps(original)
    def get_command_line(**handles: int) -> list[str]:
        words = original(**handles)
        if _on_main_thread() and '-c' in words:  # a frozen program has its own way
            program = words.index('-c') + 1
            words[program] = _FIRST.format(parent=os.getpid()) + words[program]
        return words

    spawn.get_command_line = get_command_line


class Termination:
    """Catches SIGTERM from its making to `remove`, if nothing else does.

    Only the main thread may catch signals; made on another one, or where SIGTERM or the wake-up
    descriptor is taken already, it catches nothing, and `wait` just waits.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        if not _on_main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        taken = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        if taken != -1:
            signal.set_wakeup_fd(taken)
            return
        signal.signal(signal.SIGTERM, _caught)
        # a data loader's worker must die of its SIGTERM, and not tell it to its parent
        os.register_at_fork(after_in_child=self._give_back)

    def wait(self, seconds: float) -> bool:
        """Return True if SIGTERM comes within `seconds`, not for a handler set after ours."""
        ready, _, _ = select.select([self._reader], [], [], seconds)
        if not ready:
            return False
        numbers = os.read(self._reader, 4096)
        return signal.SIGTERM in numbers and signal.getsignal(signal.SIGTERM) is _caught

    def wake(self) -> None:
        """End a `wait` at once."""
        os.write(self._writer, b'\0')

    def remove(self) -> None:
        """Give SIGTERM back; once nobody waits any more, on the main thread."""
        if not _on_main_thread():
            return  # the interpreter may still write to the descriptor
        self._give_back()
        os.close(self._reader)
        os.close(self._writer)

    def _give_back(self) -> None:
        if not _on_main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is _caught:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        descriptor = signal.set_wakeup_fd(-1)
        if descriptor != self._writer:
            signal.set_wakeup_fd(descriptor)


def _caught(number: int, frame: FrameType | None) -> None:
    """Do nothing: the thread that reads the descriptor acts."""


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


EXIT_CODE = 124  # as of timeout(1)
_LOOKS = 8  # in each timeout
_PAUSE = 600  # seconds that a pause may last at least
_LAST_WORDS = 5  # seconds to write them
_FRAMES = 4  # calls of the stack that are written
_PEER_LOSS_GRACE_S = 1  # seconds in which a loss is heard of that the main thread has noticed
_STDERR = 2  # its descriptor, whatever sys.stderr has become


class _Watch(NamedTuple):
    """The thread that watches, from the first activity on."""

    thread: threading.Thread  # looks at the main one
    termination: Termination  # wakes it
    heartbeats: Heartbeats  # tell the other ranks


class Watchdog(Unwatched):
    """Watches one process.

    Choose as `timeout` several times what an iteration takes: a rank that waits for others makes no
    step forward meanwhile.
    """

    def __init__(
        self,
        timeout: float,  # seconds without a step forward, an eighth more at most, to the end
        # the same for a pause; 0: any time; None: ten timeouts, and not less than ten minutes
        pause_timeout: float | None = None,
    ) -> None:
        if timeout < 0:
            raise ValueError(f'watchdog timeout {timeout} is negative: give seconds, or 0 for none')
        if pause_timeout is None:
            pause_timeout = max(10 * timeout, _PAUSE)
        if pause_timeout < 0:
            raise ValueError(
                f'watchdog pause timeout {pause_timeout} is negative: give seconds, or 0'
            )
        self.timeout, self._pause_timeout = timeout, pause_timeout
        self._activity: activities.Activity | None = None
        self._pause: activities.Pause | None = None  # since the activity is over
        self._failed = self._reported = False
        self._reporting = threading.Lock()  # of either thread
        self._stopping = False
        self._watch: _Watch | None = None
        self._stalled = 0.0  # seconds without a step forward
        self._groups: dict[dist.ProcessGroup, Any] = {}  # of gloo
        self._rank = self._watched = 0  # global rank; identity of the thread
        self._device: int | None = None  # that the main thread computes on

    def collective(self, what: str) -> AbstractContextManager[None]:
        return self._watching(activities.Collective(what))

    @contextmanager
    def passes(self, executor: Executor, part_of: str | None = None) -> Iterator[None]:
        pp_group = executor.channels.pp_group
        if pp_group not in self._groups:
            with self.collective('connecting the watchdogs of the pipeline'):
                assert self._watch is not None  # from the first activity on
                self._watch.heartbeats.meet()
                self._groups[pp_group] = _host_group(pp_group, 2 * self.timeout)
        with self._watching(activities.Passes(executor, self._groups[pp_group], part_of)):
            yield

    def forwards(self, executor: Executor) -> AbstractContextManager[None]:
        return self._watching(activities.Forwards(executor))

    @contextmanager
    def _watching(self, activity: activities.Activity) -> Iterator[None]:
        """Give the process `timeout` seconds after an exception to end or to begin something."""
        before = self._activity
        self._activity, self._failed, self._reported = activity, False, False
        if torch.cuda.is_initialized():
            self._device = torch.cuda.current_device()
        self._start()
        try:
            yield
            self._pause = activities.Pause(self._watched)
            activity.ended()
            if before is not None and before.beat() is not None and activity.beat() is None:
                self._activity = before
        except BaseException as error:
            self._failed = True
            self._report(f'{type(error).__name__}: {error}'.partition('\n')[0], error)
            raise

    def stop(self) -> None:
        atexit.unregister(self.stop)
        watch, activity = self._watch, self._activity
        if watch is None or activity is None or self._failed:
            return
        if _lost(activity):
            self._failed = True
            self._report('another rank of the pipeline is gone', dist.DistError())
            return
        self._stopping = True
        watch.termination.wake()
        watch.thread.join()
        watch.heartbeats.end()
        watch.termination.remove()
        self._watch = self._activity = self._pause = None
        self._groups.clear()  # and their threads: one that is busy when Python ends aborts it

    def _start(self) -> None:
        if self._watch is None:
            self._rank, self._watched = dist.get_rank(), threading.get_ident()
            self._stopping = False
            termination = Termination()
            end_with_parent()
            of_both = termination, Heartbeats(self._rank, dist.get_world_size())
            thread = threading.Thread(target=self._run, args=of_both, name='watchdog', daemon=True)
            self._watch = _Watch(thread, *of_both)
            thread.start()
            atexit.register(self.stop)

    def _run(self, termination: Termination, heartbeats: Heartbeats) -> None:
        """Look at activities, and count looks, not seconds: a suspended machine is no stall."""
        seen, looks = None, 0
        between = min(self.timeout, self._pause_timeout or self.timeout) / _LOOKS
        while not self._stopping:
            if termination.wait(between):
                self._end('SIGTERM', 128 + signal.SIGTERM, self._failed)
            self._enter_device()
            activity, failed = self._current(), self._failed
            beat = None if activity is None else activity.beat()
            now = activity, beat, failed
            looks = looks + 1 if beat is not None and now == seen else 0
            seen = now
            self._stalled = looks * between
            if activity is not None:
                heartbeats.say(self._statement(activity))
            limit = self._pause_timeout if activity is self._pause else self.timeout
            if limit and looks * between >= limit:
                self._end(f'no step forward for {limit:g} s', EXIT_CODE, failed)

    def _current(self) -> activities.Activity | None:
        activity = self._activity
        return self._pause if activity is None or activity.beat() is None else activity

    def _enter_device(self) -> None:
        """Leave GPU 0, where a thread begins: asking events there would make a context on it."""
        if self._device is not None:
            torch.cuda.set_device(self._device)

    def _end(self, why: str, code: int, failed: bool) -> None:
        last_words = threading.Thread(target=self._say, args=(why, failed), daemon=True)
        try:
            last_words.start()
        except RuntimeError:  # Python is ending, and begins no more threads
            self._say(why, failed)
        else:
            last_words.join(_LAST_WORDS)
        for child in multiprocessing.active_children():  # that saves, or loads data
            child.kill()
        os._exit(code)

    def _say(self, why: str, failed: bool) -> None:
        self._enter_device()
        if not failed:
            self._report(why, stack=True)
        elif why != 'SIGTERM' or not self._reported:
            self._write([f'ended after its failure ({why})'])
        with self._reporting:  # of the main thread, to its end
            sys.stdout.flush()

    def _report(self, why: str, error: BaseException | None = None, stack: bool = False) -> None:
        """Report once an activity: the main thread may hear of a loss while its time runs out."""
        with self._reporting:
            if self._reported:
                return
            self._reported = True
            current, watch = self._current(), self._watch
            assert current is not None and watch is not None  # both are before anything can fail
            lines = [f'{name}: {words}' for name, words in current.standing().items()]
            if stack:
                calls = activities.calls_of(self._watched)[:_FRAMES]  # the innermost
                lines.append(f'in: {" < ".join(map(activities.words, calls))}')
            own = self._statement(current)
            if why != 'SIGTERM' and not (own.waits and isinstance(error, RuntimeError | None)):
                own = replace(own, waits=(), failure=why)
            own = replace(own, ending=True)
            stalled = self._stalled if error is None else inf
            self._write([why, *lines, watch.heartbeats.find_culprit(own, stalled)])
            watch.heartbeats.wait_for_queries()

    def _statement(self, activity: activities.Activity) -> RankStatus:
        return RankStatus(activity.standing()['now'], activity.waits(), self._stalled)

    def _write(self, lines: list[str]) -> None:
        """Write the text at once, so that the blocks of several ranks do not mix."""
        title = f'pipeline watchdog: global rank {self._rank} on {platform.node()}: '
        sys.stderr.flush()
        os.write(_STDERR, (title + '\n  '.join(lines) + '\n').encode())


def _lost(activity: activities.Activity) -> bool:
    deadline = time.monotonic() + _PEER_LOSS_GRACE_S
    while activity.beat() is not None and time.monotonic() < deadline:
        if activity.lost():
            return True
        time.sleep(_PEER_LOSS_GRACE_S / 100)
    return False


def _host_group(pp_group: dist.ProcessGroup, timeout: float) -> dist.ProcessGroupGloo:
    """Return the same ranks, connected by their hosts: a collective of these ranks alone.

    `new_group` would need every rank of the world, or, with `use_local_synchronization`, ranks that
    are all in equally many groups (it makes the name from that): those of a pipeline are not.
    """
    name = [uuid.uuid4().hex]
    dist.broadcast_object_list(name, group=pp_group, group_src=0)
    store = PrefixStore(f'watchdog {name[0]}', compat.default_store())
    rank, size = dist.get_rank(pp_group), dist.get_world_size(pp_group)
    return dist.ProcessGroupGloo(store, rank, size, timeout=timedelta(seconds=timeout))
