"""Whole models of Transformer Engine's layers: as by Megatron's own schedule, to the bit."""

import pytest
from gpu import CUDA, marks
from grids import grid
from models import KINDS, Job, check
from nvidia import known_config
from rows import row, trains
from supported import absent, supports

pytestmark = marks if CUDA else pytest.mark.te
SCHEDULES = ('zb-h1', 'zb-v', 'zb-2p+post-validation')
# longer pipelines; ranks that share tensors, experts, and the optimizer's state
SHAPES = {
    'pp 4': {'pp': 4},
    'tp 2': {'tp': 2},
    'overlap': {'dp': 2, 'overlap': True},
    'distributed': {'dp': 2, 'distributed': True},
    'ep 2': {'dp': 2, 'ep': 2, 'overlap': True, 'distributed': True},
}
# weight gradients are added to `main_grad` by the product or by Megatron, activations kept or
# computed anew
test_identical_to_megatron = trains(
    'GPT of {kind}, ',
    {},
    row(
        '{recompute}',
        SCHEDULES,
        **{'kind': tuple(KINDS), 'fused': (True, False, True, False, False)},
        bf16=(True, True, False, False, True),
        recompute=(None, 'full', 'selective', None, 'selective'),
    ),
    row(
        '{shape}',
        ('zb-2p+post-validation', 'zb-h1', 'zb-v', 'zb-2p+post-validation', 'zb-v'),
        lambda shape, kind, **_: shape != 'ep 2' or 'experts' in kind,
        **{'kind': ('MLA', 'SwiGLU', 'grouped experts', 'dense', 'experts'), 'shape': SHAPES},
        **{'bf16': True, 'fused': (False, True, True, False)},
    ),
    te=True,
)


@supports('GPT of grouped experts, dispatch overlapped with their weight gradients')
@grid(schedule=('1f1b', 'interleaved', '1f1b-v'), dp=(2, 1))
def test_dispatch_overlapped_with_weight_gradients(te_ranks, data, schedule, dp):
    """By Megatron's own hooks, in schedules that leave the backward whole."""
    if 'overlap_dispatch_backward_with_experts_wgrad' not in te_ranks(2).run(known_config)[0]:
        absent('from 0.18 on')
    check(te_ranks, data, schedule, Job('overlapped experts', bf16=True, fused=True, dp=dp, ep=dp))
