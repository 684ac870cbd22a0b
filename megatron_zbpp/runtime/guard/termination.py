"""SIGTERM as something that a thread can read, even while the main thread sits in a C++ wait.

A launcher (torchrun, SLURM) ends the other ranks by SIGTERM as soon as one has died. Python runs
signal handlers between two bytecodes of its main thread, which may never come; but it also writes
the signal's number to a file descriptor at once.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from types import FrameType


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
        """Leave alone what somebody else has set meanwhile."""
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
