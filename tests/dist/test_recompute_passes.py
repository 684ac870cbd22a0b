"""R passes: forwards that keep their input only run again; small stages, to the bit."""

import torch
import torch.distributed as dist
from grids import grid
from programs import pairs
from stages import ROWS, WIDTH, LinearStage, reference

from megatron_zbpp.analysis.lowering import lower
from megatron_zbpp.analysis.memory import live
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.runtime.activations.store import ActivationStore
from megatron_zbpp.runtime.channels import Channels, Message
from megatron_zbpp.runtime.clock import HostClock
from megatron_zbpp.runtime.executor import Executor
from megatron_zbpp.runtime.weight_grads import WeightGradStore
from megatron_zbpp.schedules import build
from megatron_zbpp.techniques.offload.place import offloaded
from megatron_zbpp.techniques.recompute.place import recomputed

CPU = torch.device('cpu')


def executed(schedule):
    """On each rank, by stage: losses, gradients, what ran twice; what was held, bytes that left."""
    rank, store, count = dist.get_rank(), WeightGradStore(), schedule.num_stages
    programs = lower(schedule)
    stages = {s: LinearStage(store, s, count) for s in schedule.placement.stages(rank)}
    message = Message((ROWS, WIDTH), torch.float32, CPU)
    channels = Channels(dist.group.WORLD, pairs(programs), CPU)
    activations = ActivationStore(CPU, small=1)
    activations.keep(p for stage in stages.values() for p in stage.parameters())
    record = Executor(
        programs[rank], stages, channels, message, store, HostClock(), activations=activations
    ).run()
    assert not activations.away
    made = {s: (m.losses, tuple(p.grad for p in m.parameters()), m.ran) for s, m in stages.items()}
    return made, record.live, {s: found.moved for s, found in activations.bytes.items()}


@grid(
    name=('gpipe', '1f1b', 'zb-h1', 'zb-v', 'interleaved', 'po'),
    p=(2, 4),
    amount=('all', 'half'),
    away=(None, None, 'all', 'half', 'all', 'all'),
)
def test_to_the_bit(ranks, name, p, amount, away):
    """Also where inputs of what runs again, and what else is held, are on the host meanwhile."""
    schedule = recomputed(build(name, p, 8), amount)
    if away:
        schedule = offloaded(schedule, away)
    losses, gradients = reference(schedule.num_stages, 8)
    again = {task.stage for task in schedule.graph.needs if task.kind == 'R'}
    planned = live(schedule, Costs.uniform(schedule.placement, 1, 1, 1))
    results = ranks(p).run(executed, schedule)
    gone = {p.stage for _, p in schedule if p.kind == 'O'}
    for rank, (made, held, moved) in enumerate(results):
        for stage, nbytes in moved.items():  # of the first stage that runs again there is no input
            assert stage in gone
            if stage in again:
                assert nbytes == (ROWS * WIDTH * 4 if stage else 0)
        share = len(schedule.placement.stages(rank))
        assert [each / share for each in held] == list(planned[rank])
        for stage, (own, grads, ran) in made.items():
            assert stage < schedule.num_stages - 1 or own == losses
            assert all(map(torch.equal, grads, gradients[stage]))
            twice = [(kind, k) for kind in 'FR' for k in range(8)] if stage in again else []
            assert sorted(ran) == twice
