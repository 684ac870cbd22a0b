"""Readings of Megatron's settings that several rooms share, and where its own offloading fits."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from megatron_zbpp.ir import BW, B, F, Pass, Schedule

# of a HybridModel or MambaModel, whose layers are laid out by the order of the ranks
HYBRID = (
    'hybrid_layer_pattern',
    'hybrid_override_pattern',
    'hybrid_attention_ratio',
    'hybrid_mlp_ratio',
)
IN_A_LOOP = (
    'this release of Megatron lays the layers of a hybrid model out in a loop, which this schedule '
    'has not',
    'take a schedule that has, such as zb-h1, or megatron-core from 0.17 on',
)
OVERLAP = 'overlap_moe_expert_parallel_comm'
OFFLOADING, OFFLOADED = 'fine_grained_activation_offloading', 'offload_modules'
_BY_TOKEN = {'none', 'aux_loss', 'seq_aux_loss'}  # whose routers look at one token at a time


def scales_late(settings: Any) -> bool:
    """Return True if FP8 takes its scales from the largest values of earlier forwards."""
    recipe = getattr(settings, 'fp8_recipe', None)
    delayed = getattr(recipe, 'value', recipe) in (None, 'delayed')
    return bool(getattr(settings, 'fp8', None)) and delayed


def hybrid(settings: Any) -> str | None:
    """Return the setting that makes it a HybridModel or MambaModel; None: there is none."""
    return next((name for name in HYBRID if getattr(settings, name, None)), None)


def not_by_token(balancing: str | Sequence[str] | None) -> str:
    """Return load-balancing types that are not known to route token by token; empty: all are."""
    types = [balancing] if isinstance(balancing, str) else balancing or ()
    return ', '.join(each for each in types if each not in _BY_TOKEN)


def offloads_in_order(schedule: Schedule) -> bool:
    """Return True if backwards of each rank come as Megatron's own offloading takes them to.

    And nothing moves or makes again what forwards have saved beside it. It is told of forwards
    only, and takes for granted which chunk runs back next: as Megatron's own schedules have it.
    Where another does, it ends with an assertion, or brings back the wrong tensors.

    Forwards of the last chunk of a rank run back in the order in which they came. Those of the
    other chunks are put behind them once the last one has had as many as the first: all of the last
    but one, then of the one before (`PipelineOffloadManager.flush` of Megatron-Core).
    """
    placement = schedule.placement
    if schedule.graph.techniques or len(placement.routes) > 1:
        return False
    return all(
        _as_taken([(p, placement.chunk_of(p.stage)) for p in order], placement.num_chunks)
        for order in schedule.passes
    )


def _as_taken(order: Sequence[tuple[Pass, int]], num_chunks: int) -> bool:
    waiting: list[list[Pass]] = [[] for _ in range(num_chunks)]  # by chunk
    expected: list[Pass] = []
    alike, ran = True, 0  # whether all chunks had as many at each flush, which is asserted

    def flush() -> None:
        nonlocal alike
        if len(waiting[0]) == len(waiting[-1]):
            alike &= len({*map(len, waiting)}) == 1
            expected.extend(itertools.chain(*waiting[-2::-1]))
            waiting[:] = [[] for _ in waiting]

    for p, chunk in order:
        if p.kind == F:
            last = chunk == num_chunks - 1
            if last:
                flush()
                expected.append(p)
            waiting[chunk].append(p)
            if last:
                flush()
        elif p.kind in (B, BW):
            if expected[ran : ran + 1] != [p._replace(kind=F)]:
                return False
            ran += 1
    return alike
