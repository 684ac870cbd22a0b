"""Processes that a rank has forked end with it, whatever ends it.

Megatron forks a process that writes checkpoints. It has the sockets of its rank: where a rank is
killed and its writer lives on, peers hear of nothing and wait.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1  # prctl(2)
_forking = threading.local()  # which thread, and of which process
_installed = False


def end_with_parent() -> None:
    """Lets children that the main thread forks from now on be killed when this process ends.

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
        _forking.main = threading.current_thread() is threading.main_thread()

    def after_in_child() -> None:
        if not _forking.main:
            return
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != _forking.parent:  # it has ended meanwhile
            os._exit(128 + signal.SIGKILL)

    os.register_at_fork(before=before, after_in_child=after_in_child)
