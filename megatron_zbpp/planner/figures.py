"""Figures of a schedule at its costs: all that tables, scripts and plans' files say of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_zbpp.analysis.gain import gain_of, idle_parts, makespan_of
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.ir import Schedule
from megatron_zbpp.ir.timeline import Timeline
from megatron_zbpp.planner.cases import Case
from megatron_zbpp.techniques.updates.versions import copies, steady_state, updates_of
from megatron_zbpp.techniques.vocabulary.place import WHOLE, has_shards, rival_costs


def shape(schedule: Schedule) -> dict[str, Any]:
    """Return name and sizes of a schedule, for JSON."""
    placement, graph = schedule.placement, schedule.graph
    return {
        'name': schedule.name,
        'ranks': schedule.num_ranks,
        'stages': schedule.num_stages,
        'microbatches': schedule.num_microbatches,
        'slices': graph.num_slices,
        'placement': placement.name,
        'copies': max(copies(schedule)) if updates_of(graph) else len(placement.routes),
        'passes': sum(map(len, schedule.passes)),
    }


def facts(case: Case, timeline: Timeline, against: str) -> dict[str, Any]:
    """Return sizes, times and memory of a schedule, for JSON and tables; `against`: a family."""
    steady = steady_state(timeline)
    m = case.schedule.num_microbatches if steady is None else steady.num_microbatches
    name = against + WHOLE * has_shards(case.schedule)
    own = rival_costs(case.schedule, case.costs)
    rival = makespan_of(against, replace(case.schedule, num_microbatches=m), own)
    taken = timeline.makespan if steady is None else steady.period
    found = {
        **shape(case.schedule),
        'makespan': timeline.makespan,
        'window': max(timeline.windows),
        'bubble': timeline.bubble if steady is None else steady.bubble,
        'idle_busiest_rank': timeline.idle_busiest_rank,
        'bubble_rate_makespan': timeline.idle_busiest_rank,  # earlier names
        'bubble_rate_window': timeline.bubble,
        'idle_all_ranks': timeline.idle_all_ranks,
        'idle_parts': idle_parts(timeline, case.costs)._asdict(),
        'against': None if rival is None else {'name': name, 'makespan': rival},
        'gain': gain_of(taken, rival),
        'peak_activations': peak(case.schedule, case.costs),
    }
    if steady is None:
        return found
    return {
        **found,
        'microbatches_a_call': steady.num_microbatches,
        'period': steady.period,
        'bubble_rate_period': steady.bubble,
        'weight_copies': steady.weight_copies,
        'delays': [delay._asdict() for delay in steady.delays],
    }
