"""Data for the training tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from example import prepare_on_first
from nvidia import known
from ranks import Ranks
from supported import absent


@pytest.fixture(scope='session')
def data(ranks, tmp_path_factory) -> Path:
    """Prefix of a small data set of real text."""
    prefix = tmp_path_factory.mktemp('data') / 'text'
    pool: Ranks = ranks(2)
    pool.run(prepare_on_first, prefix)
    return prefix


@pytest.fixture(scope='module')
def knows_segments(te_ranks) -> None:
    """Skips where hybrid models have another name and one chunk a rank."""
    if '--hybrid-layer-pattern' not in te_ranks(2).run(known)[0]:
        absent('hybrid models have segments from 0.17 on')
