"""A technique that only this file knows: two inputs, a message of two tensors, costs, memory.

It is checked, simulated, planned around, drawn, lowered, proven free of deadlock, and runs on two
gloo ranks.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from stages import CPU, Pipeline, message_of, require_same, uneven

from megatron_zbpp import Costs, check, simulate, techniques
from megatron_zbpp.analysis.lowering import lower
from megatron_zbpp.analysis.memory import live, peak
from megatron_zbpp.analysis.program import Hand
from megatron_zbpp.ir import Graph, Pass, Placement, Schedule, Task, chain
from megatron_zbpp.ir import techniques as graphs
from megatron_zbpp.ir.graph import DEVICE, Applied, Hold, Kind, Need
from megatron_zbpp.ir.techniques import known_stages, made_of
from megatron_zbpp.planner.actions import plan_within
from megatron_zbpp.render.svg import svg
from megatron_zbpp.runtime.channels import Message
from megatron_zbpp.runtime.clock import HostClock
from megatron_zbpp.runtime.executor import Executor
from megatron_zbpp.runtime.messages import messages
from megatron_zbpp.runtime.weight_grads import WeightGradStore
from megatron_zbpp.techniques.base import Technique

PLACEMENT = Placement.loop(2)
NOWHERE = object()  # channels that nothing is sent through
ORDERS = ('0F0 0Y0 0F1 0Y1 0X0 0BW0 0X1 0BW1', '1F0 1Y0 1X0 1B0 1F1 1Y1 1W0 1X1 1B1 1W1')


def compared(graph: Graph, stages: Iterable[int]) -> Graph:
    """Y packs what its stage saved into a sample, X takes those of all and unpacks; B waits for X.

    Between them less is held.
    """
    stages = known_stages(graph, stages)
    needs, holds = dict(graph.needs), dict(graph.holds)
    for stage in stages:
        needs[Task('Y', stage)] = (Need(Task('F', stage)),)
        needs[Task('X', stage)] = tuple(Need(Task('Y', other), 'sample') for other in stages)
        needs[Task('B', stage)] = (*needs[Task('B', stage)], Need(Task('X', stage)))
        holds[Task('Y', stage)] = Hold(DEVICE, 'sample', 1), Hold(DEVICE, 'activation', -1)
        holds[Task('X', stage)] = Hold(DEVICE, 'sample', -1), Hold(DEVICE, 'activation', 1)
    kinds = {'Y': Kind('sample'), 'X': Kind('comparison')}
    return made_of(graph, 'compared', (stages,), needs, holds, kinds)


def placed(schedule: Schedule, stages: Collection[int], *_: object) -> Schedule:
    """Y right behind F, X right before B."""
    orders: list[list[Pass]] = [[] for _ in schedule.passes]
    for rank, p in schedule:
        does = schedule.graph.kinds[p.kind].parts or (p.kind,)
        own = p.stage in stages
        orders[rank] += [p._replace(kind='X')] if own and 'B' in does else []
        orders[rank].append(p)
        orders[rank] += [p._replace(kind='Y')] if own and p.kind == 'F' else []
    graph = compared(schedule.graph, stages)
    return replace(schedule, graph=graph, passes=tuple(map(tuple, orders)), phases=())


@pytest.fixture
def registered(monkeypatch):
    """Found by its name, in this test."""
    monkeypatch.setattr(graphs, '_REGISTERED', {})
    monkeypatch.setattr(techniques, '_OWN', {})
    techniques.register(Technique('compared', 'packed', compared, placed))


def schedule() -> Schedule:
    passes = [map(Pass.parse, order.split()) for order in ORDERS]
    return Schedule.of('compared', PLACEMENT, 2, passes, compared(chain(2), range(2)))


def costs() -> Costs:
    plain = Costs.uniform(PLACEMENT).with_amounts(sample=(0.5, 0.25))
    return plain.with_times(Y=(0.25, 0.5), X=(1.0, 2.0))


def test_it_is_checked_simulated_and_drawn():
    check(schedule())
    timeline = simulate(schedule(), costs())
    spans = dict(zip(schedule().passes[0], timeline.spans[0], strict=True))
    assert spans[Pass('X', 0, 0)] == (2.5, 3.5)  # behind Y of both stages
    assert live(schedule(), costs())[0] == (1, 0.5, 1.5, 1, 1.5, 0.5, 1, 0)
    assert peak(schedule(), costs()) == (1.5, 2)
    assert 'X: comparison' in svg({'x': timeline}, {'x': costs()})


@pytest.mark.usefixtures('registered')
def test_it_is_planned_around():
    """Where memory is short, a planner that may use it does; a plan is read back by its name."""
    assert schedule() == Schedule.from_json(schedule().to_json())
    question = {'memory_limit': 1.5, 'seconds': 10}
    case = PLACEMENT, costs()
    made = plan_within([case], 4, actions=('compared',), **question)
    assert [applied.name for applied in made.schedule.graph.techniques] == ['compared']
    check(made.schedule)
    assert max(peak(made.schedule, costs())) <= 1.5
    assert made.value < plan_within([case], 4, **question).value


def test_messages_carry_their_names():
    program = lower(schedule())[0]
    names = {
        (i.producer.kind, i.consumer.kind): i.message for i in program if hasattr(i, 'message')
    }
    assert names == {('F', 'F'): 'activation', ('Y', 'X'): 'sample', ('B', 'BW'): 'gradient'}


class Comparing:
    """Actions of one rank: a sample is two tensors, of numbers and of their places."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def sample(self, p, inputs):
        assert not inputs
        numbers = torch.full((3,), 10.0 * p.stage + p.microbatch, dtype=torch.float64)
        return {'sample': (numbers, torch.tensor([p.stage, p.microbatch], dtype=torch.int16))}

    def compare(self, p, inputs):
        (samples,) = inputs.values()
        self.seen.append((str(p), [[part.tolist() for part in sample] for sample in samples]))
        return {}


@pytest.mark.on_ranks(2)
def test_it_runs():
    """Each X gets the samples of both stages, in their order, and gradients are as without it."""
    own, rank = Comparing(), dist.get_rank()
    sample = Message((3,), torch.float64, CPU), Message((2,), torch.int16, CPU)
    actions = {'Y': own.sample, 'X': own.compare}
    pipeline = Pipeline(schedule(), kept=False, actions=actions, messages={'sample': sample})
    assert tuple(pipeline.run().passes) == schedule().passes[rank]
    require_same(schedule(), [pipeline.made])
    samples = [[[[10.0 * stage + i] * 3, [stage, i]] for stage in range(2)] for i in range(2)]
    assert own.seen == [(f'{rank}X{i}', samples[i]) for i in range(2)]


def test_a_message_of_another_shape_is_refused():
    parts = Message((3,), torch.float64, CPU), Message((2,), torch.int16, CPU)
    fixed = messages(NOWHERE, message_of(), {'sample': parts})
    hand = Hand(Pass('Y', 0, 0), Pass('X', 0, 0), 'sample')
    good = torch.zeros(3, dtype=torch.float64), torch.zeros(2, dtype=torch.int16)
    assert fixed.checked(good, hand) is good
    for bad in (good[0], good[::-1], good[:1], None):
        with pytest.raises(ValueError, match=r'Y stage 0 microbatch 0 made .* and \(2,\) of'):
            fixed.checked(bad, hand)
    with pytest.raises(ValueError, match=r'takes \(3, 6\) of torch.float32: every'):
        fixed.checked(good, hand._replace(message='gradient'))
    sliced = messages(NOWHERE, [Message((rows, 6), torch.float32, CPU) for rows in (3, 1)], {})
    hand = Hand(Pass('F', 0, 0, 1), Pass('F', 1, 0, 1), 'activation')
    said = r'^F stage 0 microbatch 0 slice 1 made \(3, 6\) of torch.float32, but'
    with pytest.raises(ValueError, match=said):
        sliced.checked(torch.zeros(3, 6), hand)
    with pytest.raises(NotImplementedError, match='messages sample beside some whose shapes vary'):
        messages(NOWHERE, message_of(uneven), {'sample': parts})


def refusal(program, **options):
    store = WeightGradStore()
    with pytest.raises(NotImplementedError) as error:
        Executor(program, {}, NOWHERE, message_of(), store, HostClock(), **options)
    return str(error.value)


def test_without_actions_it_is_refused():
    program = lower(schedule())[0]
    assert re.match(r'0Y\d cannot run yet', refusal(program))
    assert re.match(r'0X\d cannot run yet', refusal(program, actions={'Y': print}))


@pytest.mark.parametrize('name', ['vocabulary', 'statistics'])
def test_a_message_that_nobody_understands_is_refused(name):
    """B awaits a second input, which the built-in action would lose."""
    graph = chain(2)
    back = (*graph.needs[Task('B', 0)], Need(Task('F', 1), name))
    techniques = (Applied('two inputs', (name,)),)
    graph = replace(graph, techniques=techniques, needs={**graph.needs, Task('B', 0): back})
    passes = [map(Pass.parse, order.split()) for order in ('0F0 0B0 0W0', '1F0 1B0 1W0')]
    program = lower(Schedule.of('two inputs', PLACEMENT, 1, passes, graph))[0]
    said = f"0B0 takes the message '{name}' of 1F0, but B understands gradient"
    assert said in refusal(program)
