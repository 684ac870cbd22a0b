"""Data for the training tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import Ranks


def _prepare(prefix: Path) -> None:
    import prepare_data

    prepare_data.prepare(prefix, max_bytes=500_000)


@pytest.fixture(scope='session')
def data(ranks, tmp_path_factory) -> Path:
    """Prefix of a small data set of real text."""
    prefix = tmp_path_factory.mktemp('data') / 'text'
    pool: Ranks = ranks(2)
    pool.run(_prepare_on_first, prefix)
    return prefix


def _prepare_on_first(prefix: Path) -> None:
    import torch.distributed as dist

    if dist.get_rank() == 0:
        _prepare(prefix)
    dist.barrier()
