"""Slices by the shape of a model: of Megatron's arguments as of its config, n and sizes."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip('megatron.core')

import torch

from megatron_zbpp import Costs
from megatron_zbpp.mcore.job.model_shape import shape_of
from megatron_zbpp.mcore.programs import Programs
from megatron_zbpp.mcore.settings import BY_FLAG, Settings
from megatron_zbpp.mcore.techniques.slice_choice import settled
from megatron_zbpp.mcore.techniques.sliced_layers import Kept, Slice
from megatron_zbpp.partitioning.shapes import Shape, attention_of
from megatron_zbpp.techniques.slices.balance import Attention, balanced
from megatron_zbpp.techniques.slices.graph import ToFind, sized
from megatron_zbpp.techniques.slices.place import in_slices

SEQ = 65536
SHAPE = Shape('llama', 32, 4096, 32, 1, SEQ, 1.0, ffn=10880, groups=8, head_dim=128)
# not validated: --group-query-attention says whether --num-query-groups counts
ARGS = SimpleNamespace(
    num_layers=32, hidden_size=4096, num_attention_heads=32, seq_length=SEQ, kv_channels=None,
    ffn_hidden_size=None, swiglu=True, group_query_attention=True, num_query_groups=8,
    num_experts=None, multi_latent_attention=False, window_size=None,
)  # fmt: skip
CONFIG = SimpleNamespace(
    num_layers=32, hidden_size=4096, num_attention_heads=32, kv_channels=128, ffn_hidden_size=10880,
    gated_linear_unit=True, num_query_groups=8, num_moe_experts=None,
)  # fmt: skip
LATENT = {
    'multi_latent_attention': True, 'q_lora_rank': 1536, 'kv_lora_rank': 512, 'qk_head_dim': 128,
    'qk_pos_emb_head_dim': 64, 'v_head_dim': 128, 'num_moe_experts': 64, 'moe_router_topk': 6,
    'moe_ffn_hidden_size': 1408, 'moe_shared_expert_intermediate_size': 2816,
    'moe_layer_freq': [0] + [1] * 31,
}  # fmt: skip


def like(settings, **changes):
    return SimpleNamespace(**{**vars(settings), **changes})


@pytest.mark.parametrize(
    ('model', 'shape'),
    [
        (ARGS, SHAPE),
        (CONFIG, SHAPE),
        (like(ARGS, group_query_attention=False, num_query_groups=1), replace(SHAPE, groups=0)),
        (like(ARGS, swiglu=False), replace(SHAPE, model='gpt', ffn=16384)),
        (
            like(ARGS, num_experts=8, moe_router_topk=2, moe_layer_freq=2),
            replace(SHAPE, model='moe', experts=8, dense_first=16),
        ),
        (
            like(CONFIG, **LATENT),
            replace(
                SHAPE, model='mla', groups=0, q_rank=1536, v_dim=128, experts=64, top_k=6,
                expert_ffn=1408, shared_ffn=2816, dense_first=1,
            ),
        ),
        (
            like(ARGS, num_layers=None, hybrid_layer_pattern='*-|*-'),
            replace(SHAPE, model='hybrid', pattern='*-*-', layers=4),
        ),
    ],
)  # fmt: skip
def test_shape(model, shape):
    assert shape_of(model, SEQ) == shape


def test_balanced():
    """The sizes of `zbpp ... --slices balanced:N` for the share that `zbpp profile` prints."""
    share = attention_of(SHAPE).share
    costs = Costs.of([1.0], [1.0 + 1.5 * share], [1.0 - share])
    made, said = settled(Settings('zb-v', slices='balanced:6'), ARGS, 4, {8})
    assert made.sliced == balanced(6, SEQ, Attention(share), costs)
    assert f'{share:.1%} of F' in said and ','.join(map(str, made.sliced)) in said
    made, _ = settled(
        Settings('zb-v', slices='balanced:6'), like(ARGS, tensor_model_parallel_size=3), 4, {8}
    )
    assert not any(size % 384 for size in made.sliced[:-1])


def windowed(**changes):
    made, _ = settled(
        Settings('1f1b', slices='balanced:4'), like(ARGS, window_size=(256, 0), **changes), 4, {8}
    )
    return made.sliced


def test_windows():
    """What attends to a window takes equal slices; with global layers between, it is between."""
    assert windowed() == (SEQ // 4,) * 4
    mixed, whole = windowed(window_attn_skip_freq=4), windowed(window_attn_skip_freq=1)
    assert SEQ // 4 < mixed[0] < whole[0]
    made, _ = settled(Settings('1f1b', slices='balanced:4'), ARGS, 4, {8})
    assert made.sliced == whole


@pytest.mark.parametrize(
    ('asked', 'microbatches', 'slices'),
    [
        ('auto', 4, 16),  # of 4096 tokens
        ('auto', 64, 4),  # of which hardly a bubble is left
        ('auto:8192', 4, 8),
        ('auto:40000', 4, 1),
    ],
)
def test_as_many_as_pay(asked, microbatches, slices):
    made, said = settled(Settings('zb-v', slices=asked), ARGS, 8, {1, microbatches})
    assert len(made.sliced if slices > 1 else (made.sliced,)) == slices
    assert BY_FLAG.fill(said).startswith(f'slices {asked}: as --pipeline-slices ')
    assert ('0.0% less' in said) == (slices == 1)


def test_a_schedule_says_its_own():
    made = in_slices('zb-v', 4, 8, 4)
    own = replace(made, graph=sized(made.graph, (30000, 20000, 10000, 5536)))
    for asked in ('auto', 'balanced:4'):
        found, _ = settled(Settings(own, slices=asked), ARGS, 4, {8})
        assert found.sliced == (30000, 20000, 10000, 5536)
    found, said = settled(Settings(made, slices='auto'), ARGS, 4, {8})
    assert found.sliced == settled(Settings('zb-v', slices='balanced:4'), ARGS, 4, {8})[0].sliced
    assert 'less than whole' not in said


@pytest.mark.parametrize('asked', ['auto', 'balanced:4'])
def test_before_they_are_found(asked):
    """What slices need is there, and refused is what they do not go with; then n is known."""
    programs = Programs(Settings('seq1f1b', slices=asked))
    assert programs.to_find_slices and programs.num_slices > 1
    assert 'sliced' in programs.traits(4).techniques and programs.cuts(CONFIG, SEQ) == ()
    assert programs.key == f'seq1f1b in {asked} slices'
    programs.slice_by(1)
    assert programs.cuts(CONFIG, SEQ) == (0, SEQ) and 'sliced' not in programs.traits(4).techniques
    programs.slice_by((SEQ - 4096, 4096))
    assert programs.num_slices == 2 and programs.cuts(CONFIG, SEQ) == (0, SEQ - 4096, SEQ)
    assert not programs.to_find_slices


def test_sizes_in_words():
    for text in ('auto', 'auto:2048', 'balanced:4'):
        assert str(Settings('zb-v', slices=text).sliced) == text
    assert Settings('zb-v', slices='auto:4096').sliced == ToFind()


def test_memory_is_known_while_it_is_kept():
    kept, layers = Kept(), [torch.nn.Linear(1, 1) for _ in range(2)]
    for microbatch in (0, 1):
        for start in (0, 2):
            part = Slice(microbatch, start, start + 2, 4)
            kept.visited.clear()
            for layer in layers:
                found = kept.extended(layer, part, *torch.zeros(2, 2, 1, 1, 8))
                own = {each.untyped_storage()._cdata for each in found}
                assert len(own) == 2 and own <= kept.storages
    assert len(kept.storages) == 8  # of two microbatches and layers, keys and values
    kept.drop(0)
    assert len(kept.storages) == 4
    kept.drop(1)
    assert not kept.storages
