"""The executor on plain torch stages, and its weight gradients: schedules that no one chose."""

import functools
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from random import Random
from unittest import mock

import oracle
import pytest
import torch
import torch.distributed as dist
from grids import grid
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from programs import awaited_early
from stages import ROWS, WIDTH, LinearStage, Pipeline, even, require_same, uneven

from megatron_zbpp import Costs, build, check
from megatron_zbpp.analysis.lowering import lower
from megatron_zbpp.analysis.memory import live
from megatron_zbpp.analysis.program import BY_TAKER, LATE, Receive
from megatron_zbpp.ir import BW, F, Placement, Schedule, Together, W
from megatron_zbpp.runtime.channels import Channels
from megatron_zbpp.runtime.clock import HostClock
from megatron_zbpp.runtime.executor import Executor
from megatron_zbpp.runtime.measure import Iteration
from megatron_zbpp.runtime.weight_grads import WeightGradStore
from megatron_zbpp.techniques.offload import offloaded
from megatron_zbpp.techniques.recompute import recomputed


def execute(schedule: Schedule, separate=False, rows=even, receives=LATE):
    """Runs `schedule` on each rank: losses and gradients by stage, passes and what was held."""
    if separate:  # as Megatron makes groups: ranks are in different numbers of them before
        for members in ([0, schedule.num_ranks - 1], [1], [1]):
            dist.new_group(members)
    programs = lower(schedule, receives)
    pipeline = Pipeline(schedule, rows=rows, programs=programs, separate=separate, kept=False)
    record = pipeline.run()
    require_complete(pipeline)
    return pipeline.made, record.passes, record.live


def require_complete(pipeline):
    """Gradients are said to be complete once they are."""
    for stage, (_, gradients) in pipeline.made.items():
        complete = pipeline.stages[stage].complete
        assert len(complete) == len(gradients) and all(map(torch.equal, complete, gradients))


def check_run(ranks, schedule, separate=False, rows=even):
    check(schedule)
    receives = LATE if rows is even else BY_TAKER
    results = ranks(schedule.num_ranks).run(execute, schedule, separate, rows, receives)
    require_same(schedule, (made for made, _, _ in results), rows)
    for order, (_, passes, held) in zip(schedule.passes, results, strict=True):
        assert tuple(passes) == order and held[-1] == 0


@grid(
    name=('1f1b', 'zb-h1', 'zb-v', 'interleaved'),
    p=(4, 2),
    m=(7, 1, 2, 8),
    separate=(False, True),
    rows=(uneven, even, even, uneven),
)
def test_gradients_to_the_bit(ranks, name, p, m, separate, rows):
    """With messages of any shape, and a group for each direction, as NCCL needs: here on gloo."""
    check_run(ranks, build(name, p, m), separate, rows)


def shapes_awaited(schedule, receives):
    """Runs on each rank: before each pass that waits for shapes, the passes that they are for."""
    program, passes = lower(schedule, receives)[dist.get_rank()], []
    own = [i for i in program if isinstance(i, Receive) and i.consumer.kind == F]
    left = {i.peer: [each.consumer for each in own if each.peer == i.peer] for i in own}
    awaited, ask, begin = {}, Channels.ask, Executor._await_one

    def asking(channels, peer):
        consumer, shape = left[peer].pop(0), ask(channels, peer)

        def waiting():
            awaited.setdefault(str(passes[-1]), []).append(str(consumer))
            return shape()

        return waiting

    def beginning(executor, p):
        passes.append(p)
        return begin(executor, p)

    with (
        mock.patch.object(Channels, 'ask', asking),
        mock.patch.object(Executor, '_await_one', beginning),
    ):
        execute(schedule, rows=uneven, receives=receives)
    assert not any(left.values())
    return awaited


@pytest.mark.parametrize('name', ['1f1b', 'zb-h1', 'zb-v'])
def test_a_pass_waits_for_its_own_shape(ranks, name):
    """Not for those of messages that later passes take, but where the proof wants it."""
    schedule = build(name, 4, 7)
    early, count = awaited_early(lower(schedule, BY_TAKER))
    assert early == (0 if name != 'zb-v' else 6)
    each = ranks(4).run(shapes_awaited, schedule, BY_TAKER)
    waits = [(p, taker) for awaited in each for p, takers in awaited.items() for taker in takers]
    assert len(waits) == count
    assert sum(p != taker for p, taker in waits) == early
    before = ranks(4).run(shapes_awaited, schedule, LATE)
    assert sum(p != t for awaited in before for p, takers in awaited.items() for t in takers) > 6


def calls(schedule, owner, name):
    """How often a rank calls a method, and how many passes it runs."""
    original = getattr(owner, name)
    with mock.patch.object(owner, name, autospec=True, side_effect=original) as called:
        _, passes, _ = execute(schedule)
    return called.call_count, len(passes)


@pytest.mark.parametrize('name', ['1f1b', 'zb-h1', 'dualpipe-v'])
def test_what_is_one_pass_runs_whole(ranks, name):
    """Of a pass BW autograd runs B and W at once, also in a schedule that splits others."""
    schedule = build(name, 2, 8)
    counted = ranks(2).run(calls, schedule, WeightGradStore, 'defer')  # of one layer a stage
    for rank, (left, _) in enumerate(counted):
        kinds = Counter(p.kind for p in schedule.passes[rank])
        assert left == kinds[W]
        assert bool(kinds[BW]) == (name != 'zb-h1') and bool(kinds[W]) == (name != '1f1b')
    check_run(ranks, schedule)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32),
    placement=st.sampled_from([Placement.loop(2), Placement.v(2)]),
    m=st.integers(1, 5),
    rows=st.sampled_from([even, uneven]),
)
def test_any_valid_order(ranks, seed, placement, m, rows):
    """Whatever the checker accepts runs, and gives the same bits; also of microbatches that have
    shapes of their own."""
    check_run(ranks, oracle.random_schedule(Random(seed), placement, m), rows=rows)


def test_each_pass_lets_go(ranks):
    for asked, passes in ranks(2).run(calls, build('zb-h1', 2, 5), Channels, 'let_go'):
        assert asked == passes == 3 * 5


class Failing(LinearStage):
    def backward(self, *args):
        super().backward(*args)
        raise RuntimeError('in B')


@pytest.mark.on_ranks(1)
def test_error_leaves_nothing_behind():
    pipeline = Pipeline(build('zb-h1', 1, 2), stage_class=Failing)
    with pytest.raises(RuntimeError, match=r'^in B$'):
        pipeline.executor().run()
    assert not pipeline.store.pending


# ---- R passes: forwards that keep their input only run again; small stages, to the bit.


@pytest.mark.on_ranks('p')
@grid(
    name=('gpipe', '1f1b', 'zb-h1', 'zb-v', 'interleaved', 'po'),
    p=(2, 4),
    amount=('all', 'half'),
    away=(None, None, 'all', 'half', 'all', 'all'),
)
def test_recomputed_to_the_bit(name, p, amount, away):
    """Also where inputs of what runs again, and what else is held, are on the host meanwhile."""
    schedule = recomputed(build(name, p, 8), amount)
    if away:
        schedule = offloaded(schedule, away)
    again = {task.stage for task in schedule.graph.needs if task.kind == 'R'}
    gone = {each.stage for _, each in schedule if each.kind == 'O'}
    pipeline = Pipeline(schedule)
    held, rank = pipeline.run().live, pipeline.rank
    require_same(schedule, [pipeline.made])
    for stage, nbytes in pipeline.moved.items():
        assert stage in gone
        if stage in again:  # of the first stage that runs again there is no input
            assert nbytes == (ROWS * WIDTH * 4 if stage else 0)
    share = len(schedule.placement.stages(rank))
    planned = live(schedule, Costs.uniform(schedule.placement, 1, 1, 1))
    assert [each / share for each in held] == list(planned[rank])
    for number, stage in pipeline.stages.items():
        twice = [(kind, k) for kind in 'FR' for k in range(8)] if number in again else []
        assert sorted(stage.ran) == twice


# ---- The executor runs a forward and a backward as one, where it is given what does that.


def overlap(schedule, as_one: bool):
    """Runs `schedule` on each rank; what ran as one, gradients, record and spans."""
    cells = []

    def both(forward, backward):
        """Halves of one between those of the other, as Megatron has layers."""
        numbers = {id(stage): number for number, stage in pipeline.stages.items()}
        cells.append(
            (numbers[id(forward.stage)], forward.p.microbatch, numbers[id(backward.stage)])
        )
        output = forward.stage.forward(forward.p, forward.received)
        return output, backward.stage.backward(
            backward.p, backward.received, backward.output, backward.gradient
        )

    clock = HostClock()
    programs = check(schedule).programs
    pipeline = Pipeline(
        schedule, programs=programs, kept=False, together=both if as_one else None, clock=clock
    )
    record = pipeline.run()
    require_complete(pipeline)
    spans = Iteration(schedule, dist.group.WORLD, record, clock).spans()
    return cells, pipeline.made, record, spans


@pytest.mark.parametrize('as_one', [True, False])
@pytest.mark.parametrize(('p', 'm'), [(2, 5), (4, 9)])
def test_overlaps_to_the_bit(ranks, p, m, as_one):
    schedule = build('dualpipe-v', p, m, together=True)
    results = ranks(p).run(overlap, schedule, as_one)
    require_same(schedule, (made for _, made, _, _ in results))
    for rank, (cells, _, record, spans) in enumerate(results):
        joined = [entry.passes for entry in schedule.order(rank) if isinstance(entry, Together)]
        assert cells == ([(f.stage, f.microbatch, b.stage) for f, b in joined] if as_one else [])
        assert tuple(record.passes) == schedule.passes[rank] and record.live[-1] == 0
        assert all(end >= start for start, end in spans)
        assert all(after[0] >= before[1] for before, after in pairwise(spans))
        for at in record.joined:
            (start, middle), (again, end) = spans[at : at + 2]
            assert middle == again and middle - start == pytest.approx(end - middle)


def test_passes_of_one_microbatch_run_one_after_the_other(ranks):
    """The last stage's: its backward needs what its forward leaves."""
    schedule = replace(build('1f1b', 2, 3), together=frozenset({(1, 0), (1, 2), (1, 4)}))
    results = ranks(2).run(overlap, schedule, True)
    require_same(schedule, (made for _, made, _, _ in results))
    assert all(cells == [] == record.joined for cells, _, record, _ in results)


# ---- The store of weight gradients: as autograd would have accumulated them.


@contextmanager
def backward(store, microbatch=0):
    """Of a stage and a microbatch, in which layers defer."""
    store.open((0, microbatch))
    with store.scope((0, microbatch)):
        yield


def test_gradients_arrive_through_autograd():
    """Hooks on the parameter see a gradient at W, not before; it accumulates."""
    store, weight = WeightGradStore(), torch.nn.Parameter(torch.zeros(2))
    seen = []
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    for microbatch in range(2):
        with backward(store, microbatch):
            assert store.deferring
            store.defer([weight], lambda k=microbatch: [torch.full((2,), k + 1.0)])
        assert not store.deferring
    assert store.pending == 2 and weight.grad is None and not seen
    store.run((0, 0))
    assert weight.grad.tolist() == [1, 1] and store.pending == 1
    store.run((0, 1))
    assert weight.grad.tolist() == [3, 3] and len(seen) == 2 and not store.pending


def test_shared_parameter_accumulates_once():
    """Two uses in one microbatch add up first, as in one backward."""
    store, weight = WeightGradStore(), torch.nn.Parameter(torch.zeros(1))
    hooks = []
    weight.register_post_accumulate_grad_hook(lambda p: hooks.append(p.grad.item()))
    with backward(store):
        store.defer([weight], lambda: [torch.ones(1)])
        store.defer([weight], lambda: [torch.full((1,), 2.0)])
    store.run((0, 0))
    assert hooks == [3.0]


def test_communication_starts_one_layer_ahead():
    """And of what waits, several layers' shares of one tensor count once."""
    store = WeightGradStore()
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
    events, shared = [], torch.zeros(10)

    def compute(layer):
        events.append(f'compute {layer}')
        return [torch.ones(1)]

    with backward(store):
        for layer, weight in enumerate(weights):
            start = None if layer == 1 else lambda layer=layer: events.append(f'start {layer}')
            held = [shared[layer:], torch.zeros(layer)]
            run = functools.partial(compute, layer)
            store.defer([weight], run, functools.partial(iter, held), start)
    assert store.held((0, 0)) == 4 * (10 + 0 + 1 + 2)
    store.run((0, 0))
    assert events == ['start 0', 'compute 0', 'start 2', 'compute 1', 'compute 2']


def test_stage_without_deferred_layers_and_clear():
    store = WeightGradStore()
    store.open((0, 0))
    store.run((0, 0))
    store.open((0, 1))
    store.clear()
    assert not store.pending


def test_gradients_that_are_left_out():
    """The others arrive as ever; hooks are called for all, with a gradient where they want one."""

    def dropped(parameter, fused):
        assert not fused
        return torch.zeros_like(parameter)

    for shown in (False, True):
        store = WeightGradStore()
        weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
        store.left_out = lambda key, count: {1} if key == (0, 1) and count == 3 else ()
        store.dropped, called = dropped if shown else None, []
        accumulators = [w.expand_as(w).grad_fn.next_functions[0][0] for w in weights]
        for weight, accumulator in zip(weights, accumulators, strict=True):
            # as DistributedDataParallel sees them, which takes what is in `.grad` each time
            def hook(*_, weight=weight, called=called):
                called.append(None if weight.grad is None else weight.grad.tolist())
                weight.grad = None

            accumulator.register_hook(hook)
        for microbatch in range(3):
            with backward(store, microbatch):
                for weight in weights:
                    store.defer([weight], lambda k=microbatch: [torch.full((2,), k + 1.0)])
            store.run((0, microbatch))
        nothing = [0, 0] if shown else None
        assert called == [[1, 1]] * 3 + [[2, 2], nothing, [2, 2]] + [[3, 3]] * 3
