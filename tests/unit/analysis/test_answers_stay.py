"""Orders that users train with, graphs of techniques, and analyses change on purpose only.

`orders.json`, `graphs.json` and `numbers.json` beside this file hold a hash of each answer, for
uneven times with messages and copies. Where one was changed on purpose, write them anew, look at
what differs, and say why in the commit:

    PYTHONPATH=tests/support python tests/unit/analysis/test_answers_stay.py
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from stays import golden

from megatron_zbpp import Costs, Family, Placement, Schedule, build, simulate
from megatron_zbpp.analysis.fit_costs import fit, full_rank, measured_costs, middle, with_bytes
from megatron_zbpp.analysis.gain import critical_path, gaps
from megatron_zbpp.analysis.lowering import lower
from megatron_zbpp.analysis.memory import begun, highest, live, peak, stored
from megatron_zbpp.analysis.program import EARLY, LATE, LATEST
from megatron_zbpp.analysis.run_ahead import passes_ahead, passes_run_ahead, split
from megatron_zbpp.ir.graph import DEVICE, HOST, PARTNER, compiled
from megatron_zbpp.ir.techniques import applied
from megatron_zbpp.schedules import FAMILIES
from megatron_zbpp.techniques.evict import with_eviction
from megatron_zbpp.techniques.offload import offloaded
from megatron_zbpp.techniques.recompute import recomputed

TIMES = ((5.0, 6.0, 4.0), (1.0, 2.5, 1.0), (3.0, 3.0, 1.0))


def costs_of(num_sites: int, num_ranks: int) -> Costs:
    """Sites of three kinds in turn, the last one heavy, with all that costs can say."""
    of = [*(TIMES[site % 3] for site in range(num_sites - 1)), (6.0, 9.0, 5.0)]
    forward, backward, weight = (tuple(kind) for kind in zip(*of, strict=True))
    held = tuple(1.0 + site / 4 for site in range(num_sites))
    return Costs.of(
        forward,
        backward,
        weight,
        comm=0.5,
        together=0.875,
        message=0.125,
        activation=held,
        retained=tuple(0.75 * each for each in held),
        parameters=held,
        edges=tuple((rank, rank - 1, 0.75 + rank) for rank in range(1, num_ranks)),
        speeds=(1.0, 0.5, *(1.0,) * num_ranks)[:num_ranks],
        times={kind: tuple(0.25 * each for each in forward) for kind in 'OLEKRSTU'},
        amounts={'input': tuple(each / 8 for each in held)},
    )


def costs_for(schedule: Schedule) -> Costs:
    return costs_of(schedule.num_stages, schedule.num_ranks)


# ---- Orders: every size, by equal and by uneven costs, with the default and with other chunks.


SIZES = (1, 3), (2, 5), (3, 2), (4, 8), (5, 7)  # ranks and microbatches
LIMITS = 1.5, 2.0, 3.0  # in activations of one microbatch on a full rank


def orders(family: Family) -> Iterator[object]:
    for p, m in SIZES:
        for chunks in {family.default_chunks: None, family.chunks[:3][-1]: None}:
            if p < family.min_ranks:
                continue
            given = partial(build, family.name, p, m, num_chunks=chunks)
            made = [plain := given(), given(costs=costs_for(plain))]
            made += [given(together=True)] if 'together' in family.options else []
            limits = LIMITS if 'memory_limit' in family.options else ()
            made += [given(memory_limit=limit) for limit in limits]
            yield from ((each.passes, sorted(each.together), each.phases) for each in made)


ORDERS = {each.name: partial(orders, each) for each in sorted(FAMILIES, key=lambda each: each.name)}
test_orders_stay = golden(__name__, Path(__file__).with_name('orders.json'), ORDERS)


# ---- Graphs: what techniques make of a plain pipeline, what is compiled of it, and what it costs.


TECHNIQUES = {
    'recompute': [((0,),), ((0, 2),)],
    'offload': [((1,), 'host'), ((0, 2), 'partner')],
    'sliced': [(2,), (3,)],
    'split_vocabulary': [(3, 1), (3, 2)],
    'updating': [(1, False), (2, True)],
}
# each way of each by itself; then every two, with the first way of one and the last of the other
CASES = [((name, way),) for name, ways in TECHNIQUES.items() for way in ways]
PAIRS = itertools.permutations(TECHNIQUES.items(), 2)
CASES += [((one, ways[0]), (other, others[-1])) for (one, ways), (other, others) in PAIRS]
CASES += [(('split_vocabulary', (3, 1)), ('split_embedding', (3,))), ()]


def graphs(techniques: tuple) -> Iterator[object]:
    graph = applied(3, techniques)
    flat = compiled(graph)
    yield sorted((name, kind) for name, kind in graph.kinds.items())
    yield sorted((task, needs) for task, needs in graph.needs.items())
    yield graph.techniques, graph.num_slices, list(graph.sites), sorted(graph.doers.items())
    yield sorted(flat.rows.items()), sorted(flat.steps.items()), flat.looks_back
    yield [sorted(each) for each in (flat.on_copy_engines, flat.leaving, flat.arriving)]
    yield sorted(flat.between_partners), flat.changes
    costs = costs_of(len(graph.sites) if graph.sites else 3, 3)
    yield [sorted(costs.changes(graph, pool).items()) for pool in (DEVICE, HOST, PARTNER)]
    passes = sorted({(task.kind, task.stage) for task in graph.needs})
    taken = [kind for kind in passes if kind[0] in {*'FBW', *costs.times}]
    yield [costs.duration(graph, *each, rank) for each in taken for rank in range(3)]
    edges = [costs.edge(*pair) for pair in ((0, 1), (1, 0), (1, 2))]
    yield costs_of(3, 3).static(Placement.loop(3)), edges


GRAPHS = {
    ' + '.join(f'{name} {way}' for name, way in case) or 'none': partial(graphs, case)
    for case in CASES
}
test_graphs_stay = golden(__name__, Path(__file__).with_name('graphs.json'), GRAPHS)


# ---- Numbers: what the analyses say of each schedule.


def numbers(schedule: Schedule) -> Iterator[object]:
    costs = costs_for(schedule)
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
    costs = costs_for(schedule)
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
        yield list(numbers(schedule))


def built(name: str, m: int) -> Schedule:
    return build(name.removesuffix(AS_ONE), 4, m, together=name.endswith(AS_ONE))


AS_ONE = ', F & B as one'
NAMES = [family.name for family in FAMILIES]
NAMES += [family.name + AS_ONE for family in FAMILIES if 'together' in family.options]
BASES = ('1f1b', 'zb-h1', 'zb-v', 'interleaved', f'dualpipe-v{AS_ONE}')
NUMBERS = {
    **{name: lambda name=name: numbers(built(name, 7)) for name in NAMES},
    **{f'{name}, with actions': partial(of_actions, name) for name in BASES},
}
test_numbers_stay = golden(__name__, Path(__file__).with_name('numbers.json'), NUMBERS)
