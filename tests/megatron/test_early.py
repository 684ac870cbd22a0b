"""The plugin before NVIDIA's training loop is imported: it reaches what comes, leaves nothing."""

from __future__ import annotations

import json
import sys

from commands import run
from nvidia import CHECKOUT, needs_training
from paths import SUPPORT

PROGRAM = SUPPORT.joinpath('early.py')


@needs_training
def test_before_the_import():
    done = run([sys.executable, PROGRAM, CHECKOUT or ''], timeout=200)
    assert done.returncode == 0, done.stderr
    before, enabled, after = map(set, json.loads(done.stdout.splitlines()[-1]))
    schedules = 'megatron.core.pipeline_parallel.schedules'
    assert f'{schedules}.forward_backward_pipelining_with_interleaving' in before
    assert not any(place.startswith('megatron.training') for place in before)
    names = {place.rpartition('.')[2] for place in enabled}
    assert {'build_train_valid_test_data_loaders', 'get_batch_on_this_tp_rank'} <= names
    assert 'megatron.training.training.build_train_valid_test_data_loaders' in enabled
    assert not after
