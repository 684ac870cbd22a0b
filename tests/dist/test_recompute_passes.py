"""R passes: forwards that keep their input only run again; small stages, to the bit."""

from __future__ import annotations

import torch
import torch.distributed as dist
from grids import grid
from programs import pairs
from stages import ROWS, WIDTH, LinearStage, reference

from megatron_zbpp.analysis.lowering import lower
from megatron_zbpp.analysis.memory import live
from megatron_zbpp.analysis.recomputing import recomputed
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.runtime.channels import Channels, Message
from megatron_zbpp.runtime.clock import HostClock
from megatron_zbpp.runtime.executor import Executor
from megatron_zbpp.runtime.weight_grads import WeightGradStore
from megatron_zbpp.schedules import build

CPU = torch.device('cpu')


def executed(schedule):
    """On each rank, by stage: losses, gradients, what ran twice; and what was held."""
    rank, store, count = dist.get_rank(), WeightGradStore(), schedule.num_stages
    programs = lower(schedule)
    stages = {s: LinearStage(store, s, count) for s in schedule.placement.stages(rank)}
    message = Message((ROWS, WIDTH), torch.float32, CPU)
    channels = Channels(dist.group.WORLD, pairs(programs), CPU)
    record = Executor(programs[rank], stages, channels, message, store, HostClock()).run()
    made = {s: (m.losses, tuple(p.grad for p in m.parameters()), m.ran) for s, m in stages.items()}
    return made, record.live


@grid(name=('gpipe', '1f1b', 'zb-h1', 'zb-v', 'interleaved'), p=(2, 4), amount=('all', 'half'))
def test_to_the_bit(ranks, name, p, amount):
    schedule = recomputed(build(name, p, 8), amount)
    losses, gradients = reference(schedule.num_stages, 8)
    again = {task.stage for task in schedule.graph.needs if task.kind == 'R'}
    planned = live(schedule, Costs.uniform(schedule.placement, 1, 1, 1))
    for rank, (made, held) in enumerate(ranks(p).run(executed, schedule)):
        share = len(schedule.placement.stages(rank))
        assert [each / share for each in held] == list(planned[rank])
        for stage, (own, grads, ran) in made.items():
            assert stage < schedule.num_stages - 1 or own == losses
            assert all(map(torch.equal, grads, gradients[stage]))
            twice = [(kind, k) for kind in 'FR' for k in range(8)] if stage in again else []
            assert sorted(ran) == twice
