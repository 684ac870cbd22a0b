"""Local checkpoints of NVIDIA's loop: kept by rank, for the placement that saved them.

They need nvidia-resiliency-ext 0.5 or later, whose wheels ask for glibc 2.39: elsewhere they are
tried with the wheel unpacked on PYTHONPATH.
"""

from __future__ import annotations

import importlib.util
import shutil

import pytest
from nvidia import needs_training, run, since
from supported import refuses, supports
from test_launch import NO_CLIPPING, PIPELINE
from test_rank_files import refused

pytestmark = [
    needs_training,
    pytest.mark.skipif(
        importlib.util.find_spec('nvidia_resiliency_ext') is None,
        reason='local checkpoints need nvidia-resiliency-ext',
    ),
]

FLAGS = [*PIPELINE, *NO_CLIPPING, '--train-iters', 4, '--pipeline-schedule']


@pytest.fixture
def saved(ranks, tmp_path):
    """Flags that go on from a local checkpoint of zb-v, and what it gave to the end."""
    flags = [
        *('--non-persistent-ckpt-type', 'local', '--non-persistent-save-interval', 3),
        *('--non-persistent-local-ckpt-dir', tmp_path / 'local'),
        *('--save', tmp_path / 'global', '--load', tmp_path / 'global', '--save-interval', 100),
    ]
    whole = run(ranks(2), *FLAGS, 'zb-v', *flags)
    shutil.rmtree(tmp_path / 'global')  # which has the end of training
    return flags, whole


@supports("NVIDIA's loop: local checkpoints", 'zb-v')
@refuses('local checkpoint, of another placement', 'it is kept by rank and chunk', 'zb-h1')
def test_for_the_placement_that_saved(ranks, saved, tmp_path):
    flags, whole = saved
    kind, text = refused(ranks(2), *FLAGS, 'zb-h1', *flags)
    assert kind is ValueError
    assert text.startswith(f'{tmp_path / "local"} cannot be loaded: a local checkpoint is kept by')
    assert 'rank 0 holds layers 2 | 3 by zb-v, but E 1-2 by zb-h1' in text
    assert 'load a checkpoint that is not local' in text
    again = run(ranks(2), *FLAGS, 'zb-v', *flags)
    assert again.losses == since(3, whole.losses)
    assert again.parameters == whole.parameters
