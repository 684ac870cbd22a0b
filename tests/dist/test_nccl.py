"""The runtime on groups that order and block as NCCL's: whatever waits for what, it ends."""

from contextlib import contextmanager, nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from grids import grid
from programs import posted_earlier
from stages import LinearStage, Pipeline, even, reference, require_same, uneven

from devtools import nccl
from megatron_zbpp.analysis.deadlock import DeadlockError, Rule, prove
from megatron_zbpp.analysis.lowering import lower
from megatron_zbpp.analysis.program import BY_TAKER, EARLY, LATE, LATEST
from megatron_zbpp.analysis.run_ahead import evaluation
from megatron_zbpp.ir import W
from megatron_zbpp.runtime.channels import Channels
from megatron_zbpp.schedules import build, names

# what passes wait for, and when launched operations start: see `nccl.Device`
MODES = {
    'plain': {},
    'synchronises': {'synchronises': True},
    'in order': {'in_order': True},
    'both': {'synchronises': True, 'in_order': True},
}
PATIENCE = 3.0  # seconds, where something is stuck


class CoupledStage(LinearStage):
    """A stage of one of several pipelines: meets the others in forwards, and reduces gradients."""

    def __init__(self, store, stage, num_stages, rows, replicas, splits):
        super().__init__(store, stage, num_stages, rows)
        self.replicas, self.reducing = replicas, []
        # what is complete with the last B, and with the last W
        self.parts = iter([[self.bias], [self.weight]] if splits else [[self.bias, self.weight]])

    def forward(self, p, received):
        output = super().forward(p, received)
        if self.replicas is not None:
            ones = torch.ones(1)
            dist.all_reduce(ones, group=self.replicas)  # as tensor parallelism does
            assert ones.item() == dist.get_world_size(self.replicas)
        return output

    @contextmanager
    def grad_sync(self, last):
        with super().grad_sync(last):
            yield
        if last and self.replicas is not None:
            self.reducing += [
                dist.all_reduce(p.grad, group=self.replicas, async_op=True)
                for p in next(self.parts)
            ]


class Replica(Pipeline):
    """A rank's part of one of several pipelines on an emulated device."""

    def __init__(self, device, schedule, replicas=1, **options):
        size = schedule.num_ranks
        world = [list(range(first, first + size)) for first in range(0, size * replicas, size)]
        same = [list(group) for group in zip(*world, strict=True)]
        groups = [dist.new_group(ranks, backend=nccl.NAME) for ranks in world]
        place, rank = divmod(dist.get_rank(), size)
        coupling = [dist.new_group(ranks, backend=nccl.NAME) for ranks in same]
        stage = partial(
            CoupledStage,
            replicas=coupling[rank] if replicas > 1 else None,
            splits=any(p.kind == W for _, p in schedule),
        )
        options['named'] = device.passing
        super().__init__(schedule, groups[place], stage_class=stage, **options)

    def train(self, ahead=False):
        """By stage: losses and gradients of an iteration, with forwards run ahead if asked."""
        self.run(ahead)
        for stage in self.stages.values():
            for work in stage.reducing:
                work.wait()
        return self.made

    def evaluate(self):
        receives = LATE if self.rows is even else BY_TAKER
        executor = self.executor(lower(evaluation(self.schedule), receives)[self.rank])
        with torch.no_grad():
            executor.run()
        return {s: stage.losses for s, stage in self.stages.items()}


def live(schedules, mode, replicas, rows, receives):
    """A training program's life: one iteration after the other, and another schedule in the end."""
    with nccl.Device(**MODES[mode]) as device:
        trained = []
        for schedule in schedules:
            programs = lower(schedule, receives)
            pipeline = Replica(device, schedule, replicas, programs=programs, rows=rows)
            trained.append(pipeline.train())
            pipeline.drop()
            evaluated = pipeline.evaluate()
            trained.append(pipeline.train(ahead=True))
        return trained, evaluated


def check_lives(ranks, schedules, mode, replicas=1, rows=even, receives=LATE):
    """All that they computed is what one process computes."""
    world = schedules[0].num_ranks * replicas
    lives = ranks(world).run(live, schedules, mode, replicas, rows, receives)
    for at, schedule in enumerate(schedules):
        made = [each for trained, _ in lives for each in trained[2 * at : 2 * at + 2]]
        require_same(schedule, made, rows, replicas)
    last = schedule.num_stages - 1
    losses, _ = reference(last + 1, schedule.num_microbatches, rows=rows)
    assert all(evaluated.get(last, losses) == losses for _, evaluated in lives)


@grid(
    when=lambda name, p, m, mode: p < 8 or m == 5,
    name=names(),
    p=(2, 3, 4, 8),
    m=(4, 5, 6),
    mode=tuple(MODES),
)
def test_every_family(ranks, name, p, m, mode):
    """Trains, evaluates, runs ahead and drops, then switches to another schedule and placement."""
    try:
        schedule = build(name, p, m)
    except ValueError:  # the family does not know this size
        schedule = build(name, p, 2 * p)
    other = build('1f1b' if schedule.placement.num_chunks > 1 else 'zb-v', p, m)
    check_lives(ranks, [schedule, other], mode)


@grid(
    when=lambda receives, rows, **_: receives == LATEST or rows is even,
    name=('zb-v', 'dualpipe-v', '1f1b'),
    receives=(LATEST, EARLY),
    mode=('both', 'synchronises'),
    rows=(even, uneven),
)
def test_receives_posted_at_another_time(ranks, name, receives, mode, rows):
    check_lives(ranks, [build(name, 4, 8)], mode, rows=rows, receives=receives)


@grid(name=('zb-v', 'zb-h1', 'interleaved'), mode=tuple(MODES))
def test_messages_of_any_shape(ranks, name, mode):
    """Shapes go ahead from host to host, and receives are posted where these are taken."""
    schedules = [build(name, 4, 8), build('1f1b', 4, 8)]
    check_lives(ranks, schedules, mode, rows=uneven, receives=BY_TAKER)


@grid(name=('zb-h1', 'zb-v', '1f1b'), mode=tuple(MODES)[::-1])
def test_two_pipelines_coupled_by_collectives(ranks, name, mode):
    """Tensor-parallel ones in each F, data-parallel ones behind the last W of each stage."""
    check_lives(ranks, [build(name, 2, 4)], mode, replicas=2)


def stand(schedule, mode, lead, warm, separate):
    """Where this rank stands for ever; None: nowhere."""
    programs = posted_earlier(lower(schedule, EARLY), lead)
    cold = mock.patch.object(Channels, '_use_all_once', lambda *args: None)
    dist.barrier()  # from here on ranks are quick
    try:
        with (
            nullcontext() if warm else cold,
            nccl.Device(**MODES[mode], patience=PATIENCE) as device,
        ):
            Replica(device, schedule, programs=programs, separate=separate).train()
    except nccl.Stuck as stuck:
        return str(stuck)
    return None


STUCK = {
    'channels that were never used': (
        ('gpipe', 2, 4), 'plain', 1, False, True,
        'rank 0 waits for the others to make a communicator for a receive from rank 1',
    ),
    'one group for all messages': (
        ('1f1b', 2, 4), 'plain', 1, True, False,
        'running: a receive from rank 1 | not started: a send to rank 1',
    ),
    'a pass early and device synchronisation': (
        ('zb-h1', 2, 4), 'synchronises', 1, True, True,
        'rank 0 waits for its device, in 0F1 | running: a receive from rank 1',
    ),
    'earlier and launch order': (
        ('gpipe', 2, 4), 'in order', 2, True, True,
        'running: a receive from rank 0 | not started: a receive from rank 0',
    ),
}  # fmt: skip


@pytest.mark.parametrize('case', STUCK)
def test_what_was_stuck_before(ranks, case):
    name, *setting, expected = STUCK[case]
    said = ranks(2).run(stand, build(*name), *setting)
    assert all(said), 'it went on'
    assert any(expected in words for words in said), said


@pytest.mark.parametrize(('name', 'lead', 'rule'), [
    (('zb-h1', 2, 4), 1, Rule.SYNCHRONISATION), (('gpipe', 2, 4), 2, Rule.LAUNCH_ORDER),
])  # fmt: skip
def test_the_proof_knew(name, lead, rule):
    """The same programs, without running them."""
    programs = posted_earlier(lower(build(*name), EARLY), lead)
    with pytest.raises(DeadlockError) as error:
        prove(programs, Rule.RENDEZVOUS | rule)
    assert rule in error.value.rules
