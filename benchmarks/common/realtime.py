"""Real-time priority while something is measured: on a machine that others use, too.

A rank that wakes up late because another program has its core would be taken for a slow pipeline.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def realtime(wanted: bool = True) -> Iterator[None]:
    """All threads of this process come before those of ordinary programs; also gloo's.

    Raises:
        PermissionError: the user may not.
        OSError: not on Linux.
    """
    if not wanted:
        yield
        return
    if not hasattr(os, 'sched_setscheduler'):
        raise OSError('real-time priority can be had on Linux only: leave --realtime out')
    _schedule(os.SCHED_FIFO, 1)
    try:
        yield
    finally:
        _schedule(os.SCHED_OTHER, 0)


def _schedule(policy: int, priority: int) -> None:
    for thread in Path('/proc/self/task').iterdir():
        try:
            os.sched_setscheduler(int(thread.name), policy, os.sched_param(priority))
        except ProcessLookupError:  # it has ended meanwhile
            continue
        except PermissionError as error:
            raise PermissionError(
                'real-time priority is not permitted: run as root, allow it by `ulimit -r 1`, or '
                'leave --realtime out'
            ) from error
