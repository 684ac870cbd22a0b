"""Megatron's report of the memory that training takes in theory, for the schedule that runs.

It knows two schedules: 1F1B, and interleaved 1F1B wherever a rank has several chunks. So it is
asked about 1F1B, and a line behind it tells what a schedule holds that holds something else.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.mcore.session import Session
from megatron_zbpp.runtime.log import rank_log


def wrapped(session: Session, original: Callable) -> Callable:
    """Return the replacement of `report_theoretical_memory`."""

    @functools.wraps(original)
    def report_theoretical_memory(
        args: Any, num_microbatches: int | None = None, verbose: bool = False
    ) -> Any:
        ranks = args.pipeline_model_parallel_size
        if session.latest is None or num_microbatches is None or ranks == 1:
            return original(args, num_microbatches, verbose)
        by_1f1b = copy.copy(args)
        by_1f1b.virtual_pipeline_model_parallel_size = None
        found = original(by_1f1b, num_microbatches, verbose)
        schedule = session.programs.lowered(ranks, num_microbatches, forward_only=False).schedule
        most = max(peak(schedule, Costs.uniform(schedule.placement)))
        if found is None or most == min(ranks, num_microbatches):
            return found
        weights, activation, _ = found
        activation *= most / min(ranks, num_microbatches)
        rank_log.info(
            f'that is of 1F1B; {schedule.name} has {most:g} microbatches in flight: '
            f'activation={activation:.2f} MB, total={weights + activation:.2f} MB'
        )
        return weights, activation, weights + activation

    return report_theoretical_memory
