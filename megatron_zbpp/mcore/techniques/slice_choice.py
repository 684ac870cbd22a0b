"""Which slices sequences have, where the shape of the model is to say: before anything runs.

Another number amid a run, or after a checkpoint, would change sums. So nothing is measured: F, B
and W take what the model's layers compute (`partitioning.shapes`). Measured times go another way:
`zbpp plan --slices auto` takes them, and its plan says how long slices are.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from math import lcm
from typing import Any

from megatron.core.transformer.utils import is_layer_window_attention

from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.timeline import Timeline
from megatron_zbpp.mcore.job.model_shape import shape_of
from megatron_zbpp.mcore.settings import Settings
from megatron_zbpp.partitioning.shapes import attention_of
from megatron_zbpp.planner.sequence_slices import Count, doubled, fewest
from megatron_zbpp.techniques.slices.balance import TILE, Attention, balanced, in_parts
from megatron_zbpp.techniques.slices.graph import ToFind, sizes_of
from megatron_zbpp.techniques.slices.place import in_slices

_HARDLY = 0.01  # of the makespan the busiest rank idles: more slices cannot gain more


def settled(
    settings: Settings, model: Any, num_ranks: int, counts: Collection[int]
) -> tuple[Settings, str]:
    """Return settings with the tokens of slices that are to be found, and what to say of them.

    `model` are Megatron's arguments or config, and in it the tokens of a sequence. Of the numbers
    of microbatches, `counts`, the largest counts.

    Raises:
        ValueError: sequences are too short, or sizes are missing.
    """
    asked, schedule = settings.sliced, settings.schedule
    assert isinstance(asked, ToFind)
    length = getattr(model, 'seq_length', None)
    if length is None:
        raise ValueError('{seq_length} is missing: give it, or the tokens of each slice')
    attention = _attention(model, length)
    multiple = lcm(TILE, getattr(model, 'tensor_model_parallel_size', 1) or 1)
    # F, B and W of a whole sequence: backward takes 2.5 forwards of attention, no W
    forward, backward, weight = 1.0, 1.0 + 1.5 * attention.share, 1.0 - attention.share
    one = Costs.of([forward], [backward], [weight])
    cut = partial(balanced, length=length, attention=attention, costs=one, multiple=multiple)

    def run(sizes: tuple[int, ...]) -> Timeline:
        """Return the simulated iteration with these slices; stages have as many layers each."""
        assert isinstance(schedule, str)
        shape, chunks = (num_ranks, max(counts), len(sizes)), settings.num_chunks
        made = in_slices(schedule, *shape, num_chunks=chunks, memory_limit=settings.memory_limit)
        costs = Costs.uniform(made.placement, forward, backward, weight)
        return simulate(made, in_parts(costs, sizes, attention))

    if isinstance(schedule, Schedule):
        sizes, gain = sizes_of(schedule.graph) or cut(schedule.graph.num_slices), ''
    else:
        whole = run((length,))
        if asked.number:
            sizes = cut(asked.number)
        else:  # 1, 2, 4, ... slices: the fewest that are hardly longer than any
            found: list[Count] = []
            for each in doubled(cut, length, asked.least, sum(map(len, whole.spans))):
                timeline = run(each)
                found.append(Count(each, '', timeline.makespan))
                if timeline.idle_busiest_rank <= _HARDLY:
                    break
            sizes = fewest(found).sizes
        less = 1 - run(sizes).makespan / whole.makespan
        gain = f'; simulated without messages, {less:.1%} less than whole sequences'
    slices, text = (sizes, ','.join(map(str, sizes))) if len(sizes) > 1 else (1, '1')
    said = (
        f'slices {asked}: as {{slices}} {text}, which keeps them whatever else changes; '
        f'attention takes {attention.share:.1%} of F by the shape of the model{gain}'
    )
    return replace(settings, slices=slices), said


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
