"""Data for the training tests."""

from __future__ import annotations

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
