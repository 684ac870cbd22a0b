"""Megatron's own offloading of activations under our schedules, where it fits: to the bit.
`test_refusals_when_built.py` has where it does not."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from events import before
from grids import some
from models import Job, assert_same, reference, train
from supported import supports

from megatron_zbpp.mcore import compat
from megatron_zbpp.schedules import build

pytestmark = pytest.mark.te
ATTENTION = ('core_attn', 'attn_proj', 'qkv_linear')
EXPERTS = ('expert_fc1', 'moe_act')


def counting(job, argv):
    """As `train`; and how many tensors went to the host and came back."""
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as own

    handler, counts = own.ChunkOffloadHandler, {'offload': 0, 'reload': 0}
    own.PipelineOffloadManager.reset_instance()  # this process has trained others

    def note(name, *_, **__):
        counts[name] += 1

    noted = [(handler, name, partial(note, name)) for name in counts]
    with before(*noted), pytest.MonkeyPatch.context() as patch:
        if hasattr(handler, '_can_manage_tensor_for_offload'):  # it asks for the type `cuda`
            plain = staticmethod(lambda tensor: not isinstance(tensor, torch.nn.Parameter))
            patch.setattr(handler, '_can_manage_tensor_for_offload', plain)
        return train(job, argv), counts


def chunk_of_one_layer():
    """Whether the second module of a layer counts for the next chunk, and whether that is known. In
    the second iteration: what runs back first has one layer, whose modules all stay."""
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as own

    manager = own.PipelineOffloadManager
    manager.reset_instance()
    init = manager.init_model_chunk_offload_handler
    more = {'pp_rank': 0} if compat.takes(init, 'pp_rank') else {}
    named = compat.takes(own.ChunkOffloadHandler.on_group_commit_forward, 'name')
    found = []
    for iteration in range(2):
        for _ in range(2 - iteration):  # microbatches; of the second iteration, one will do
            manager.get_instance().init_model_chunk_offload_handler(**more, vp_size=1, vp_stage=0)
            for name in ('core_attn', 'attn_proj'):
                handler = manager.get_instance().pop_forward_chunk(name=name)
                handler.on_group_start_forward(name)
                handler.on_group_commit_forward(*([name] if named else []), [])
                found.append(handler)
        if iteration == 0:
            manager.get_instance().reset()
    manager.reset_instance()
    return found[4] is not found[5], compat.forgets_modules_that_stay()


def test_chunks_of_one_layer(te_ranks):
    """Where the module that comes next would count for the next chunk, that is known."""
    for moves, known in te_ranks(2).run(chunk_of_one_layer):
        assert moves == known


def test_chunks_of_one_layer_are_refused_where_megatron_fails(te_ranks, data):
    """Megatron's own schedule fails there, too: `test_chunks_of_one_layer` has why."""
    job = Job(bf16=True, modules=ATTENTION, layers=1)
    argv = job.argv('1f1b', False, data)
    if all(known for _, known in te_ranks(2).run(chunk_of_one_layer)):
        with pytest.raises(Exception, match='two layers or more in each chunk'):
            te_ranks(2).run(counting, job, argv)
        return
    check(te_ranks, data, '1f1b', job)


def check(ranks, data, schedule, job):
    """As by Megatron's own 1F1B that keeps everything on the device."""
    plain = replace(job, modules=())
    found = ranks(job.size).run(counting, job, job.argv(schedule, False, data))
    assert_same([trained for trained, _ in found], reference(ranks, data, plain))
    for _, counts in found:
        assert counts['offload'] == counts['reload'] > 0


@supports("Megatron's own offloading of activations, {kind}", '{schedule}')
@some(
    'schedule, kind, fused, bf16',
    [
        ('zb-h1', 'dense', True, True),
        ('1f1b', 'grouped experts', False, True),
        ('interleaved', 'dense', False, True),
    ],
    ('1f1b', 'dense', True, False),
    ('zb-h2', 'grouped experts', False, True),
    ('zb-h1', 'grouped experts', False, False),
    ('zb-interleaved', 'dense', True, True),
    ('zeropp', 'dense', False, True),
)
def test_to_the_bit(te_ranks, data, schedule, kind, fused, bf16):
    """Where backwards come in the order that it takes for granted."""
    modules = ATTENTION + (EXPERTS if kind == 'grouped experts' else ())
    layers = 2 * (1 if build(schedule, 2, 4).placement.num_chunks == 1 else 2)
    job = Job(kind, fused=fused, bf16=bf16, modules=modules, layers=layers)
    check(te_ranks, data, schedule, job)


@pytest.mark.full
@supports("Megatron's own offloading of activations, an evaluation between", '1f1b')
def test_an_evaluation_between(te_ranks, data):
    check(te_ranks, data, '1f1b', Job(bf16=True, dropout=0.1, modules=ATTENTION))
