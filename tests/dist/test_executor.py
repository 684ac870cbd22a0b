"""The executor on plain torch stages: schedules that no one chose, to the bit."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from grids import grid
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from programs import awaited_early
from stages import ROWS, WIDTH, LinearStage, Pipeline, even, reference, require_same, uneven

from megatron_zbpp import Costs, build, check
from megatron_zbpp.analysis.lowering import lower
from megatron_zbpp.analysis.memory import live
from megatron_zbpp.analysis.program import BY_TAKER, LATE, Receive
from megatron_zbpp.ir import BW, F, Pass, Schedule, Together, W
from megatron_zbpp.runtime.channels import Channels
from megatron_zbpp.runtime.clock import HostClock
from megatron_zbpp.runtime.executor import Executor
from megatron_zbpp.runtime.measure import Iteration
from megatron_zbpp.runtime.weight_grads import WeightGradStore
from megatron_zbpp.techniques.offload import offloaded
from megatron_zbpp.techniques.recompute import recomputed


def execute(schedule: Schedule, separate=False, rows=even, receives=LATE):
    """Runs `schedule` on each rank: losses and gradients by stage, passes and what was held."""
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


@pytest.mark.parametrize('m', [1, 2, 5, 8])
@pytest.mark.parametrize('name', ['1f1b', 'zb-h1', 'zb-v'])
@pytest.mark.parametrize('p', [2, 4])
def test_gradients_to_the_bit(ranks, p, name, m):
    check_run(ranks, build(name, p, m))


@pytest.mark.parametrize('separate', [False, True])
@pytest.mark.parametrize('name', ['1f1b', 'zb-h1', 'zb-v', 'interleaved'])
def test_messages_of_any_shape(ranks, name, separate):
    check_run(ranks, build(name, 4, 7), separate, uneven)


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


def uneven_groups():
    """As Megatron makes them: ranks are in different numbers of groups before."""
    for members in ([0, 3], [1], [1, 2]):
        dist.new_group(members)


def test_a_group_for_each_direction(ranks):
    """What NCCL needs, here on gloo."""
    ranks(4).run(uneven_groups)
    check_run(ranks, build('zb-v', 4, 5), separate=True)
    check_run(ranks, build('zb-h1', 4, 5), separate=True)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_valid_order(ranks, data):
    """Shuffled schedules: whatever the checker accepts runs, and gives the same bits.

    Also where each microbatch has a shape of its own.
    """
    schedule = build(data.draw(st.sampled_from(['zb-h1', 'zb-v'])), 2, data.draw(st.integers(1, 5)))
    orders = [list(order) for order in schedule.passes]
    for _ in range(data.draw(st.integers(0, 12))):
        order = data.draw(st.sampled_from(orders))
        at = data.draw(st.integers(0, len(order) - 2))
        order[at], order[at + 1] = order[at + 1], order[at]
        try:
            check(Schedule.of('shuffled', schedule.placement, schedule.num_microbatches, orders))
        except ValueError:  # not valid: take it back
            order[at], order[at + 1] = order[at + 1], order[at]
    if data.draw(st.booleans()):  # fuse what can be: W right behind its B
        orders = [_fused(order) for order in orders]
    shuffled = Schedule.of('shuffled', schedule.placement, schedule.num_microbatches, orders)
    check_run(ranks, shuffled, rows=data.draw(st.sampled_from([even, uneven])))


def _fused(order):
    """`order` with every B that its own W follows at once as one BW."""
    fused: list[Pass] = []
    for p in order:
        if p.kind == 'W' and fused[-1] == p._replace(kind='B'):
            fused[-1] = p._replace(kind='BW')
        else:
            fused.append(p)
    return fused


@pytest.mark.parametrize('name', ['1f1b', 'zb-v'])
@pytest.mark.on_ranks(2)
def test_forward_only(name):
    pipeline = Pipeline(build(name, 2, 4).forward_only(), kept=False)
    with torch.no_grad():
        record = pipeline.executor().run()
    losses, _ = reference(pipeline.schedule.num_stages, 4, train=False)
    assert all(stage.losses == losses for stage in pipeline.stages.values() if stage.last)
    assert not any(record.live), 'evaluation keeps no activations'


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
