"""Groups for messages: on those that order and block as NCCL's whatever waits for what ends."""

import os
import threading
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from grids import grid
from programs import posted_earlier
from stages import CPU, LinearStage, Pipeline, even, reference, require_same, uneven

from devtools import nccl
from megatron_zbpp.analysis.deadlock import DeadlockError, Rule, prove
from megatron_zbpp.analysis.lowering import lower
from megatron_zbpp.analysis.program import BY_TAKER, EARLY, LATE, LATEST, Send
from megatron_zbpp.analysis.run_ahead import evaluation
from megatron_zbpp.ir import F, Pass, W
from megatron_zbpp.runtime import groups
from megatron_zbpp.runtime.channels import Channels, Message
from megatron_zbpp.schedules import build, names

# what passes wait for, and when launched operations start: see `nccl.Device`
MODES = {
    'plain': {},
    'synchronises': {'synchronises': True},
    'in order': {'in_order': True},
    'both': {'synchronises': True, 'in_order': True},
}
PATIENCE = 3.0  # seconds, where something is stuck


@contextmanager
def pipeline_on(mode):
    """Options of `Pipeline` for an emulated device in a mode; for gloo, if there is none."""
    if mode is None:
        yield {}
    else:
        with nccl.Device(**MODES[mode]) as device:
            yield {'group': dist.new_group(backend=nccl.NAME), 'named': device.passing}
            device.synchronize()


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
            record = executor.run()
        assert not any(record.live), 'evaluation keeps no activations'
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
    losses, _ = reference(last + 1, schedule.num_microbatches, rows)
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
    when=lambda receives, rows, **_: receives != EARLY or rows is even,
    name=('zb-v', 'dualpipe-v', 'interleaved', 'zb-h1', '1f1b'),
    receives=(BY_TAKER, LATEST, EARLY),
    mode=('both', 'synchronises', 'in order', 'plain'),
    rows=(uneven, even, even),
)
def test_receives_posted_at_another_time(ranks, name, receives, mode, rows):
    """Shapes go ahead from host to host, and receives are posted where these are taken."""
    schedules = [build(name, 4, 8), build('1f1b', 4, 8)]
    check_lives(ranks, schedules, mode, rows=rows, receives=receives)


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
        None,
    ),
    'one group for all messages': (
        ('1f1b', 2, 4), 'plain', 1, True, False,
        'running: a receive from rank 1 | not started: a send to rank 1', None,
    ),
    'a pass early and device synchronisation': (
        ('zb-h1', 2, 4), 'synchronises', 1, True, True,
        'rank 0 waits for its device, in 0F1 | running: a receive from rank 1',
        Rule.SYNCHRONISATION,
    ),
    'earlier and launch order': (
        ('gpipe', 2, 4), 'in order', 2, True, True,
        'running: a receive from rank 0 | not started: a receive from rank 0', Rule.LAUNCH_ORDER,
    ),
}  # fmt: skip


@pytest.mark.parametrize('case', STUCK)
def test_what_was_stuck_before(ranks, case):
    """And the proof knew, without running the programs."""
    name, mode, lead, *how, expected, rule = STUCK[case]
    schedule = build(*name)
    said = ranks(2).run(stand, schedule, mode, lead, *how)
    assert all(said), 'it went on'
    assert any(expected in words for words in said), said
    if rule is not None:
        with pytest.raises(DeadlockError) as error:
            prove(posted_earlier(lower(schedule, EARLY), lead), Rule.RENDEZVOUS | rule)
        assert rule in error.value.rules


# ---- Which backend carries what, what groups for messages inherit, and when they are used.


CUDA = torch.device('cuda', 0)


@pytest.mark.parametrize(
    ('config', 'on_gpu', 'host'),
    [
        ('cpu:gloo,cuda:gloo', 'gloo', 'cpu'),
        ('cpu:gloo,cuda:nccl', 'nccl', 'cpu'),  # what get_backend calls by both, or 'undefined'
        ('cpu:ucc,cuda:ucc', 'ucc', 'cpu'),
        ('cuda:nccl', 'nccl', 'cuda'),
    ],
)
def test_backend_of_a_device(monkeypatch, config, on_gpu, host):
    monkeypatch.setattr(dist, 'get_backend_config', lambda group: config)
    assert groups.backend_for(None, CUDA) == on_gpu
    assert groups.host_device(None) == host


def test_a_device_that_no_backend_takes(monkeypatch):
    monkeypatch.setattr(dist, 'get_backend_config', lambda group: 'cuda:nccl')
    with pytest.raises(ValueError, match='backends for cuda, but the model is on cpu'):
        groups.backend_for(None, CPU)


@pytest.mark.skipif(not dist.is_nccl_available(), reason='this torch is built without NCCL')
@pytest.mark.parametrize(
    ('given', 'asked', 'expected'),
    [
        ({}, {}, 2),
        ({}, {'ctas': 1}, 1),
        ({'max_ctas': 16}, {}, 16),
        ({'min_ctas': 8}, {}, 8),
        ({}, {'high_priority': False}, 2),
    ],
)
@pytest.mark.parametrize('high', [False, True])
def test_messages_take_few_processors(monkeypatch, given, asked, expected, high):
    """Unless --nccl-communicator-config-path says how many; what it says otherwise stays.

    They start before what is queued with them, unless it is asked for the priority of the group.
    """
    theirs = dist.ProcessGroupNCCL.Options(is_high_priority_stream=high)
    theirs._timeout = timedelta(minutes=3)
    theirs.config.cga_cluster_size = 2
    for name, value in given.items():
        setattr(theirs.config, name, value)
    before = theirs.config.max_ctas
    group = SimpleNamespace(_get_backend=lambda device: SimpleNamespace(options=theirs))
    monkeypatch.setattr(dist, 'get_backend_config', lambda group: 'cuda:nccl')
    like = groups.like(group, CUDA, groups.MessageKernels(**asked))
    assert like['backend'] == 'nccl' and like['timeout'] == timedelta(minutes=3)
    ours = like['pg_options']
    assert ours.is_high_priority_stream == (high or asked.get('high_priority', True))
    assert ours.config.cga_cluster_size == 2
    assert ours.config.max_ctas == expected
    assert theirs.config.max_ctas == before


@pytest.mark.on_ranks(2)
def test_timeout_of_the_pipeline():
    """Channels' groups have it, and not that of the world."""
    with nccl.Device():
        limit = timedelta(minutes=7)
        pipeline = dist.new_group(backend=nccl.NAME, timeout=limit)
        made = groups.directions(pipeline, CPU, [(0, 1), (1, 0)])
        gloo = dist.new_group(timeout=limit)
        made |= groups.directions(gloo, CPU, [(0, 1)])
        assert [group._get_backend(CPU).options._timeout for group in made.values()] == [limit] * 2


def first_messages(absent):
    """What this rank waits for, in order, until all ranks but `absent` have used their channels."""
    met = []

    @contextmanager
    def collective(what):
        met.append(what)
        yield

    around = {(0, 1), (1, 0), (1, 2), (2, 1), (2, 0)}
    dist.barrier()  # from here on ranks are quick
    try:
        with nccl.Device(**{} if absent is None else {'patience': 4}):
            group = dist.new_group(backend=nccl.NAME)
            if dist.get_rank() == absent:  # makes them with the others, and uses none
                groups.directions(group, CPU, around)
            else:
                Channels(group, around, CPU, collective)
    except nccl.Stuck as stuck:
        return met, str(stuck)
    return met, None


def test_channels_are_used_once(ranks):
    results = ranks(3).run(first_messages, None)
    making = 'making of the groups for messages between stages'
    used = [f'first message from pipeline rank {pair}' for pair in ('2 to 0', '1 to 2', '2 to 1')]
    assert results[2] == ([making, *used], None)


def test_a_rank_that_does_not_come_is_named(ranks):
    results = ranks(3).run(first_messages, 2)
    assert results[1][0][-1] == 'first message from pipeline rank 1 to 2'
    assert 'make a communicator for a send to rank 2' in results[1][1]


# how many sends a rank holds: right after one, once it has left, and when asked to let go
@pytest.mark.parametrize(
    ('backend', 'expected'), [(nccl.NAME, [1, 1, 0, 0]), ('gloo', [1, 1, 1, 0])]
)
@pytest.mark.on_ranks(2)
def test_what_has_left_is_let_go(backend, expected):
    """At the next pass, whether it sends or not; on gloo, which cannot tell, at the end."""
    device = nccl.Device() if backend == nccl.NAME else nullcontext()
    with device:
        group = dist.new_group(backend=backend)
        channels = Channels(group, [(0, 1)], CPU)
        held = []

        def look():
            held.append(sum(map(len, channels._unfinished.values())))

        if channels.rank == 0:
            channels.send(torch.ones(3), Send(Pass(F, 0, 0), Pass(F, 1, 0), 1, 2))
            channels.let_go()
            look()
        dist.barrier()  # now the peer takes it
        if channels.rank == 1:
            channels.post(Message((3,), torch.float32, CPU), 0).wait()
        dist.barrier()
        if channels.rank == 0 and backend == nccl.NAME:
            ((work, *_),) = channels._unfinished[1]
            work.wait()
        look()
        channels.let_go()
        look()
        channels.finish()
        look()
        dist.barrier()
    assert channels.rank or held == expected


def process_of_a_rank(watched):
    if watched:
        threading.Thread(target=threading.Event().wait, name='watchdog', daemon=True).start()
    return os.getpid()


def test_a_process_that_ended_or_is_to_end_is_not_called_again(ranks):
    watched = ranks(2).run(process_of_a_rank, True)
    others = ranks(2).run(process_of_a_rank, False)
    assert not {*watched} & {*others}
    killed = psutil.Process(others[0])
    killed.kill()
    psutil.wait_procs([killed])
    assert not {*others} & {*ranks(2).run(process_of_a_rank, False)}
