"""What techniques make of a plain pipeline changes on purpose only.

`graphs.json` beside this file holds a hash of each graph, of what is compiled of it, and of what it
costs. Where one was changed on purpose, write it anew and say why in the commit:

    PYTHONPATH=tests/support python tests/unit/ir/test_graphs_stay.py
"""

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from stays import golden

from megatron_zbpp import Costs, Placement
from megatron_zbpp.ir.graph import DEVICE, HOST, PARTNER, compiled
from megatron_zbpp.ir.techniques import applied

TECHNIQUES = {
    'recompute': [((0,),), ((0, 2),)],
    'offload': [((1,), 'host'), ((0, 2), 'partner')],
    'sliced': [(2,), (3,)],
    'split_vocabulary': [(3, 1), (3, 2)],
    'updating': [(1, False), (2, True)],
}
# each way of each by itself; then every two, with the first way of one and the last of the other
CASES = [
    *[((name, way),) for name, ways in TECHNIQUES.items() for way in ways],
    *[
        ((one, TECHNIQUES[one][0]), (other, TECHNIQUES[other][-1]))
        for one, other in itertools.permutations(TECHNIQUES, 2)
    ],
    (('split_vocabulary', (3, 1)), ('split_embedding', (3,))),
    (),
]
POOLS = DEVICE, HOST, PARTNER


def costs_of(num_sites: int) -> Costs:
    """Sites that differ, with all that a kind may take."""
    of = [1.0 + site / 4 for site in range(num_sites)]
    return Costs.of(
        tuple(of),
        tuple(1.5 * each for each in of),
        tuple(0.75 * each for each in of),
        comm=0.25,
        activation=tuple(2 * each for each in of),
        retained=tuple(0.5 * each for each in of),
        parameters=tuple(of),
        speeds=(1.0, 0.5, 2.0),
        edges=((0, 1, 0.75),),
        times={kind: tuple(0.25 * each for each in of) for kind in 'OLEKRSTU'},
        amounts={'input': tuple(0.125 * each for each in of)},
    )


def answers(techniques: tuple) -> Iterator[object]:
    graph = applied(3, techniques)
    flat = compiled(graph)
    yield sorted((name, kind) for name, kind in graph.kinds.items())
    yield sorted((task, needs) for task, needs in graph.needs.items())
    yield graph.techniques, graph.num_slices, list(graph.sites), sorted(graph.doers.items())
    yield sorted(flat.rows.items()), sorted(flat.steps.items()), flat.looks_back
    yield [sorted(each) for each in (flat.on_copy_engines, flat.leaving, flat.arriving)]
    yield sorted(flat.between_partners), flat.changes
    placement, costs = Placement.loop(3), costs_of(len(graph.sites) if graph.sites else 3)
    yield [sorted(costs.changes(graph, pool).items()) for pool in POOLS]
    passes = sorted({(task.kind, task.stage) for task in graph.needs})
    taken = [kind for kind in passes if kind[0] in {*'FBW', *costs.times}]
    yield [costs.duration(graph, *each, rank) for each in taken for rank in range(3)]
    yield costs_of(3).static(placement), [costs.edge(0, 1), costs.edge(1, 0), costs.edge(1, 2)]


QUESTIONS = {
    ' + '.join(f'{name} {way}' for name, way in case) or 'none': partial(answers, case)
    for case in CASES
}
test_graphs_stay = golden(__name__, Path(__file__).with_name('graphs.json'), QUESTIONS)
