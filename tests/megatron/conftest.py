"""Data for the training tests."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from example import prepare_on_first
from ranks import Ranks


@pytest.fixture(scope='session')
def data(ranks, tmp_path_factory) -> Path:
    """Prefix of a small data set of real text."""
    prefix = tmp_path_factory.mktemp('data') / 'text'
    pool: Ranks = ranks(2)
    pool.run(prepare_on_first, prefix)
    return prefix


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test marked `on_ranks(n)` on each of n ranks, with its parameters; one that asks for
    ranks itself as it is."""
    on = pyfuncitem.get_closest_marker('on_ranks')
    names = pyfuncitem._fixtureinfo.argnames
    if on is None or {'ranks', 'te_ranks'} & {*names}:
        return None
    fixture = 'te_ranks' if 'te_ranks' in pyfuncitem.fixturenames else 'ranks'
    work = partial(pyfuncitem.obj, **{name: pyfuncitem.funcargs[name] for name in names})
    pyfuncitem._request.getfixturevalue(fixture)(on.args[0]).run(work)
    return True
