"""The summary of a training at its end, in NVIDIA's loop.

That loop says on all ranks when training is done, and when a limit of time or iterations, or a
signal, ends the program before. There, where all ranks have met, they are asked. A job that is
killed says nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_zbpp.mcore.session import Session
from megatron_zbpp.mcore.summary import summarise
from megatron_zbpp.runtime.log import job_log

_ENDS = ('after training is done', 'exiting program')


def wrapped(session: Session, original: Callable) -> Callable:
    """Return the replacement of `print_datetime`."""

    @functools.wraps(original)
    def print_datetime(string: str, *args: Any, **kwargs: Any) -> None:
        original(string, *args, **kwargs)  # waits for all ranks
        summary = summarise(session) if str(string).startswith(_ENDS) else None
        if summary is not None:
            job_log.info(str(summary))

    return print_datetime
