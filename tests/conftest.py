"""Fixtures for all tiers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from ranks import Ranks


@pytest.fixture(scope='session')
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """`ranks(p)`: a pool of p processes; the same one for every test that asks for p."""
    pools: dict[int, Ranks] = {}
    yield lambda size: pools.setdefault(size, Ranks(size))
    for pool in pools.values():
        pool.stop()
