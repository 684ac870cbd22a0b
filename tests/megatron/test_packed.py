"""Sequences packed behind each other, of other lengths in each microbatch, in NVIDIA's loop."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from grids import grid
from nvidia import CHECKOUT, needs_training, run, since
from supported import supports
from test_launch import NO_CLIPPING
from test_launch_post_validation import EARLY
from wheels import skip_oldest

pytestmark = [
    pytest.mark.te,
    needs_training,
    pytest.mark.skipif(
        CHECKOUT is not None and find_spec('datasets') is None,
        reason="needs datasets: NVIDIA's script reads with it",
    ),
]

PACKED = """--sft --no-create-attention-mask-in-dataloader --position-embedding-type rope
    --transformer-impl transformer_engine --bf16 --calculate-per-token-loss""".split()


@supports('packed sequences (`--sft`)')
@grid(schedule=('zb-v', 'zb-h1+post-validation', 'interleaved', 'dualpipe-v'), p=(2, 2, 2, 4))
def test_identical_to_megatron(request, te_ranks, tmp_path, schedule, p):
    """From a checkpoint of Megatron's own 1F1B; every stage reads where the sequences end."""
    skip_oldest(request, 'has no attention to packed sequences without a GPU')
    name, _, early = schedule.partition('+')
    flags = [*PACKED, *NO_CLIPPING, '--pipeline-model-parallel-size', p, '--num-layers', 2 * p]
    flags += ['--global-batch-size', 6, '--train-iters', 4]
    stock = run(te_ranks(p), *flags, '--save', tmp_path, '--save-interval', 1)
    assert len(set(stock.losses.values())) == 4
    ours = ['--load', tmp_path, '--ckpt-step', 1, '--pipeline-schedule', name]
    found = run(te_ranks(p), *flags, *ours, *(EARLY if early else ()))
    assert found.losses == since(1, stock.losses)
    assert found.parameters == stock.parameters
    assert found.optimizer == stock.optimizer
