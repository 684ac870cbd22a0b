"""The output layer on all ranks: its collectives, what they cost, and what is held for them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from vocabulary import split_1f1b

from megatron_zbpp.analysis.checker import check
from megatron_zbpp.analysis.deadlock import DeadlockError, prove
from megatron_zbpp.analysis.fit_costs import measured_costs, middle
from megatron_zbpp.analysis.lowering import lower
from megatron_zbpp.analysis.memory import live
from megatron_zbpp.analysis.program import Exchange, Receive, Send
from megatron_zbpp.analysis.run_ahead import passes_ahead, passes_run_ahead, split
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.analysis.waits import critical_path
from megatron_zbpp.ir import Pass, Placement, Schedule, chain
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.timeline import Timeline
from megatron_zbpp.schedules import build
from megatron_zbpp.techniques.slices.graph import sliced
from megatron_zbpp.techniques.vocabulary.graph import split_vocabulary
from megatron_zbpp.techniques.vocabulary.place import with_embedding, with_shards


def costs_of(p: int, **more) -> Costs:
    """F 1, B 2 within BW, S 1, T .5."""
    shards = (0.0,) * p
    times = {'S': (*shards, *[1.0] * p), 'T': (*shards, *[0.5] * p)}
    return replace(Costs.uniform(Placement.loop(p)).with_times(**times), **more)


def orders(*texts: str) -> list[list[Pass]]:
    return [[Pass.parse(each) for each in text.split()] for text in texts]


def test_three_collectives_a_microbatch_instead_of_a_message_for_each_pair():
    programs = check(split_1f1b(8, 20)).programs
    counts = [Counter(type(i) for i in program) for program in programs]
    assert [count[Exchange] for count in counts] == [60] * 8
    assert [count[Send] for count in counts] == [20, *[40] * 6, 20]
    assert [count[Receive] for count in counts] == [20, *[40] * 6, 20]
    (all_alike,) = {tuple(i for i in each if isinstance(i, Exchange)) for each in programs}
    first = [(i.operation, i.message, i.root) for i in all_alike if i.producers[0].microbatch == 0]
    assert first == [
        ('broadcast', 'hidden', 7),
        ('all-gather', 'statistics', None),
        ('reduce', 'vocabulary', 7),
    ]


@pytest.mark.parametrize('barriers', [1, 2])
def test_each_collective_comes_behind_its_last_contributor(barriers):
    graph = split_vocabulary(chain(2), 2, barriers)
    own = ('1B0 3T0', '3T0 1B0')[barriers - 1]
    passes = orders('0F0 2S0 2T0 0BW0', f'1F0 3S0 {own} 1W0')
    programs = check(Schedule.of('split', Placement.loop(2), 1, passes, graph)).programs
    ran = [i for i in programs[1] if isinstance(i, Pass | Exchange)]
    words = [i.message if isinstance(i, Exchange) else i.kind for i in ran]
    reduced = ['vocabulary', 'B', 'T'] if barriers == 1 else ['T', 'vocabulary', 'B']
    assert words == ['F', 'hidden', 'S', 'statistics', *reduced, 'W']


def test_ranks_that_enter_collectives_in_two_orders_deadlock():
    programs = [list(program) for program in lower(split_1f1b(4, 4))]
    prove(programs)
    places = [at for at, i in enumerate(programs[2]) if isinstance(i, Exchange)]
    a, b = places[3:5]
    programs[2][a], programs[2][b] = programs[2][b], programs[2][a]
    with pytest.raises(DeadlockError, match=r'rank 2 waits at (broadcast|all-gather|reduce)\('):
        prove(programs)


def test_forwards_that_run_ahead_enter_no_collective():
    """The last stage's is never ahead, so nothing of its microbatch is there to be exchanged."""
    schedule = split_1f1b(4, 6)
    programs = lower(schedule)
    ahead = passes_run_ahead(schedule, passes_ahead(schedule), 4)
    assert ahead
    parts = [split(program, ahead) for program in programs]
    assert not any(isinstance(i, Exchange) for first, _ in parts for i in first)
    prove([(*first, *rest) for first, rest in parts])


def test_slices_have_collectives_of_their_own():
    graph = split_vocabulary(sliced(chain(1), 2), 1)
    passes = orders('0F0 1S0 0F0.1 1S0.1 0B0.1 0B0 1T0 1T0.1 0W0.1 0W0')
    (program,) = check(Schedule.of('slices', Placement.loop(1), 1, passes, graph)).programs
    cuts = Counter(i.producers[0].slice for i in program if isinstance(i, Exchange))
    assert cuts == {0: 3, 1: 3}


def test_collectives_take_time_from_the_last_contribution_on():
    schedule, times = split_1f1b(2, 1), {'hidden': 0.25, 'statistics': 0.125, 'vocabulary': 0.5}
    costs = costs_of(2, collectives=times)
    timeline = simulate(schedule, costs)
    spans = [dict(zip(map(str, own), at, strict=True)) for own, at in
             zip(schedule.passes, timeline.spans, strict=True)]  # fmt: skip
    assert spans[1]['1F0'] == (1, 2)
    assert spans[1]['3S0'] == (2, 3), 'its own output need not come'
    assert spans[0]['2S0'] == (2.25, 3.25)
    assert spans[1]['1BW0'] == (3.25 + 0.125 + 0.5, 3.875 + 2)
    assert spans[0]['2T0'][0] == spans[0]['0BW0'][1]
    last = next(step for step in critical_path(timeline, costs) if str(step.ran) == '1BW0')
    assert (last.waited, str(last.on)) == ('communication', '2S0')
    alone = simulate(schedule, costs_of(2, comm=0.25)).makespan
    assert alone == 1 + 0.25 + 1 + 0.25 + 1 + 0.25 + 2 + 0.25 + 2 + 0.5, 'else as a message'
    assert Costs.from_json(
        '{"F": [1], "B": [1], "W": [1], "collectives": {"hidden": 0.5}}'
    ).collectives == {'hidden': 0.5}
    with pytest.raises(ValueError, match=r"'collectives'.*an object of numbers"):
        Costs.from_json('{"F": [1], "B": [1], "W": [1], "collectives": [1]}')
    with pytest.raises(ValueError, match='collectives = -1 is not a cost'):
        costs_of(2, collectives={'hidden': -1})


def test_hidden_states_and_parts_of_gradients_are_held_from_s_to_t():
    schedule = split_1f1b(2, 1)
    amounts = {
        name: (0, 0, each, each)
        for name, each in {'logits': 0.5, 'hidden': 0.25, 'gradient_part': 0.125}.items()
    }
    costs = Costs.uniform(Placement.loop(2)).with_amounts(**amounts)
    assert list(map(str, schedule.passes[0])) == ['0F0', '2S0', '0BW0', '2T0']
    assert live(schedule, costs)[0] == (1, 1.875, 0.875, 0)


def test_the_usual_time_of_a_collective_is_measured():
    """The median of those that were waited for: one that came at once, or much later, is not it."""
    schedule = with_shards(build('zb-h1', 2, 5))
    times = {'hidden': 0.0, 'statistics': 0.0, 'vocabulary': 2.0}
    spans = simulate(schedule, costs_of(2, collectives=times)).spans
    backwards = [at for at, p in enumerate(schedule.passes[1]) if p.kind == 'B']
    for at, late in zip(backwards, (0.0, 0.25, 0.25, 0.25, 8.0), strict=True):
        begin = spans[1][at][0]
        spans = tuple(
            tuple((a + late * (a >= begin), b + late * (a >= begin)) for a, b in own)
            for own in spans
        )
    found = measured_costs(Timeline(schedule, spans)).collectives
    assert found['statistics'] + found['vocabulary'] == pytest.approx(2.25)


def test_a_collective_that_nobody_waits_for_takes_no_longer_than_others():
    """Its takers come much later: when they do says little of it."""
    schedule = with_embedding(with_shards(build('zb-h1', 2, 8)))
    times = dict.fromkeys(schedule.graph.collectives, 0.125)
    timeline = simulate(schedule, replace(Costs.known(schedule), collectives=times))
    found = measured_costs(timeline).collectives
    assert found['hidden'] == pytest.approx(0.125)
    slowest = found['statistics'] + found['vocabulary']
    assert found['embedding_gradient'] == pytest.approx(slowest) == pytest.approx(0.25)


def test_times_of_collectives_are_measured():
    """And told apart from messages. No T of these orders waits, so only the sum of two is seen."""
    schedule = split_1f1b(4, 8)
    times = {'hidden': 0.25, 'statistics': 0.125, 'vocabulary': 0.5}
    timeline = simulate(schedule, costs_of(4, collectives=times, comm=0.0625))
    found = measured_costs(timeline)
    assert found.comm == pytest.approx(0.0625)
    assert found.collectives == pytest.approx(
        {'hidden': 0.25, 'statistics': 0.625, 'vocabulary': 0}
    )
    assert middle([found, found]).collectives == found.collectives
    assert simulate(schedule, found).makespan == pytest.approx(timeline.makespan)
    assert timeline.lags().keys() == {(a, b) for a in range(4) for b in range(4) if abs(a - b) == 1}
