"""A message, and the cures that it names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A message, and what is done about it.

    Attributes:
        given: raises it.
        said: words of it.
        cures: what it names, each done by itself: all of them pass.
    """

    given: Callable
    said: str
    cures: tuple[Callable, ...]


def row(given: Callable, said: str, *cures: Callable) -> Row:
    return Row(given, said, cures)
