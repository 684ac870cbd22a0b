"""Processes with the CUDA device that records streams, for the tests without Megatron."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from ranks import Pool, Ranks
from recorded import build, device

# how processes end depends on Python
_OF_EACH_PYTHON = ('test_orphans.py', 'test_watchdog.py')


def pytest_itemcollected(item: pytest.Item) -> None:
    """No release of Megatron decides what runs without it."""
    if item.path.name not in _OF_EACH_PYTHON:
        item.add_marker(pytest.mark.one_release)


@pytest.fixture(scope='package')
def cuda_ranks() -> Iterator[Callable[[int], Ranks]]:
    """As `ranks`, in processes that have the device: who has it keeps it."""
    pool = Pool(device.join, build.build(), emulated=False)
    yield lambda size: Ranks(size, pool)
    pool.stop()


@pytest.fixture
def cuda(cuda_ranks: Callable[[int], Ranks]) -> Callable[..., object]:
    """`cuda(work, *args)`: what `work(*args)` returns in one such process."""
    return lambda work, *args: cuda_ranks(1).run(work, *args)[0]
