"""Where Megatron's own offloading of activations, by modules of a layer, fits a schedule.

It is told of forwards only, and takes for granted which chunk runs back next: as Megatron's own
schedules have it. Where another does, it ends with an assertion, or brings back the wrong tensors.

Forwards of the last chunk of a rank run back in the order in which they came. Those of the other
chunks are put behind them once the last one has had as many as the first: all of the last but one,
then of the one before (`PipelineOffloadManager.flush` of Megatron-Core).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_zbpp.ir import BW, B, F, Pass, Schedule

SETTING = 'fine_grained_activation_offloading'
MODULES = 'offload_modules'


def fits(schedule: Schedule) -> bool:
    """Return whether backwards of each rank come as Megatron's own offloading takes them to.

    And nothing moves or makes again what forwards have saved beside it.
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
    alike: list[bool] = []  # whether all chunks had as many then, which is asserted
    ran = 0

    def flush() -> None:
        if len(waiting[0]) == len(waiting[-1]):
            alike.append(len({len(each) for each in waiting}) == 1)
            for chunk in reversed(range(num_chunks - 1)):
                expected.extend(waiting[chunk])
            waiting[:] = [[] for _ in waiting]

    for p, chunk in order:
        if p.kind == F:
            last = chunk == num_chunks - 1
            if last:
                flush()
            waiting[chunk].append(p)
            if last:
                expected.append(p)
                flush()
        elif p.kind in (B, BW):
            if expected[ran : ran + 1] != [p._replace(kind=F)]:
                return False
            ran += 1
    return all(alike)


def end(config: Any, trained: bool) -> None:
    """Let it forget an iteration that has ended, as Megatron's own functions do.

    Args:
        config: of the model.
        trained: whether an iteration of training has begun; before, what an evaluation has told it
            would be taken for the order of training.
    """
    if getattr(config, SETTING, False):
        from megatron_zbpp.mcore import compat  # imports Megatron, which plans do without

        offloading = compat.offloading()
        (offloading.reset if trained else offloading.reset_instance)()
