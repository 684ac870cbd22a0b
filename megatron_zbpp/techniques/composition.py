"""Which techniques go together: one table, for errors, `zbpp` and the docs alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from megatron_zbpp.ir import Schedule
from megatron_zbpp.ir.graph import PARTNER, Applied


class Clash(NamedTuple):
    """A pair that does not go together.

    Attributes:
        reason: why the second cannot be added to a schedule that has the first.
        cure: what to do.
    """

    reason: str
    cure: str


OVERLAP = 'overlap'
TRAINED = ('recompute', 'offload', 'evict', OVERLAP)
"""Techniques that train, each by itself; the last is pairs of F and BW that run as one."""

PLANNED = ('sliced', 'split_vocabulary', 'updating')
"""Techniques that are planned, simulated and drawn; programs with them are refused."""

_ONCE = Clash('it is placed once', 'leave it out')
_LATE = Clash(
    'copies were given times without passes that run again',
    'take a schedule without it, such as po or 1f1b, and ask for both',
)
_MOVED = Clash(
    'what goes to partners does not go to the host as well',
    'take a schedule that moves nothing, such as 1f1b',
)
CLASHES: Mapping[tuple[str, str], Clash] = {
    **{(name, name): _ONCE for name in ('recompute', 'offload', 'evict')},
    ('offload', 'recompute'): _LATE,
    ('evict', 'offload'): _MOVED,
}
"""By the technique that a schedule has and the one that is to be added."""


def name_of(applied: Applied) -> str:
    """Return by which name of the table a graph's technique goes."""
    return 'evict' if applied.arguments[-1:] == (PARTNER,) else applied.name


def techniques_of(schedule: Schedule) -> Iterator[str]:
    """Yield the names of the techniques that a schedule has."""
    yield from dict.fromkeys(map(name_of, schedule.graph.techniques))
    if schedule.together:
        yield OVERLAP


def require_goes_with(schedule: Schedule, name: str) -> None:
    """Raise ValueError if a technique cannot be added to what a schedule has; it says the cure."""
    for has in techniques_of(schedule):
        clash = CLASHES.get((has, name))
        if clash is not None:
            raise ValueError(
                f'{name}: {schedule.name} has {has} already, and {clash.reason}: {clash.cure}'
            )
