"""The first iteration in parallel: it changes no bit, and no rank waits for another in it."""

import contextlib
import os
import random
import signal
import sys
import weakref
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import events
import forked
import models
import numpy as np
import pytest
import torch
import torch.distributed as dist
from example import program, words
from grids import grid
from megatron.core.tensor_parallel import inference_layers
from megatron.core.transformer import TransformerConfig
from nvidia import needs_training, run
from paths import ROOT
from supported import supports
from test_launch import DISTRIBUTED, LLAMA, MOE, OVERLAP
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from megatron_zbpp.mcore.iteration import prewarm
from megatron_zbpp.mcore.techniques.updating import Updating
from megatron_zbpp.runtime.weight_grads import WeightGradStore

pytestmark = pytest.mark.alone
DROPOUT = ['--hidden-dropout', 0.1, '--attention-dropout', 0.1]
BIAS = ['--moe-router-enable-expert-bias', '--moe-router-score-function', 'sigmoid']
UNTIED = ['--untie-embeddings-and-output-weights']
ROPE = ['--position-embedding-type', 'rope']
EARLY = ['--enable-optimizer-post-validation', '--optimizer-post-validation-clean-steps', 0]
UNWATCHED = ['--pipeline-watchdog-timeout', 0]
PREPARING = [*UNWATCHED, '--pipeline-prewarm']
_ASKED_BY_MTP = 'is_inference_column_parallel_linear'  # on main; knows types of TE alone
PREPARED = 'first iteration prepared in parallel'
EXPERTS = [*LLAMA, *MOE, '--moe-z-loss-coeff', 1e-3]
# what is trained: processes, flags
CASES = {
    'dropout': (2, [*DROPOUT, *UNTIED]),
    'experts, their biases and logged losses': (2, [*EXPERTS, *BIAS, '--bf16']),
    'fp16': (2, ['--fp16', '--initial-loss-scale', 2**30]),
    'distributed optimizer, overlapped': (4, [*DISTRIBUTED, *OVERLAP, '--bf16']),
    'post-validation': (2, [*EARLY, '--clip-grad', 1e9]),
    'multi-token prediction': (2, ['--mtp-num-layers', 1, *UNTIED, *ROPE]),
    'iterations that run again': (2, ['--rerun-mode', 'validate_results']),
    'slices': (2, ['--pipeline-slices', 2]),
    'vocabulary': (2, ['--pipeline-vocab-parallel', 'output', *UNTIED]),
    'offload': (2, ['--pipeline-offload', 'all']),
    'two-way': (4, ['--pipeline-schedule', 'chimera-zb']),
    'recompute': (2, ['--pipeline-recompute', 'all', *DROPOUT]),
}  # fmt: skip


@contextlib.contextmanager
def counting(training):
    """Counts forwards of the chunks of this rank in the first iteration."""
    from megatron.core.pipeline_parallel import schedules

    counts = [0]

    def count(*_, **__):
        counts[-1] += 1

    logged = training, 'training_log', lambda *_, **__: counts.append(0)
    with events.before((schedules, 'forward_step', count), logged):
        yield counts


@needs_training
@supports(f'{PREPARED}: {{case}}')
@grid(schedule=('zb-v', 'zb-h1'), case=tuple(CASES))
def test_changes_nothing(ranks, schedule, case):
    """Losses, norms, parameters and optimizer state are those of the same schedule without it."""
    p, flags = CASES[case]
    if '--mtp-num-layers' in flags and hasattr(inference_layers, _ASKED_BY_MTP):
        pytest.skip('Megatron builds it only where Transformer Engine is: docs/limits.md')
    require_no_change(ranks(p), '--pipeline-schedule', schedule, *flags, batch=3 * p)


@needs_training
@pytest.mark.te
@supports(f'{PREPARED}: FP8 with delayed scaling{{beside}}', 'zb-v')
@pytest.mark.parametrize('beside', ['', ', dropout'])
def test_scales_of_fp8(te_ranks, beside):
    """Also where masks are drawn between what is scaled."""
    flags = ['--transformer-impl', 'transformer_engine', '--bf16', *ROPE, '--fp8-format', 'hybrid']
    flags += ['--fp8-recipe', 'delayed', '--pipeline-schedule', 'zb-v']
    flags += DROPOUT if beside else []
    require_no_change(te_ranks(2), *flags, batch=6)


@supports(f'{PREPARED}: layers of Transformer Engine that run twice', 'zb-v')
@pytest.mark.te
def test_flags_of_the_first_microbatch(te_ranks, data):
    """In it TE's layers do not add to a gradient: of one that runs twice it is that of one run."""
    job = models.Job(layers=4, change='run twice', te=True, fused=True, bf16=True)
    argv = job.argv('zb-v', False, data)
    plain, first = (
        te_ranks(2).run(models.train, job, [*argv, *more]) for more in ([], ['--pipeline-prewarm'])
    )
    models.assert_same(first, plain)


@pytest.mark.on_ranks(1)
def test_flags_and_gradients():
    """Of a layer that DDP does not wrap: what there is behind a backward whose traces go."""
    layer = torch.nn.Linear(2, 2)
    layer.config = TransformerConfig(num_layers=1, hidden_size=2, num_attention_heads=1)
    layer.bias.grad = torch.zeros(2)
    layer.is_first_microbatch, layer.weight.grad_added_to_main_grad = True, False
    with prewarm._nothing_left([layer]):
        layer(torch.ones(2)).sum().backward()
        layer.is_first_microbatch, layer.weight.grad_added_to_main_grad = False, True
    assert (layer.is_first_microbatch, layer.weight.grad_added_to_main_grad) == (True, False)
    assert layer.weight.grad is None and layer.bias.grad.tolist() == [0, 0]


def require_no_change(ranks, *flags, batch):
    flags = [*flags, '--pipeline-model-parallel-size', 2, '--train-iters', 3]
    flags += ['--global-batch-size', batch]
    plain = run(ranks, *flags, event=counting)
    first = run(ranks, *flags, '--pipeline-prewarm', event=counting)
    for without, with_it in zip(plain.reported, first.reported, strict=True):
        assert with_it[0] > without[0], 'no chunk has run before the iteration'
        assert with_it[1:] == without[1:]
    assert len(first.losses) == 3
    assert replace(first, reported=()) == replace(plain, reported=())


OFFLOADING = {'fine_grained_activation_offloading': True}


@pytest.mark.parametrize(
    ('alone', 'shape', 'config', 'why'),
    [
        (None, (1,), {'cuda_graph_impl': 'none'}, None),
        (Updating.stays_alone, (1,), {}, Updating.stays_alone),
        (None, None, {}, 'shapes vary from microbatch to microbatch'),
        (None, (1,), {'cuda_graph_impl': 'local'}, 'CUDA graphs are captured in it'),
        (None, (1,), OFFLOADING, "Megatron's offloading measures it"),
    ],
)
def test_what_is_left_out(alone, shape, config, why):
    """With what the log says of it."""
    context = SimpleNamespace(messages=[SimpleNamespace(shape=shape)])
    executors = SimpleNamespace(faces=[SimpleNamespace(stays_alone=alone)], context=context)
    assert prewarm._obstacle(executors, SimpleNamespace(**config)) == why


def first_calls(argv, prewarm, seconds):
    """Trains one iteration on each rank; whether its first forward began beside all others'."""
    import pretrain_gpt

    store, met = dist.distributed_c10d._get_default_store(), []
    name = f'first calls {prewarm}'

    def meet(*_):
        if not met:
            store.add(name, 1)
            store.set(f'{name} {dist.get_rank()}', '')
            others = [f'{name} {rank}' for rank in range(dist.get_world_size())]
            try:
                store.wait(others, timedelta(seconds=seconds))
                met.append(True)
            except dist.DistStoreError:
                met.append(False)

    meeting = events.before((pretrain_gpt, 'forward_step', meet))
    with program([*argv, *(PREPARING if prewarm else UNWATCHED)]) as at, meeting:
        at.batch()
    return met


def test_all_ranks_begin_at_once(ranks, data):
    """Each rank's first forward waits there for those of all: only without messages can it end."""
    argv = words(data, 'zb-v', p=4, layers=8)
    assert ranks(4).run(first_calls, argv, True, 100) == [[True]] * 4
    assert [False] in ranks(4).run(first_calls, argv, False, 1), 'that nothing is prepared is seen'


UNLUCKY = """
import os
import sys
import time

import pretrain_gpt

trains, number = pretrain_gpt.forward_step, int(sys.argv.pop(1))


def forward_step(*given):
    if os.environ['RANK'] == '1':
        if not number:
            raise ZeroDivisionError('a kernel that is not there')
        os.kill(os.getpid(), number)
        time.sleep(60)
    return trains(*given)


pretrain_gpt.forward_step = forward_step
pretrain_gpt.main()
"""


def launched(folder, data, number):
    """What two ranks of a program say, prepared in parallel, and how they end: one fails when it
    first runs, or gets a signal."""
    script = folder / 'unlucky.py'
    script.write_text(UNLUCKY)
    torchrun = [sys.executable, '-m', 'torch.distributed.run', '--standalone']
    argv = words(data, 'zb-v', '--train-iters', 2, '--pipeline-prewarm')
    command = [*torchrun, '--nproc-per-node', 2, script, number, *argv]
    paths = os.pathsep.join(map(str, (ROOT, ROOT / 'examples' / 'gpt')))
    done = forked.run(command, env={'PYTHONPATH': paths}, timeout=200)
    assert done.returncode
    return done


def test_one_rank_that_fails_inside_ends_all(tmp_path, data):
    """The other has run its chunks and waits for the first message of the iteration."""
    said = launched(tmp_path, data, 0).stderr
    assert said.count('ZeroDivisionError: a kernel that is not there. If they work') == 1
    assert '--no-pipeline-prewarm' in said


@pytest.mark.parametrize('name', ['SIGINT', 'SIGTERM'])
def test_interrupted_inside(tmp_path, data, name):
    """All end; it says what it was in, and how to leave that out."""
    done = launched(tmp_path, data, signal.Signals[name].value)
    assert 'iteration        1' not in done.stdout
    watchdog = 'pipeline watchdog: global rank '
    report = done.stderr.partition(f'{watchdog}1 ')[2].partition(watchdog)[0]  # of that rank alone
    title, *lines = report.splitlines()
    assert name in title or 'KeyboardInterrupt' in title
    (told,) = (line for line in lines if line.startswith(f'  part of: {prewarm.PASSES}'))
    assert '--no-pipeline-prewarm' in told
    ended = done.stderr.count(f'[rank1]: KeyboardInterrupt: {prewarm.PASSES}')
    assert ended == (name == 'SIGINT')


def interrupted(argv, interrupts):
    """Trains two iterations, the first again where an interruption ends it. Returns the losses and
    gradients, and what the interruption said and left."""
    import pretrain_gpt

    from megatron_zbpp.mcore.side_effects import random_states, same_states

    said, done = [], []

    def draw(*_):
        random.random()
        np.random.random()

    def drawn():
        return random.getstate(), str(np.random.get_state())

    def interrupt(*_):
        done.append(None)
        if interrupts and len(done) == 2:
            raise KeyboardInterrupt

    with program([*argv, *PREPARING]) as at:
        parameters = [p for model in at.models for p in model.parameters()]
        dataset, _ = pretrain_gpt.build_datasets(at.args)

        def batch():
            return at.batch(pretrain_gpt.iterators(at.args, dataset, 0))

        drawing = pretrain_gpt, 'forward_step', draw
        with events.before(drawing, (WeightGradStore, 'run', interrupt)):
            before, others = random_states(), drawn()
            try:
                losses = [batch()]
            except KeyboardInterrupt as error:
                said = [str(error), same_states(before, random_states()), drawn() == others]
                said += [not any(p.main_grad.any() for p in parameters)]
                said += [all(p.grad is None for p in parameters), at.plugin.session.store.pending]
                losses = [batch()]
            losses.append(batch())
        gradients = torch.stack([p.main_grad.norm() for p in parameters]).tolist()
    return (losses, gradients), said


@pytest.mark.on_ranks(2)
def test_nothing_is_left_of_an_interruption(data):
    """Ctrl-C in the second W, where a program catches it and trains on."""
    whole, none = interrupted(words(data, 'zb-v'), False)
    again, (reason, *left) = interrupted(words(data, 'zb-v'), True)
    assert again == whole and none == []
    assert reason.startswith(prewarm.PASSES) and left == [True, True, True, True, 0]


class Alive(TorchDispatchMode):
    """Counts bytes of the storages that operations have made and that are alive."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._known = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        for given in tree_iter((args, kwargs)):
            if isinstance(given, torch.Tensor):  # what was there before is not counted
                self._known.setdefault(given.untyped_storage(), 0)
        made = operation(*args, **(kwargs or {}))
        for each in tree_iter(made):
            if isinstance(each, torch.Tensor):
                self._count(each.untyped_storage())
        return made

    def _count(self, storage):
        if storage not in self._known:
            self._known[storage] = size = storage.nbytes()
            self._add(size)
            weakref.finalize(storage, self._add, -size)

    def _add(self, size):
        self.now += size
        self.peak = max(self.peak, self.now)


def peaks(argv):
    """Bytes that this rank holds at most before the first iteration, and in it."""
    found, original = [], prewarm.prewarmed

    def prewarmed(*given):
        data = original(*given)
        found.append(alive.peak)
        alive.peak = alive.now
        return data

    with program([*argv, *PREPARING]) as at:
        data = at.data
        with mock.patch.object(prewarm, 'prewarmed', prewarmed), Alive() as alive:
            at.batch(data)
    return *found, alive.peak


@pytest.mark.on_ranks(2)
@pytest.mark.parametrize('schedule', ['zb-v', 'zb-h1'])
def test_peak_memory(data, schedule):
    """Far below that of the iteration; as much where one microbatch is all there is. The copies of
    random states, which are on the host, are no part of that."""
    before, within = peaks(words(data, schedule, m=2))
    assert 100_000 < before < 0.8 * within
    before, within = peaks(words(data, schedule, m=1))
    assert 0.99 * within < before - 2 * torch.get_rng_state().nbytes < 1.01 * within


@pytest.mark.on_ranks(2)
def test_gradients_that_are_there_stay(data):
    """No forward runs before the iteration, of four microbatches in two chunks."""
    with program([*words(data, 'zb-v'), *PREPARING]) as at:
        parameters = [p for model in at.models for p in model.parameters()]
        for parameter in parameters:
            parameter.main_grad.fill_(1)
        with mock.patch.object(at.script, 'forward_step', wraps=at.script.forward_step) as forward:
            at.batch()
        assert forward.call_count == 2 * 4 and all(p.main_grad.min() > -1 for p in parameters)
