"""The runtime on groups that order and block as NCCL's: whatever waits for what, it ends."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from grids import grid
from programs import pairs, posted_earlier
from stages import ROWS, WIDTH, LinearStage, reference, uneven

from devtools import nccl
from megatron_zbpp.analysis.deadlock import DeadlockError, Rule, prove
from megatron_zbpp.analysis.evaluation import evaluation
from megatron_zbpp.analysis.lowering import lower
from megatron_zbpp.analysis.program import BY_TAKER, EARLY, LATE, LATEST
from megatron_zbpp.analysis.run_ahead import passes_ahead, passes_run_ahead, split
from megatron_zbpp.ir import W
from megatron_zbpp.runtime.activations.store import ActivationStore
from megatron_zbpp.runtime.channels import Channels, Message
from megatron_zbpp.runtime.clock import HostClock
from megatron_zbpp.runtime.executor import Executor
from megatron_zbpp.runtime.weight_grads import WeightGradStore
from megatron_zbpp.schedules import build, names

CPU = torch.device('cpu')
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

    def __init__(self, store, stage, num_stages, replicas, splits, varying=False):
        super().__init__(store, stage, num_stages, *([uneven] if varying else []))
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
            self.reducing = [
                *self.reducing,
                *(
                    dist.all_reduce(p.grad, group=self.replicas, async_op=True)
                    for p in next(self.parts)
                ),
            ]


class Pipeline:
    """A rank's part of one pipeline on an emulated device."""

    def __init__(self, device, schedule, programs=None, separate=None, replicas=1, varying=False):
        self.device, self.schedule, self.varying = device, schedule, varying
        self.programs = programs or lower(schedule)
        size = schedule.num_ranks
        world = [list(range(first, first + size)) for first in range(0, size * replicas, size)]
        same = [list(group) for group in zip(*world, strict=True)]
        groups = [dist.new_group(ranks, backend=nccl.NAME) for ranks in world]
        place, self.rank = divmod(dist.get_rank(), size)
        coupling = [dist.new_group(ranks, backend=nccl.NAME) for ranks in same]
        self.replicas = coupling[self.rank] if replicas > 1 else None
        self.channels = Channels(
            groups[place], pairs(self.programs), CPU, separate=separate, shapes=varying
        )

    def executor(self, program):
        """Of one iteration with new stages."""
        store, count = WeightGradStore(), self.schedule.num_stages
        splits = any(p.kind == W for _, p in self.schedule)
        self.stages = {
            s: CoupledStage(store, s, count, self.replicas, splits, self.varying)
            for s in self.schedule.placement.stages(self.rank)
        }
        message = Message(None if self.varying else (ROWS, WIDTH), torch.float32, CPU)
        activations = ActivationStore(CPU, small=1)  # for families that move some to the host
        return Executor(
            *(program, self.stages, self.channels, message, store, HostClock()),
            self.device.passing,
            activations,
        )

    def train(self, ahead=False):
        """By stage: losses and gradients of an iteration, with forwards run ahead if asked."""
        program, count = self._ahead() if ahead else (self.programs[self.rank], 0)
        executor = self.executor(program)
        executor.run_ahead(count)
        executor.run()
        for stage in self.stages.values():
            for work in stage.reducing:
                work.wait()
        return {
            s: (stage.losses, [p.grad for p in stage.parameters()])
            for s, stage in self.stages.items()
        }

    def drop(self):
        """Runs forwards ahead for nothing."""
        program, count = self._ahead()
        executor = self.executor(program)
        executor.run_ahead(count)
        executor.drop()

    def evaluate(self):
        """Losses by stage, of forwards only."""
        receives = BY_TAKER if self.varying else LATE
        executor = self.executor(lower(evaluation(self.schedule), receives)[self.rank])
        with torch.no_grad():
            executor.run()
        return {s: stage.losses for s, stage in self.stages.items()}

    def _ahead(self):
        ahead = passes_run_ahead(
            self.schedule, passes_ahead(self.schedule), self.schedule.num_ranks
        )
        begun, rest = split(self.programs[self.rank], ahead)
        return begun + rest, len(begun)


def live(schedules, mode, replicas=1, varying=False, receives=LATE):
    """A training program's life: one iteration after the other, and another schedule in the end."""
    with nccl.Device(**MODES[mode]) as device:
        trained = []
        for schedule in schedules:
            programs = lower(schedule, receives)
            pipeline = Pipeline(device, schedule, programs, replicas=replicas, varying=varying)
            trained.append((schedule, pipeline.train()))
            pipeline.drop()
            evaluated = pipeline.evaluate()
            trained.append((schedule, pipeline.train(ahead=True)))
        return trained, evaluated


def check_lives(ranks, schedules, mode, replicas=1, varying=False, receives=LATE):
    """All that they computed is what one process computes."""
    world = schedules[0].num_ranks * replicas
    lives = ranks(world).run(live, schedules, mode, replicas, varying, receives, timeout=200)
    for trained, evaluated in lives:
        for schedule, stages in trained:
            count, m = schedule.num_stages, schedule.num_microbatches
            losses, gradients = reference(count, m, True, *([uneven] if varying else []))
            for stage, (own, made) in stages.items():
                assert own == (losses if stage == count - 1 else [])
                for gradient, expected in zip(made, gradients[stage], strict=True):
                    assert torch.equal(gradient, replicas * expected)
        assert evaluated.get(count - 1, losses) == losses


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
    when=lambda receives, varying, **_: receives == LATEST or not varying,
    name=('zb-v', 'dualpipe-v', '1f1b'),
    receives=(LATEST, EARLY),
    mode=('both', 'synchronises'),
    varying=(False, True),
)
def test_receives_posted_at_another_time(ranks, name, receives, mode, varying):
    """By default they are late: see all other tests."""
    check_lives(ranks, [build(name, 4, 8)], mode, varying=varying, receives=receives)


@grid(name=('zb-v', 'zb-h1', 'interleaved'), mode=tuple(MODES))
def test_messages_of_any_shape(ranks, name, mode):
    """Shapes go ahead from host to host, and receives are posted where these are taken."""
    schedules = [build(name, 4, 8), build('1f1b', 4, 8)]
    check_lives(ranks, schedules, mode, varying=True, receives=BY_TAKER)


@grid(name=('zb-h1', 'zb-v', '1f1b'), mode=tuple(MODES)[::-1])
def test_two_pipelines_coupled_by_collectives(ranks, name, mode):
    """Tensor-parallel ones in each F, data-parallel ones behind the last W of each stage."""
    check_lives(ranks, [build(name, 2, 4)], mode, replicas=2)


def stand(schedule, mode, lead, warm, separate):
    """Where this rank stands for ever; None: nowhere."""
    programs = posted_earlier(lower(schedule, EARLY), lead)
    warm_up = Channels._use_all_once
    if not warm:
        Channels._use_all_once = lambda *args: None
    try:
        with nccl.Device(**MODES[mode], patience=PATIENCE) as device:
            Pipeline(device, schedule, programs, separate).train()
    except nccl.Stuck as stuck:
        return str(stuck)
    finally:
        Channels._use_all_once = warm_up
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
