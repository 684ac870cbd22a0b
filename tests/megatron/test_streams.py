"""Megatron trains on a device that records streams: nothing races, and seeded races are found.
DistributedDataParallel is made on a side stream, as NVIDIA's loop makes it. Process groups use
streams as NCCL's do. Autograd's engine, its threads and its choice of streams are torch's own."""

import math
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import models
import nvidia
import pytest
import torch
import wheels
from grids import some
from models import Job
from ranks import Pool, Ranks
from recorded import build, device
from recorded.communicators import faults
from recorded.training import recording, train

from megatron_zbpp.runtime import channels
from megatron_zbpp.runtime.activations.copies import Copies
from megatron_zbpp.runtime.activations.store import SavedActivations

pytestmark = pytest.mark.timeout(600)  # a busy machine is no reason to fail

TWICE = {'dp': 2, 'fused': True, 'overlap': True, 'distributed': True, 'bf16': True}
# what is trained, and by which schedule; the kinds but dense have no linear biases
TRAININGS = {
    "zb-h1, Megatron's layers": (Job(te=False), 'zb-h1'),
    'zb-v': (Job(fused=True), 'zb-v'),
    'zb-2p, post-validation': (Job(te=False), 'zb-2p+post-validation'),
    'zb-v, post-validation': (Job(fused=True), 'zb-v+post-validation'),
    'offload': (Job(offload='all'), 'zb-v'),
    'recompute': (Job('SwiGLU', again='all', fused=True), 'zb-v'),
    'tensor and sequence parallel': (Job('SwiGLU', tp=2, fused=True), 'zb-h1'),
    'replicas, zb-h1': (Job('SwiGLU', **TWICE), 'zb-h1'),
    'replicas, dualpipe-v': (Job('SwiGLU', **TWICE), 'dualpipe-v'),
    'experts': (Job('grouped experts', ep=2, **TWICE), 'zb-v'),
}
REPLICAS = TRAININGS['replicas, zb-h1'][0]


@pytest.fixture(scope='module', params=wheels.VERSIONS[:2])
def recorded_ranks(request):
    folder = wheels.transformer_engine(request.param)
    pool = Pool(device.join, build.build(), folder, emulated=False)
    yield lambda size: Ranks(size, pool)
    pool.stop()


def undefined(parameter):
    """As `dummy_gradient`, of before: DDP's hook finds a gradient, autograd gets none."""
    parameter.grad_added_to_main_grad = True
    parameter.grad = torch.zeros((), device='cuda', dtype=parameter.dtype).expand(parameter.shape)


def received_by_the_host(incoming):
    """As `Incoming.wait`, whose stream waits, and not the host."""
    if incoming.work is not None:  # noise of the first iteration is here
        incoming.work.wait_for_data()
    return incoming.tensor


def sends_overwritten(self, tensor, send):
    """As `Channels.send`, with a tensor that is used for something else right after."""
    tensor = tensor.clone()
    self.unbroken(tensor, send)
    tensor.zero_()


def asks_in_backward(self, hidden_states, *args, **kwargs):
    """As `MLP.forward`, with a gradient whose value the host asks for."""
    if hidden_states.requires_grad:
        hidden_states.register_hook(lambda gradient: gradient if gradient.sum() > 0 else None)
    return self.unbroken(hidden_states, *args, **kwargs)


def _broken(name):
    """Whose function, and which, is to be another one, that finds it as `unbroken`."""
    from megatron.core.transformer.mlp import MLP

    from megatron_zbpp.mcore.layers import delayed_module

    return {
        'None': (delayed_module, 'dummy_gradient', undefined),
        'no wait': (channels.Incoming, 'wait', received_by_the_host),
        'overwritten': (channels.Channels, 'send', sends_overwritten),
        'copies': (Copies, 'wait', lambda self, mark: None),
        'asks': (MLP, 'forward', asks_in_backward),
        'no early free': (SavedActivations, 'leave', left_allocated),
    }[name]


@contextmanager
def broken_by(name):
    if name == 'nothing':
        yield
        return
    owner, attribute, replacement = _broken(name)
    with (
        mock.patch.object(owner, 'unbroken', getattr(owner, attribute), create=True),
        mock.patch.object(owner, attribute, replacement),
    ):
        yield


def train_broken(name, job, argv):
    """Runs on each rank."""
    with broken_by(name):
        return train(job, argv)


def run(recorded_ranks, data, job, schedule, broken='nothing', words=()):
    name, _, early = schedule.partition('+')
    argv = [*job.argv(name, bool(early), data), *words]
    return recorded_ranks(job.size).run(train_broken, broken, job, argv, timeout=250)


# of those that each run spares, others have the same schedule or the same replicas
SPARED = 'zb-v', 'replicas, zb-h1'


@some('training', [name for name in TRAININGS if name not in SPARED], *SPARED)
def test_streams_are_ordered(recorded_ranks, data, training):
    """Every use of memory is behind those that it depends on, on every rank. And each communicator
    is given the same on all of its ranks."""
    job, schedule = TRAININGS[training]
    results = run(recorded_ranks, data, job, schedule)
    check_order(results)
    if job.ep == 1:  # Megatron asks how many tokens each expert has
        assert [waits_in_passes(rank) for rank in results] == [{}] * len(results)
    for rank in results:
        assert len({stream for _, stream, _ in rank.kernels}) > 1
    losses = [loss for rank in results for loss in rank.trained.losses if loss is not None]
    assert losses and all(map(math.isfinite, losses))
    assert any(rank.trained.early for rank in results) == schedule.endswith('+post-validation')
    copied = {name for rank in results for _, stream, name in rank.kernels if stream}
    assert not job.offload or 'copy to the host' in copied
    late = {name for rank in results for name in rank.late}
    assert not (job.offload and any('copy to the' in n for n in late)), 'no copy keeps it back'
    sent = [each.sent for rank in results for each in rank.operations if each.sent]
    assert bool(sent) == (job.ep > 1), 'what experts exchange is compared'


def check_order(results):
    assert [rank.races for rank in results] == [{}] * len(results)
    assert [*faults([rank.operations for rank in results])] == []


def waits_in_passes(rank):
    """Waits of the host, by (what, pass), but for a constant that Megatron's loss is given once."""
    waits = {key: count for key, count in rank.waits.items() if key[1]}
    constants = [key for key in waits if key[0] == 'pageable copy to the device']
    assert sum(waits.pop(key) for key in constants) <= 1
    return waits


def test_a_layer_that_waits_is_found(recorded_ranks, data):
    results = run(recorded_ranks, data, Job(te=False), 'zb-h1', 'asks')
    for number, rank in enumerate(results):
        waits = waits_in_passes(rank)
        assert waits and {what for what, _ in waits} == {'aten::_local_scalar_dense'}
        assert all(within.startswith(f'{number}B') for _, within in waits)


def left_allocated(self):
    """As `SavedActivations.leave`, while somebody holds the memory."""
    self.forgotten = [piece.storage for piece in self._going]
    self.unbroken()


PARTNERS = Job(te=False, pp=4, fused=True)
GOING = 4  # of the 8 microbatches of an iteration leave the first rank
SHORT = ('--global-batch-size', '8', '--train-iters', '2')


@pytest.mark.parametrize('broken', ['nothing', 'no early free'])
def test_a_partners_memory_is_as_planned(recorded_ranks, data, broken):
    """The first rank of `bpipe` holds no more than by 1F1B, if what has left is freed. The
    allocator has it back when it knows that NCCL's stream is done: see docs/gpu-tips.md."""
    results = run(recorded_ranks, data, PARTNERS, 'bpipe', broken, SHORT)
    plain = run(recorded_ranks, data, PARTNERS, '1f1b', words=SHORT)
    check_order(results)
    assert [waits_in_passes(rank) for rank in results] == [{}] * len(results)
    bundle = max(results[0].trained.moved.values())
    more = results[0].in_passes - plain[0].in_passes
    assert (more > bundle / 2) == (broken == 'no early free')
    late = sum(n for kernels, n in results[0].late.items() if kernels in ('send', 'recv'))
    messages = sum(n for kernels, n in plain[0].late.items() if kernels in ('send', 'recv'))
    most = (2 * GOING + 1) * bundle  # messages may differ by less than one
    assert late - messages <= most, 'all that leaves in an iteration, twice at most'


# what is broken: what is trained, and what is said of it
SEEDED = {
    'None': (REPLICAS, 'zb-h1', 'aten::mul_.Tensor on stream'),  # DDP scales, and reduces
    'no wait': (Job(te=False), 'zb-h1', 'does not wait for recv on stream'),
    'overwritten': (Job(te=False), 'zb-h1', 'aten::zero_ on stream 0'),
    'copies': (Job(te=False, offload='all'), 'zb-v', 'copy to the '),
}


@pytest.mark.parametrize('broken', SEEDED)
def test_seeded_races_of_streams_are_found(recorded_ranks, data, broken):
    job, schedule, said = SEEDED[broken]
    results = run(recorded_ranks, data, job, schedule, broken)
    races = [race for rank in results for race in rank.races]
    assert any(said in race for race in races), races


def test_bits_on_recorded_streams(recorded_ranks, data):
    """As Megatron's schedule on the same device, which races no more."""
    stock = run(recorded_ranks, data, REPLICAS, 'megatron')
    assert all(rank.races == {} for rank in stock)
    ours = run(recorded_ranks, data, REPLICAS, 'zb-v')
    models.assert_same([rank.trained for rank in ours], [rank.trained for rank in stock])


@dataclass(frozen=True)
class Recording:
    """Records NVIDIA's training loop, with something broken: see `nvidia.train`. A wait of the host
    is within 'iteration' or a pass in it, and there within what Megatron checks."""

    broken: str = 'nothing'

    @contextmanager
    def __call__(self, training):
        from megatron.core.rerun_state_machine import RerunStateMachine as Checks

        check, get = Checks.validate_result, training.get_forward_backward_func

        def named_check(self, *args, message, **options):
            with device.within(f'{device.current_pass()}: {message}'):
                return check(self, *args, message=message, **options)

        def named(*args, **options):
            return device.within('iteration')(get(*args, **options))

        with (
            broken_by(self.broken),
            mock.patch.object(Checks, 'validate_result', named_check),
            mock.patch.object(training, 'get_forward_backward_func', named),
            recording() as recorded,
        ):
            yield recorded


LOOP = """--pipeline-model-parallel-size 2 --global-batch-size 4 --train-iters 3 --bf16
    --transformer-impl transformer_engine --disable-bias-linear --overlap-grad-reduce
    --pipeline-schedule zb-h1""".split()


@nvidia.needs_training
@pytest.mark.parametrize('broken', ['nothing', 'None'])
def test_nvidias_loop_on_recorded_streams(recorded_ranks, broken):
    """It makes DDP on a side stream; products add to main_grad, and no layer has a bias."""
    results = nvidia.run(recorded_ranks(2), *LOOP, event=Recording(broken)).reported
    races = [race for (rank,) in results for race in rank.races]
    if broken == 'nothing':
        assert races == []
    else:
        assert any('W' in race and 'on stream 0' in race for race in races)


def checks(waits):
    """Waits of the host for what Megatron checks, by what is checked."""
    found = Counter()
    for (_, within), times in waits.items():
        found[within.partition(': ')[2]] += times
    return found - Counter({'': found['']})


@nvidia.needs_training
def test_nvidias_loop_waits_in_passes_for_its_own_checks(recorded_ranks):
    """The complete list: the loss is looked at in F, gradients of a bucket in its last W. Stock
    waits for the same as often, but for the loss of the pass that prepares the first iteration.
    Between its passes ours waits three times in all: twice when its channels are made, once to see
    that there are no gradients before the first iteration."""
    waits = {}
    for name, flags in {'stock': LOOP[:-2], 'ours': LOOP}.items():
        results = nvidia.run(recorded_ranks(2), *flags, event=Recording()).reported
        waits[name] = [rank.waits for (rank,) in results]
    for number, (stock, ours) in enumerate(zip(waits['stock'], waits['ours'], strict=True)):
        assert checks(stock) != {}
        assert checks(ours) == checks(stock) + Counter(loss=number)  # the last rank's
        for what, within in ours:
            if ': ' in within:
                assert what == 'aten::_local_scalar_dense'
                assert within.startswith(f'{number}W3: found' if 'grad' in within else '1F')
        others = {key: n for key, n in ours.items() if key[1] and ': ' not in key[1]}
        assert others.pop(('aten::_local_scalar_dense', 'iteration')) == 3
        constants = [key for key in others if key[0] == 'pageable copy to the device']
        assert sum(others.pop(key) for key in constants) <= 1, 'see waits_in_passes'
        assert others == {}
    assert any('loss' in name for name in checks(waits['ours'][1]))
