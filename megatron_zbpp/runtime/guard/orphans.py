"""Processes that a rank has forked or spawned end with it, whatever ends it.

Megatron forks a process that writes checkpoints. It has the sockets of its rank: where a rank is
killed and its writer lives on, peers hear of nothing and wait. It also spawns one that keeps the
writers' queue, which would stay for ever.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys
import threading
from multiprocessing import spawn

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


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
