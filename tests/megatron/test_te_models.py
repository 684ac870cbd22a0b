"""Whole models of Transformer Engine's layers: as by Megatron's own schedule, to the bit."""

from __future__ import annotations

import pytest
from gpu import CUDA, marks
from grids import grid
from models import KINDS, Job, check
from nvidia import known_config
from supported import absent, supports

pytestmark = marks if CUDA else [pytest.mark.te]
SCHEDULES = ('zb-h1', 'zb-v', 'zb-2p+post-validation')
SHAPES = {
    'pp 4': {'pp': 4},
    'tp 2': {'tp': 2},
    'overlap': {'dp': 2, 'overlap': True},
    'distributed': {'dp': 2, 'distributed': True},
    'ep 2': {'dp': 2, 'ep': 2, 'overlap': True, 'distributed': True},
}


@pytest.mark.shared
@supports('GPT of {kind}, {recompute}')
@grid(
    kind=tuple(KINDS),
    schedule=SCHEDULES,
    fused=(True, False, True, False, False),
    bf16=(True, True, False, False, True),
    recompute=(None, 'full', 'selective', None, 'selective'),
)
def test_kinds(te_ranks, data, kind, schedule, fused, bf16, recompute):
    """Layers of each kind; their weight gradients added to `main_grad` by the product or by
    Megatron, their activations kept or computed anew."""
    check(te_ranks, data, schedule, Job(kind, bf16=bf16, fused=fused, recompute=recompute))


@pytest.mark.shared
@supports('GPT of {kind}, {shape}')
@grid(
    when=lambda shape, kind, **_: shape != 'ep 2' or 'experts' in kind,
    shape=tuple(SHAPES),
    kind=('MLA', 'SwiGLU', 'grouped experts', 'dense', 'experts'),
    schedule=('zb-2p+post-validation', 'zb-h1', 'zb-v', 'zb-2p+post-validation', 'zb-v'),
    fused=(False, True, True, False),
)
def test_shapes(te_ranks, data, shape, kind, schedule, fused):
    """Longer pipelines; ranks that share tensors, experts, and the optimizer's state."""
    check(te_ranks, data, schedule, Job(kind, bf16=True, fused=fused, **SHAPES[shape]))


@supports('GPT of grouped experts, dispatch overlapped with their weight gradients')
@grid(schedule=('1f1b', 'interleaved', '1f1b-v'), dp=(2, 1))
def test_dispatch_overlapped_with_weight_gradients(te_ranks, data, schedule, dp):
    """By Megatron's own hooks, in schedules that leave the backward whole."""
    if 'overlap_dispatch_backward_with_experts_wgrad' not in te_ranks(2).run(known_config)[0]:
        absent('from 0.18 on')
    check(te_ranks, data, schedule, Job('overlapped experts', bf16=True, fused=True, dp=dp, ep=dp))
