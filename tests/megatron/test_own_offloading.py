"""Megatron's own offloading of activations under our schedules, where it fits: to the bit.

`test_refusals.py` has where it does not.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from models import Job, assert_same, train
from supported import supports

pytestmark = pytest.mark.te
ATTENTION = ('core_attn', 'attn_proj', 'qkv_linear')
EXPERTS = ('expert_fc1', 'moe_act')


def counting(job, argv):
    """As `train`; and how many tensors went to the host and came back."""
    import torch
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as own

    handler, counts = own.ChunkOffloadHandler, {'offload': 0, 'reload': 0}
    own.PipelineOffloadManager.reset_instance()  # this process has trained others

    def counted(name):
        original = getattr(handler, name)

        def call(self, *args, **kwargs):
            counts[name] += 1
            return original(self, *args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in counts:
            patch.setattr(handler, name, counted(name))
        if hasattr(handler, '_can_manage_tensor_for_offload'):  # it asks for the type `cuda`
            plain = staticmethod(lambda tensor: not isinstance(tensor, torch.nn.Parameter))
            patch.setattr(handler, '_can_manage_tensor_for_offload', plain)
        trained = train(job, argv)
    return trained, counts


def check(ranks, data, schedule, job):
    """As by Megatron's own 1F1B that keeps everything on the device."""
    plain = replace(job, modules=())
    reference = ranks(job.size).run(train, plain, plain.argv('megatron', False, data))
    found = ranks(job.size).run(counting, job, job.argv(schedule, False, data))
    assert_same([trained for trained, _ in found], reference)
    for _, counts in found:
        assert counts['offload'] == counts['reload'] > 0


@supports("Megatron's own offloading of activations, {kind}", '{schedule}')
@pytest.mark.parametrize(
    ('schedule', 'kind', 'fused', 'bf16'),
    [
        ('zb-h1', 'dense', True, True),
        ('1f1b', 'grouped experts', False, True),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ('1f1b', 'dense', True, False),
                ('zb-h2', 'grouped experts', False, True),
                ('zb-h1', 'grouped experts', False, False),
            )
        ),
    ],
)
def test_to_the_bit(te_ranks, data, schedule, kind, fused, bf16):
    """Where backwards come in the order that it takes for granted."""
    modules = ATTENTION + (EXPERTS if kind == 'grouped experts' else ())
    check(te_ranks, data, schedule, Job(kind, fused=fused, bf16=bf16, modules=modules))


@pytest.mark.full
@supports("Megatron's own offloading of activations, an evaluation between", '1f1b')
def test_an_evaluation_between(te_ranks, data):
    check(te_ranks, data, '1f1b', Job(bf16=True, dropout=0.1, modules=ATTENTION))
