"""Processes with the CUDA device that records streams, for the tests without Megatron."""

from collections.abc import Callable, Iterator

import pytest
from ranks import Pool, Ranks
from recorded import build, device


def pytest_itemcollected(item: pytest.Item) -> None:
    """No release of Megatron decides what runs without it."""
    if item.path.name != 'test_watchdog.py':  # how processes end depends on Python
        item.add_marker(pytest.mark.one_release)


@pytest.fixture(scope='package')
def cuda_ranks() -> Iterator[Callable[[int], Ranks]]:
    """As `ranks`, in processes that have the device: who has it keeps it."""
    pool = Pool(device.join, build.build(), emulated=False)
    yield lambda size: Ranks(size, pool)
    pool.stop()
