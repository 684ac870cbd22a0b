"""Processes with the CUDA device that records streams, for the tests without Megatron."""

from collections.abc import Callable, Iterator
from functools import partial

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


@pytest.fixture
def cuda(cuda_ranks: Callable[[int], Ranks]) -> Callable[..., object]:
    """`cuda(work, *args)`: what `work(*args)` returns in one such process."""
    return lambda work, *args: cuda_ranks(1).run(work, *args)[0]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test marked `on_ranks(n)` on each of n ranks, `on_device` on the recorded device."""
    on, device = map(pyfuncitem.get_closest_marker, ('on_ranks', 'on_device'))
    if on is None and device is None:
        return None
    fixture, size = ('ranks', *on.args) if on else ('cuda_ranks', 1)
    names = pyfuncitem.obj.__code__.co_varnames[: pyfuncitem.obj.__code__.co_argcount]
    work = partial(pyfuncitem.obj, **{name: pyfuncitem.funcargs[name] for name in names})
    pyfuncitem._request.getfixturevalue(fixture)(size).run(work)
    return True
