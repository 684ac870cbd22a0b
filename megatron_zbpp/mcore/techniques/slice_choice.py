"""Which slices sequences have, where the shape of the model is to say: before anything runs.

Another number amid a run, or after a checkpoint, would change sums. So nothing is measured: F, B
and W take what the model's layers compute (`partitioning.shapes`). Measured times go another way:
`zbpp plan --slices auto` takes them, and its plan says how long slices are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from math import lcm
from typing import Any

from megatron.core.transformer.utils import is_layer_window_attention

from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.timeline import Timeline
from megatron_zbpp.mcore.settings import Settings
from megatron_zbpp.partitioning.shapes import Shape, attention_of
from megatron_zbpp.planner.slice_counts import Count, doubled, fewest
from megatron_zbpp.techniques.slices.balance import TILE, Attention, balanced, in_parts
from megatron_zbpp.techniques.slices.place import in_slices
from megatron_zbpp.techniques.slices.sizes import ToFind, sizes_of

_HARDLY = 0.01  # of the makespan the busiest rank idles: more slices cannot gain more

_Sizes = tuple[int, ...]
_Run = Callable[[_Sizes], Timeline]


def settled(
    settings: Settings, model: Any, num_ranks: int, counts: Collection[int]
) -> tuple[Settings, str]:
    """Return settings with the tokens of slices that are to be found, and what to say of them.

    Args:
        settings: what was asked for.
        model: Megatron's arguments or config, and in it the tokens of a sequence.
        num_ranks: p.
        counts: numbers of microbatches, of which the largest counts.

    Raises:
        ValueError: sequences are too short, or sizes are missing.
    """
    asked, schedule = settings.sliced, settings.schedule
    assert isinstance(asked, ToFind)
    length = getattr(model, 'seq_length', None)
    if length is None:
        raise ValueError('--seq-length is missing: give it, or the tokens of each slice')
    attention = _attention(model, length)
    multiple = lcm(TILE, getattr(model, 'tensor_model_parallel_size', 1) or 1)
    forward, backward, weight = _times(attention)
    one = Costs.of([forward], [backward], [weight])
    cut = partial(balanced, length=length, attention=attention, costs=one, multiple=multiple)
    if isinstance(schedule, Schedule):
        sizes, gain = sizes_of(schedule.graph) or cut(schedule.graph.num_slices), ''
    else:
        run = partial(_timeline, settings, num_ranks, max(counts), attention)
        sizes = cut(asked.number) if asked.number else _as_many_as_pay(cut, run, length, asked)
        less = 1 - run(sizes).makespan / run((length,)).makespan
        gain = f'; simulated without messages, {less:.1%} less than whole sequences'
    found = sizes if len(sizes) > 1 else 1
    text = ','.join(map(str, sizes)) if len(sizes) > 1 else '1'
    said = (
        f'slices {asked}: as --pipeline-slices {text}, which keeps them whatever else changes; '
        f'attention takes {attention.share:.1%} of F by the shape of the model{gain}'
    )
    return replace(settings, slices=found), said


def _attention(model: Any, length: int) -> Attention:
    share = attention_of(shape_of(model, length)).share
    window = getattr(model, 'window_size', None)
    if window:
        skipped: Any = getattr(model, 'window_attn_skip_freq', None)
        layers = range(model.num_layers)
        within = [is_layer_window_attention(window, skipped, layer + 1) for layer in layers]
        windowed = share * sum(within) / len(within)
        share -= windowed
        share /= 1 - windowed + windowed * min(1.0, 2 * window[0] / length)
    return Attention(share)


def _times(attention: Attention) -> tuple[float, float, float]:
    """Return F, B and W of a whole sequence: backward takes 2.5 forwards of attention, no W."""
    return 1.0, 1.0 + 1.5 * attention.share, 1.0 - attention.share


def _timeline(
    settings: Settings, num_ranks: int, num_microbatches: int, attention: Attention, sizes: _Sizes
) -> Timeline:
    """Return the simulated iteration with these slices; stages have as many layers each."""
    assert isinstance(settings.schedule, str)
    shape, chunks = (num_ranks, num_microbatches, len(sizes)), settings.num_chunks
    limit = settings.memory_limit
    made = in_slices(settings.schedule, *shape, num_chunks=chunks, memory_limit=limit)
    whole = Costs.uniform(made.placement, *_times(attention))
    return simulate(made, in_parts(whole, sizes, attention))


def _as_many_as_pay(cut: Callable[[int], _Sizes], run: _Run, length: int, asked: ToFind) -> _Sizes:
    """Return 1, 2, 4, ... slices: the fewest that are hardly longer than any."""
    found: list[Count] = []
    passes = sum(map(len, run((length,)).spans))
    for sizes in doubled(cut, length, asked.least, passes):
        timeline = run(sizes)
        found.append(Count(sizes, '', timeline.makespan))
        if timeline.idle_busiest_rank <= _HARDLY:
            break
    return fewest(found).sizes


def shape_of(model: Any, length: int) -> Shape:
    """Return the shape of a model by Megatron's arguments, validated or not, or by its config.

    Raises:
        ValueError: sizes are missing.
    """

    def first(*names: str, default: Any = 0) -> Any:
        return next((found for name in names if (found := getattr(model, name, None))), default)

    hidden, heads = first('hidden_size'), first('num_attention_heads')
    layers, pattern = first('num_layers'), first('hybrid_layer_pattern', default='')
    pattern = pattern.partition('/')[0].replace('|', '')
    if not hidden or not heads or not (layers or pattern):
        raise ValueError(
            'slices: how many layers and heads of which size the model has is not said, so no '
            'sizes can be found: give the tokens of each slice'
        )
    latent, experts = first('multi_latent_attention'), first('num_moe_experts', 'num_experts')
    gated = first('gated_linear_unit', 'swiglu')
    ffn = first('ffn_hidden_size') or (4 * hidden * 2 // 3 // 64 * 64 if gated else 4 * hidden)
    grouped = getattr(model, 'group_query_attention', True)
    kind = 'hybrid' if pattern else 'mla' if latent else 'moe' if experts else ''
    every = first('moe_layer_freq', default=1)
    dense = every.count(0) if isinstance(every, list) else layers - layers // every
    return Shape(
        kind or ('llama' if gated else 'gpt'),
        layers=len(pattern) or layers,
        hidden=hidden,
        heads=heads,
        vocab=1,
        seq=length,
        tflops=1.0,
        ffn=ffn,
        groups=0 if latent else first('num_query_groups') if grouped else 0,
        head_dim=first('qk_head_dim' if latent else 'kv_channels', default=hidden // heads),
        experts=experts,
        top_k=min(first('moe_router_topk', default=2), experts) if experts else 2,
        expert_ffn=first('moe_ffn_hidden_size'),
        shared_ffn=first('moe_shared_expert_intermediate_size'),
        dense_first=dense if experts and not pattern else 0,
        q_rank=first('q_lora_rank'),
        kv_rank=first('kv_lora_rank', default=512),
        rope_dim=first('qk_pos_emb_head_dim', default=64),
        v_dim=first('v_head_dim'),
        pattern=pattern,
    )
