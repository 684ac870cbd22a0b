"""A checkpoint of GPTModel goes on as HybridModel, which Megatron translates as it reads it."""

from __future__ import annotations

from pathlib import Path

import pytest
from grids import grid
from nvidia import CHECKOUT, run, since
from supported import absent, supports
from test_hybrid import SPEC, TE, segments
from test_launch import NO_CLIPPING
from test_other_scripts import script

pytestmark = [
    pytest.mark.te,
    pytest.mark.full,
    pytest.mark.skipif(not CHECKOUT, reason='needs a checkout: MEGATRON_LM names it'),
]
PIPELINE = ['--pipeline-model-parallel-size', 2, '--global-batch-size', 6, '--train-iters', 3]
PATTERN = '*-*-*-*-'


@supports('`pretrain_hybrid.py` from a checkpoint of `pretrain_gpt.py`')
@grid(schedule=('zb-v', 'zb-h1', 'interleaved'), saved_by=('megatron', 'zb-v', 'megatron'))
def test_goes_on_as_megatron(te_ranks, tmp_path, schedule, saved_by):
    """By our schedules as by Megatron's own 1F1B; whatever schedule saved it."""
    if not Path(CHECKOUT, 'megatron/core/dist_checkpointing/gpt_checkpoint_interop.py').exists():
        absent('main of August 2026 translates them')
    flags = [*TE, *NO_CLIPPING, *PIPELINE]
    saver = [] if saved_by == 'megatron' else ['--pipeline-schedule', saved_by]
    gpt = run(te_ranks(2), *flags, *saver, '--save', tmp_path, '--save-interval', 1)
    flags += [*SPEC, '--load', tmp_path, '--ckpt-step', 1, '--hybrid-layer-pattern']
    path = script('pretrain_hybrid.py')
    stock = run(te_ranks(2), *flags, segments(PATTERN, 2), script=path)
    ours = run(te_ranks(2), *flags, PATTERN, '--pipeline-schedule', schedule, script=path)
    assert stock.losses == since(1, gpt.losses)
    assert len(ours.losses) == 2
    assert ours.losses == stock.losses
    assert ours.parameters == stock.parameters
    assert ours.optimizer == stock.optimizer
