"""The graph and its techniques: what is needed, held and simulated, told by hand."""

from graphlib import TopologicalSorter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import needs as needed
from orders import by_hand

from megatron_zbpp import Costs, Pass, Placement, Schedule, build, check, simulate
from megatron_zbpp.analysis.memory import live, peak
from megatron_zbpp.ir import Task, chain
from megatron_zbpp.ir.graph import compiled
from megatron_zbpp.ir.techniques import applied
from megatron_zbpp.render.html import html
from megatron_zbpp.render.svg import svg
from megatron_zbpp.schedules import names
from megatron_zbpp.techniques.offload import offload
from megatron_zbpp.techniques.recompute import recompute
from megatron_zbpp.techniques.slices.graph import sliced
from megatron_zbpp.techniques.updates.versions import updating, weight_versions
from megatron_zbpp.techniques.vocabulary.graph import split_vocabulary


def schedule_of(graph, placement, num_microbatches, *orders):
    return by_hand(placement, num_microbatches, *orders, graph=graph)


def needs(graph, task):
    return [str(need.task) for need in graph.needs[task]]


def unit_costs(placement, **given):
    ones = (1.0,) * placement.num_stages
    return Costs.of(ones, ones, ones, **given)


@given(st.sampled_from(names(plain=True)), st.sampled_from([2, 3, 4]), st.integers(1, 9))
def test_predecessors_are_those_of_the_papers(name, p, m):
    try:
        schedule = build(name, p, m)
    except ValueError:  # not for such p and m
        return
    everything = {ran for _, ran in schedule}
    assert all(set(schedule.predecessors(q)) == needed(q, everything) for q in everything)


def test_needs_that_others_imply_are_not_waited_for_twice():
    flat = compiled(chain(3))
    tasks = list(flat.rows)
    for kind, stage, waited in (('B', 0, ['1B']), ('B', 2, ['2F']), ('BW', 1, ['2B'])):
        assert [str(tasks[link.row]) for link in flat.step(kind, stage).links] == waited
    assert chain(2).tasks('BW', 1) == (Task('B', 1), Task('W', 1))
    assert chain(2).doers == {'F': ('F',), 'B': ('B', 'BW'), 'W': ('W', 'BW')}


def test_activations_that_are_made_again_or_leave():
    graph = recompute(chain(2), [0])
    assert needs(graph, Task('R', 0)) == ['0F']
    assert needs(graph, Task('B', 0)) == ['0R', '1B']
    assert Task('R', 1) not in graph.needs
    placement = Placement.loop(2)
    schedule = schedule_of(graph, placement, 1, '0F0 0R0 0B0 0W0', '1F0 1B0 1W0')
    check(schedule)
    costs = unit_costs(placement, amounts={'input': (0.25, 0.25)}, times={'R': (1.0, 1.0)})
    assert live(schedule, costs)[0] == (0.25, 1, 1, 0)
    # R needs its own F only: it runs in the bubble
    assert simulate(schedule, costs).spans[0] == ((0, 1), (1, 2), (3, 4), (4, 5))
    graph = offload(chain(1), [0])
    assert needs(graph, Task('O', 0)) == ['0F']
    assert needs(graph, Task('B', 0)) == ['0L']
    schedule = schedule_of(graph, 1, 2, '0F0 0F1 0O0 0L0 0O1 0B0 0W0 0L1 0B1 0W1')
    check(schedule)
    costs = unit_costs(Placement.loop(1), times={'O': (0.5,), 'L': (0.5,)})
    assert live(schedule, costs) == ((1, 2, 1, 2, 1, 1, 0, 1, 1, 0),)
    assert live(schedule, costs, 'host') == ((0, 0, 1, 0, 1, 1, 1, 0, 0, 0),)
    spans = {str(p): span for p, span in simulate(schedule, costs).by_pass.items()}
    assert spans['0O0'] == (1, 1.5)  # beside F1, from 1 to 2
    assert spans['0F1'] == (1, 2)
    assert spans['0L0'] == (2, 2.5)  # its memory is taken behind F1
    assert spans['0B0'] == (3, 4)  # behind O1, whose memory is to be gone
    schedule = schedule_of(offload(chain(2), [0], 'partner'), 2, 1, '0F0 0E0 0K0 0BW0', '1F0 1BW0')
    check(schedule)
    held = live(schedule, unit_costs(Placement.loop(2)), 'partner')
    assert held == ((0, 1, 0, 0), (0, 0))
    assert peak(schedule, unit_costs(Placement.loop(2))) == (1, 2)


def test_slices_follow_each_other_and_turn_round():
    graph = sliced(chain(2), 2)
    assert needs(graph, Task('F', 1, 1)) == ['0F.1', '1F']
    assert needs(graph, Task('B', 1, 0)) == ['1F', '1B.1']


@pytest.mark.parametrize(
    ('barriers', 'orders'),
    [(1, ('0F0 2S0 2T0 0BW0', '1F0 3S0 1BW0 3T0')), (2, ('0F0 2S0 2T0 0BW0', '1F0 3S0 3T0 1BW0'))],
)
def test_vocabulary_is_on_every_rank(barriers, orders):
    graph = split_vocabulary(chain(2), 2, barriers)
    awaited = {1: ['1F', '2S', '3S'], 2: ['1F', '2T', '3T']}[barriers]
    assert needs(graph, Task('B', 1)) == awaited
    schedule = schedule_of(graph, 2, 1, *orders)
    check(schedule)
    costs = unit_costs(Placement.loop(2), times={'S': (0, 0, 1, 1), 'T': (0, 0, 1, 1)})
    timeline = simulate(schedule, costs)
    assert timeline.by_pass[Pass('S', 2, 0)] == (2, 3)
    assert timeline.makespan == 3 + (barriers - 1) + 2 + 2


@pytest.mark.parametrize('barriers', [1, 2])
def test_shards_of_the_vocabulary_stay_on_their_ranks_when_ranks_are_renamed(barriers):
    """Training runs a V reversed."""
    graph, placement = split_vocabulary(chain(4), 2, barriers), Placement.v(2)
    last = '4T0 3BW0' if barriers == 1 else '3BW0'
    first = '' if barriers == 1 else '4T0'
    orders = f'0F0 3F0 4S0 {first} {last} 0BW0', '1F0 2F0 5S0 5T0 2BW0 1BW0'
    schedule = schedule_of(graph, placement, 1, *orders)
    check(schedule)
    reversed_ = schedule.reversed()
    check(reversed_)
    assert {p.stage for p in reversed_.passes[1] if p.kind in 'ST'} == {5}
    assert reversed_.reversed() == schedule
    costs = unit_costs(placement, times={'S': (0, 0, 0, 0, 1, 1), 'T': (0, 0, 0, 0, 1, 1)})
    assert simulate(reversed_, costs).makespan == simulate(schedule, costs).makespan


def test_updates_and_versions():
    check(schedule_of(updating(chain(1), every=2), 1, 2, '0F0 0BW0 0F1 0BW1 0U1'))
    everywhere = updating(chain(2), everywhere=True)
    assert updating(chain(2)) == updating(chain(2), everywhere=False) != everywhere
    assert needs(everywhere, Task('U', 0)) == ['0W', '1W']
    # microbatch 1 goes forward with the weights that its backward no longer finds
    orders = '0F0 0F1 0BW0 0U0 0BW1 0U1', '1F0 1BW0 1U0 1F1 1BW1 1U1'
    schedule = schedule_of(updating(chain(2)), 2, 2, *orders)
    check(schedule)
    versions = weight_versions(schedule)
    seen = {str(p): version for p, version in versions.items() if p.microbatch == 1}
    assert seen == {'0F1': 0, '0BW1': 1, '0U1': 1, '1F1': 1, '1BW1': 1, '1U1': 1}
    assert {versions[p] for p in versions if p.microbatch == 0} == {0}


def test_passes_together_wait_for_the_inputs_of_both():
    schedule = by_hand(2, 2, '0F0 0F1 0BW0 0BW1', '1F0 (1F1&1BW0) 1BW1')
    check(schedule)
    timeline = simulate(schedule)
    assert timeline.spans[1] == ((1, 2), (2, 3), (3, 5), (5, 7))
    assert timeline.spans[0] == ((0, 1), (1, 2), (5, 7), (7, 9))
    placement = Placement.two_way(2)
    schedule = schedule_of(None, placement, 2, *('0F0 1F1 1BW1 0BW0', '0F1 1F0 1BW0 0BW1'))
    check(schedule)
    assert simulate(schedule, unit_costs(placement)).makespan == 6


TECHNIQUES = st.lists(
    st.one_of(
        st.tuples(st.just('recompute'), st.sampled_from([((0,),), ((0, 1),)])),
        st.tuples(st.just('offload'), st.sampled_from([((0,), 'host'), ((1,), 'partner')])),
        st.tuples(st.just('sliced'), st.just((2,))),
        st.tuples(st.just('split_vocabulary'), st.sampled_from([(2, 1), (2, 2)])),
        st.tuples(st.just('updating'), st.sampled_from([(1, False), (2, True)])),
    ),
    unique_by=lambda technique: technique[0],
    max_size=4,
)


@given(TECHNIQUES)
def test_techniques_compose(techniques):
    """In any order: the tasks of a microbatch can be done one after the other, memory returns to
    what it was, and a file gives the same graph."""
    graph = applied(2, techniques)
    needed = {task: [need.task for need in needs] for task, needs in graph.needs.items()}
    order = [*TopologicalSorter(needed).static_order()]
    placement = Placement.loop(2)
    passes = [
        Pass(task.kind, task.stage, m, task.slice)
        for m in range(2)
        for task in order
        if (m + 1) % graph.kinds[task.kind].every == 0
    ]
    orders = [
        [p for p in passes if placement.rank_of(p.stage, p.microbatch) == rank] for rank in range(2)
    ]
    schedule = Schedule.of('composed', placement, 2, orders, graph)
    check(schedule)
    costs = unit_costs(placement, amounts={'input': (0.5, 0.5), 'logits': (0, 0, 1.0, 1.0)})
    for pool in ('device', 'host', 'partner'):
        assert all(held[-1] == 0 and min(held) >= 0 for held in live(schedule, costs, pool))
    assert Schedule.from_json(schedule.to_json()) == schedule
    assert Schedule.from_json(schedule.to_json()).graph.needs == graph.needs
    timeline = simulate(schedule, costs)
    for kind in {p.kind for p in passes}:
        assert f'{kind}: {graph.kinds[kind].words}' in svg({'x': timeline}, {'x': costs})
    assert 'composed' in html({'composed': timeline}, {'composed': costs}, 'composed')
