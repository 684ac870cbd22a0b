"""What the analyses say of each schedule changes on purpose only.

`numbers.json` beside this file holds a hash of each answer, for uneven times with messages and
copies. Where one was changed on purpose, write it anew and say why in the commit:

    PYTHONPATH=tests/support python tests/unit/analysis/test_numbers_stay.py
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from stays import golden

from megatron_zbpp import Costs, Schedule, build, simulate
from megatron_zbpp.analysis.fit_costs import fit, full_rank, measured_costs, middle, with_bytes
from megatron_zbpp.analysis.gain import critical_path, gaps
from megatron_zbpp.analysis.lowering import lower
from megatron_zbpp.analysis.memory import begun, highest, live, peak, stored
from megatron_zbpp.analysis.program import EARLY, LATE, LATEST
from megatron_zbpp.analysis.run_ahead import passes_ahead, passes_run_ahead, split
from megatron_zbpp.ir.graph import HOST, PARTNER
from megatron_zbpp.schedules import FAMILIES
from megatron_zbpp.techniques.evict import with_eviction
from megatron_zbpp.techniques.offload import offloaded
from megatron_zbpp.techniques.recompute import recomputed

_TIMES = ((2.0, 3.0, 2.0), (3.0, 4.0, 1.0), (2.5, 2.0, 2.5))


def costs_of(schedule: Schedule) -> Costs:
    """Stages of three kinds in turn, and memory that grows with the stage."""
    stages = range(schedule.num_stages)
    forward, backward, weight = zip(*(_TIMES[s % 3] for s in stages), strict=True)
    copies = dict.fromkeys('OLEK', (0.5,) * len(stages))
    held = tuple(1.0 + s / 4 for s in stages)
    return Costs.of(
        forward,
        backward,
        weight,
        comm=0.25,
        together=0.875,
        message=0.125,
        activation=held,
        retained=tuple(0.75 * each for each in held),
        edges=((0, 1, 0.75),),
        speeds=(1.0, 0.5, *(1.0,) * (schedule.num_ranks - 2)),
        times={**copies, 'R': tuple(0.75 * each for each in forward)},
        amounts={'input': tuple(each / 8 for each in held)},
    )


def answers(schedule: Schedule) -> Iterator[object]:
    costs = costs_of(schedule)
    timeline = simulate(schedule, costs)
    yield timeline.spans
    yield timeline.makespan, timeline.bubble_makespan, timeline.bubble_window
    yield live(schedule, costs), highest(schedule, costs), peak(schedule, costs)
    yield lower(schedule, EARLY), passes_ahead(schedule)
    yield [(str(gap), gap.where) for gap in gaps(timeline, 0.5)]
    yield critical_path(timeline, costs)
    yield fit(timeline, 0.25), sorted(timeline.lags().items()), measured_costs(timeline)
    yield timeline.idle_all_ranks, [live(schedule, costs, pool) for pool in (HOST, PARTNER)]
    yield sorted(begun(schedule).items()), stored(schedule, costs)
    counts = passes_ahead(schedule)
    for ranks in range(schedule.num_ranks):
        ahead = passes_run_ahead(schedule, counts, ranks)
        yield sorted(ahead), [split(program, ahead) for program in lower(schedule, EARLY)]
    other = fit(simulate(schedule, replace(costs, comm=0.5)), 0.5)
    seen = {stage: (2.0 + stage, 1.0) for stage in range(schedule.num_stages)}
    full = full_rank(schedule.placement, seen)
    yield middle([fit(timeline, 0.25), costs, other]), full, with_bytes(costs, full or 1.0, seen)
    yield lower(schedule, LATE), lower(schedule, LATEST)


def acted(schedule: Schedule) -> Iterator[Schedule]:
    """Yield the schedule with each of what may be done with activations, and of two together."""
    costs = costs_of(schedule)
    for amount in ('half', 'all', 1):
        yield recomputed(schedule, amount, costs)
    for amount in ('half', 'all', 1, 'auto'):
        yield offloaded(schedule, amount, costs, pairs=amount != 1)
    yield offloaded(schedule, 'auto', costs.with_times(O=(9.0,) * schedule.num_stages))
    yield offloaded(recomputed(schedule, 1, costs), 'all', costs)
    stages = range(schedule.num_stages)
    for share in (0.5, 0.75):
        limits = [share * most for most in peak(schedule, costs)]
        yield with_eviction(schedule, stages, costs, limits)


def of_actions(name: str) -> Iterator[object]:
    for schedule in acted(built(name, 5)):
        yield schedule.name, schedule.passes, sorted(schedule.together)
        yield list(answers(schedule))


def built(name: str, m: int) -> Schedule:
    return build(name.removesuffix(AS_ONE), 4, m, together=name.endswith(AS_ONE))


AS_ONE = ', F & B as one'
NAMES = [family.name for family in FAMILIES]
NAMES += [family.name + AS_ONE for family in FAMILIES if 'together' in family.options]
BASES = ('1f1b', 'zb-h1', 'zb-v', 'interleaved', f'dualpipe-v{AS_ONE}')
QUESTIONS: dict[str, Callable[[], Iterator[object]]] = {
    **{name: lambda name=name: answers(built(name, 7)) for name in NAMES},
    **{f'{name}, with actions': partial(of_actions, name) for name in BASES},
}
test_numbers_stay = golden(__name__, Path(__file__).with_name('numbers.json'), QUESTIONS)
