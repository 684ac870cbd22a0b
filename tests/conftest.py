"""Fixtures for all tiers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from ranks import Pool, Ranks


@pytest.fixture(scope='session')
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """`ranks(p)`: p processes in a group; the same processes for every test."""
    pool = Pool()
    yield lambda size: Ranks(size, pool)
    pool.stop()
