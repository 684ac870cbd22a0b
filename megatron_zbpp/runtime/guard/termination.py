"""How a rank ends: it hears SIGTERM amid a C++ wait, and its children end with it.

A launcher (torchrun, SLURM) ends the other ranks by SIGTERM as soon as one has died. Python runs
signal handlers between two bytecodes of its main thread, which may never come; but it also writes
the signal's number to a file descriptor at once. The process by which Megatron writes checkpoints
has the sockets of its rank: peers hear nothing of a rank that is killed while its writer lives.
"""

from __future__ import annotations

import ctypes
import functools
import os
import select
import signal
import sys
import threading
from multiprocessing import spawn
from types import FrameType

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
    _bind_forked()
    _bind_spawned()


def _bind_forked() -> None:
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


def _bind_spawned() -> None:
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
        """Return whether SIGTERM comes within `seconds`, not for a handler set after ours."""
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
