"""The executor runs a forward and a backward as one, where it is given what does that."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from programs import pairs
from stages import ROWS, WIDTH, LinearStage, reference

from megatron_zbpp.analysis.checker import check
from megatron_zbpp.ir import Together
from megatron_zbpp.runtime.channels import Channels, Message
from megatron_zbpp.runtime.clock import HostClock
from megatron_zbpp.runtime.executor import Executor
from megatron_zbpp.runtime.measure import Iteration
from megatron_zbpp.runtime.weight_grads import WeightGradStore
from megatron_zbpp.schedules import build


def execute(schedule, as_one: bool):
    """Runs `schedule` on each rank; what ran as one, gradients, losses, record and spans."""
    programs = check(schedule).programs
    rank, store, cells = dist.get_rank(), WeightGradStore(), []
    stages = {
        stage: LinearStage(store, stage, schedule.num_stages)
        for stage in schedule.placement.stages(rank)
    }
    numbers = {id(made): stage for stage, made in stages.items()}

    def both(forward, backward):
        """Halves of one between those of the other, as Megatron has layers."""
        cells.append(
            (numbers[id(forward.stage)], forward.p.microbatch, numbers[id(backward.stage)])
        )
        output = forward.stage.forward(forward.p, forward.received)
        return output, backward.stage.backward(
            backward.p, backward.received, backward.output, backward.gradient
        )

    message = Message((ROWS, WIDTH), torch.float32, torch.device('cpu'))
    channels = Channels(dist.group.WORLD, pairs(programs), message.device)
    clock = HostClock()
    executor = Executor(
        programs[rank],
        stages,
        channels,
        message,
        store,
        clock,
        together=both if as_one else None,
    )
    record = executor.run()
    assert not store.pending and not store.deferring
    spans = Iteration(schedule, dist.group.WORLD, record, clock).spans()
    gradients = {
        stage: (made.losses, tuple(p.grad for p in made.parameters()), made.complete)
        for stage, made in stages.items()
    }
    return cells, gradients, record, spans


@pytest.mark.parametrize('as_one', [True, False])
@pytest.mark.parametrize(('p', 'm'), [(2, 5), (4, 9)])
def test_gradients_to_the_bit(ranks, p, m, as_one):
    schedule = build('dualpipe-v', p, m, together=True)
    losses, expected = reference(schedule.num_stages, m)
    for rank, (cells, made, record, spans) in enumerate(ranks(p).run(execute, schedule, as_one)):
        joined = [entry.passes for entry in schedule.order(rank) if isinstance(entry, Together)]
        assert cells == ([(f.stage, f.microbatch, b.stage) for f, b in joined] if as_one else [])
        assert tuple(record.passes) == schedule.passes[rank] and record.live[-1] == 0
        for stage, (own, gradients, complete) in made.items():
            assert stage < schedule.num_stages - 1 or own == losses
            assert all(map(torch.equal, gradients, expected[stage]))
            assert all(map(torch.equal, complete, gradients))
        assert all(end >= start for start, end in spans)
        assert all(after[0] >= before[1] for before, after in pairwise(spans))
        for at in record.joined:
            (start, middle), (again, end) = spans[at : at + 2]
            assert middle == again and middle - start == pytest.approx(end - middle)


def test_passes_of_one_microbatch_run_one_after_the_other(ranks):
    """The last stage's: its backward needs what its forward leaves."""
    schedule = replace(build('1f1b', 2, 3), together=frozenset({(1, 0), (1, 2), (1, 4)}))
    _, expected = reference(2, 3)
    for rank, (cells, made, record, _) in enumerate(ranks(2).run(execute, schedule, True)):
        assert cells == [] == record.joined
        assert all(map(torch.equal, made[rank][1], expected[rank]))
