"""Patches of NVIDIA's training loop; the modules that have them are imported when it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from megatron_zbpp.mcore.patches.registry import Patch
from megatron_zbpp.mcore.session import Session

_LOOP = 'megatron.training.training'
_MEMORY = 'megatron.training.theoretical_memory_usage'


def patches(session: Session) -> Iterator[Patch]:
    """Yield what prints the line of an iteration, the last line, and the report of memory."""
    for owner, name, module in (
        (_LOOP, 'print_rank_last', 'log_line'),
        (_LOOP, 'print_datetime', 'last_line'),
        (_MEMORY, 'report_theoretical_memory', 'memory_report'),
    ):
        yield Patch(owner, name, _made_by(module, session), everywhere=True, late=True)


def _made_by(module: str, session: Session) -> Callable[[Any], Any]:
    def wrapped(original: Any) -> Any:
        return import_module(f'{__package__}.{module}').wrapped(session, original)

    return wrapped
