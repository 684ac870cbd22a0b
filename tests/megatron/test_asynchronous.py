"""Asynchronous schedules leave what Megatron's own 1F1B leaves on weights put in by hand."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import Any
from unittest import mock

import events
import forked
import nvidia
import pytest
from example import MODEL, run
from grids import grid, some
from models import Job
from nvidia import needs_training, require_same
from paths import ROOT, SUPPORT
from supported import supports
from weights_by_hand import BY, SIZES, ByHand, Case, clip_by_stage, require_equal

from megatron_zbpp.mcore import enabled

pytestmark = pytest.mark.alone


METHODS = ('pipedream-2bw', 'pipedream', 'paci', 'pipemare', 'wpipe')
UNTIED = '--untie-embeddings-and-output-weights'
SHARDED = '--use-distributed-optimizer'
SETTINGS = {
    'two replicas, distributed optimizer, overlapped reduction, bf16': {
        'words': '--bf16 --use-distributed-optimizer --overlap-grad-reduce',
        'replicas': 2,
    },
    'tensor parallel 2': {'words': '--tensor-model-parallel-size 2'},
    'two replicas': {'words': UNTIED, 'replicas': 2},
    'SGD, bf16': {'words': '--optimizer sgd --bf16'},
    'norm of all, for which steps wait': {'words': f'{UNTIED} --pipeline-clip global'},
    'two synchronous steps first': {'words': '--pipeline-async-warmup-steps 2'},
    'Muon': {'words': '--optimizer muon'},
    'fp16 with skipped steps': {'half': True},
    'fp16 with skipped steps, distributed optimizer': {
        'half': True,
        'words': SHARDED,
        'replicas': 2,
    },
    'experts': {'job': Job(kind='experts', te=False), 'words': UNTIED},
    'experts on two ranks, fp16 with skipped steps': {
        'job': Job(kind='experts', te=False, ep=2),
        'half': True,
        'replicas': 2,
    },
    'full recomputation': {'job': Job(te=False, recompute='full', dropout=0.1)},
    'selective recomputation': {'job': Job(te=False, recompute='selective', dropout=0.1)},
    'recompute passes': {'words': UNTIED, 'added': ('--pipeline-recompute', 'all')},
    'recompute passes, dropout': {
        'job': Job(te=False, dropout=0.1),
        'words': '--bf16',
        'added': ('--pipeline-recompute', 'half'),
    },
    'loss by token': {'job': Job(kind='loss by token', te=False), 'words': UNTIED},
    'split W': {'split': True, 'words': f'{UNTIED} --bf16'},
}


def case(method: str, words: str = '', **more) -> Case:
    job = more.get('job')
    if method == 'wpipe' and job is not None:  # orders of forwards, and so of draws, differ
        more['job'] = replace(job, dropout=0.0)
    return Case(method, 2, 2, tuple(words.split()), evaluates=True, **more)


def _has_reference(method: str, sizes: tuple[int, int], more: tuple[str, ...]) -> bool:
    """Whether PipeMare steps tied embeddings alike, and Megatron's own schedule runs and is right.
    PipeMare is refused else, as is 2BW of fewer than p-1. Megatron's interleaved schedule has a
    multiple of p, and on gloo mixes messages of two ranks where m is more."""
    p, m = sizes
    if method == 'pipemare':
        return sizes != (4, 1) or UNTIED in more
    return {'pipedream-2bw': m >= p - 1, 'wpipe': not m % p and sizes != (2, 4)}.get(method, True)


@supports('asynchronous, beside 1F1B with weights put in by hand', '{method}')
@grid(
    _has_reference,
    method=METHODS,
    sizes=SIZES,
    more=((), ('--bf16',), (UNTIED,), (SHARDED,), (UNTIED, '--bf16', SHARDED)),
)
def test_as_with_weights_put_in_by_hand(ranks, data, method, sizes, more):
    """Losses, norms, parameters, optimizer state to the bit; clipping is active."""
    require_equal(ranks, data, Case(method, *sizes, more, evaluates=bool(more)))


def _goes_with(method: str, setting: str) -> bool:
    """Whether there is a reference: W is put behind 1F1B's; and R runs as its forward ran."""
    if 'recompute passes' in setting:
        return method in ('pipedream', 'pipedream-2bw', 'wpipe')
    return method != 'wpipe' or 'split W' not in setting


@supports('asynchronous: {setting}', '{method}')
@grid(_goes_with, method=METHODS, setting=tuple(SETTINGS))
def test_beside_other_parallelism(ranks, data, method, setting):
    """The same on several ranks a stage, whose optimizer may write to buffers."""
    if setting == 'Muon':
        pytest.importorskip('emerging_optimizers')
    require_equal(ranks, data, case(method, **SETTINGS[setting]))


@pytest.mark.parametrize(
    'kind', ['unbalanced experts', 'experts by sinkhorn', 'z-loss, experts by sequence']
)
def test_routers_that_keep_no_counts(ranks, data, kind):
    """All that are not refused; what they log is that of the batch, to the bit."""
    require_equal(ranks, data, case('pipedream', UNTIED, job=Job(kind=kind, te=False)))


TE = {
    'GPT of dense': {'words': '--bf16'},
    'GPT of grouped experts': {'kind': 'grouped experts', 'words': UNTIED},
    'GPT of MLA': {'kind': 'MLA', 'words': UNTIED},
    'GPT of dense, tensor and sequence parallel 2': {
        'tp': 2,
        'words': f'{UNTIED} --bf16 --tensor-model-parallel-size 2',
    },
}


@pytest.mark.te
@supports('asynchronous: {model}', '{method}')
@grid(method=METHODS, model=tuple(TE))
def test_layers_of_transformer_engine(te_ranks, data, method, model):
    """The same by its layers, whose weights are read in each forward, too."""
    own = dict(TE[model])
    words = own.pop('words')
    require_equal(te_ranks, data, case(method, words, job=Job(**own)))


PAGE = (ROOT / 'docs' / 'asynchronous.md').read_text()
TORCHRUN = [sys.executable, '-m', 'torch.distributed.run', '--standalone']
PATHS = {'PYTHONPATH': f'{ROOT}:{ROOT / "examples" / "gpt"}:{SUPPORT}'}
INTERVAL, ITERATIONS, KILLED = 2, 6, 4  # in which iteration


def words_of_page(script: str) -> list[str]:
    """Flags of the page's command that runs `script`, behind torchrun's."""
    (found,) = re.findall(rf'^torchrun (.*(?:\\\n.*)*{script}(?:.*\\\n)*.*)$', PAGE, re.M)
    return shlex.split(found.replace('\\\n', ' '))


def command(script: str, p: int, method: str) -> list[str]:
    """The page's command, for p ranks and a method."""
    return [
        {'4': str(p), 'pipedream-2bw': method}.get(word, word) for word in words_of_page(script)
    ]


def started(argv, metrics):
    """What a command prints, its exit code, and the lines that it has written to `metrics`."""
    more = ['--metrics-file', metrics, *MODEL, '--log-interval', 1000]
    done = forked.run([*TORCHRUN, *argv, *more], cwd=ROOT, env=PATHS)
    return done, [json.loads(line) for line in metrics.read_text().splitlines()]


def losses_of(lines):
    return tuple(line['loss'] for line in lines if 'loss' in line)


@pytest.mark.one_release
@some(
    'method, p', [('pipedream-2bw', 2)], *product(('pipedream-2bw', 'pipedream', 'wpipe'), (2, 4))
)
def test_equal_hashes(ranks, data, tmp_path, method, p):
    """Both commands of the page, and the first one killed in the middle, and resumed."""
    more = ['--data-path', data, '--train-iters', ITERATIONS]
    ours = [*command('pretrain_gpt.py', p, method), *more]
    at = next(index for index, word in enumerate(ours) if str(word).endswith('pretrain_gpt.py'))
    whole = run(ranks(p), *ours[at + 1 :])
    done, lines = started([*command('older_weights.py', p, method), *more], tmp_path / 'formula')
    assert done.returncode == 0, done.stderr
    assert losses_of(lines) == whole.losses
    assert lines[-1] == {
        'parameters_sha256': whole.parameters,
        'optimizer_sha256': whole.optimizer,
    }

    saving = ['--save', tmp_path / 'checkpoints', '--save-interval', INTERVAL]
    where = [p - 1, KILLED, 'forward', 2]
    doomed = [*ours[:at], SUPPORT / 'doomed.py', *where, *ours[at + 1 :], *saving]
    done, lines = started(doomed, tmp_path / 'killed')
    assert done.returncode and 'Signal 9 (SIGKILL)' in done.stderr, done.stderr
    assert losses_of(lines) == whole.losses[: KILLED - 1]
    after = run(ranks(p), *ours[at + 1 :], '--load', tmp_path / 'checkpoints')
    require_same(after, whole, INTERVAL)


# ---- In NVIDIA's loop, unedited.


BASE = f"""--pipeline-model-parallel-size 2 --num-layers 2 --train-iters 5 --clip-grad 0.5
    --global-batch-size 2 --log-interval 4 --split 90,10,0 --eval-iters 1 --eval-interval 2
    {UNTIED}""".split()


@dataclass(frozen=True)
class WeightsByHand:
    """Puts weights of a method before each forward and backward of Megatron's 1F1B. Gives losses of
    evaluations."""

    method: str

    @contextmanager
    def __call__(self, training: Any) -> Iterator[list[str]]:
        from megatron.core import parallel_state
        from megatron.core.num_microbatches_calculator import get_num_microbatches

        get, hands = training.get_forward_backward_func, []

        def get_forward_backward_func(*args: Any, **named: Any) -> Any:
            original = get(*args, **named)

            def forward_backward(**given: Any) -> Any:
                if given.get('forward_only'):
                    return original(**given)
                if not hands:
                    p = parallel_state.get_pipeline_model_parallel_world_size()
                    stage = parallel_state.get_pipeline_model_parallel_rank()
                    model = given['model']
                    models = model if isinstance(model, list) else [model]
                    hands.append(BY.get(self.method, ByHand)(self.method, p, stage, models))
                hands[0].keep()
                with hands[0].batch(get_num_microbatches()):
                    return original(**given)

            return forward_backward

        mine = mock.patch.object(training, 'get_forward_backward_func', get_forward_backward_func)

        def clip(made: Any) -> None:
            if self.method != 'pipedream-2bw':
                clip_by_stage(made[1], sharded=False)

        clips = events.after((training, 'setup_model_and_optimizer', clip))
        with events.evaluations(training) as losses, mine, clips:
            yield losses


@contextmanager
def finished(training: Any) -> Iterator[tuple[list[str], list[str]]]:
    """Takes the step that is begun at the end, before parameters are read. Gives losses of
    evaluations, and collectives that the last iteration waited for."""
    with events.evaluations(training) as losses, events.waits(training) as waited:
        yield losses, waited
    assert enabled.plugin is not None
    enabled.plugin.finish_step()


@needs_training
@supports("NVIDIA's loop: asynchronous, beside 1F1B with weights put in by hand", '{method}')
@some('method', METHODS[:2], *METHODS[2:])
def test_nvidias_loop(ranks, method):
    """Losses, evaluations, parameters and optimizer state to the bit; clipping is active. The loop
    waits for no other rank in the last iteration."""
    flags, chunks = BASE, []
    if method == 'wpipe':
        flags = [*BASE, '--num-layers', 4]
        chunks = ['--num-virtual-stages-per-pipeline-rank', 2]
    ours = nvidia.run(ranks(2), *flags, '--pipeline-schedule', method, event=finished)
    reference = nvidia.run(ranks(2), *flags, *chunks, event=WeightsByHand(method))
    require_same(ours, reference)
    assert [each for each, _ in ours.reported] == list(reference.reported)
    assert [waits for _, waits in ours.reported] == [[], []]
    assert all(float.fromhex(norm) > 0.5 for norm in reference.grad_norms.values())


@needs_training
def test_norms_of_parameters_are_of_the_newest_weights(ranks):
    """Which are taken behind the call then, and not within the next."""
    flags = [*BASE, '--log-params-norm', '--train-iters', 3]
    ours = nvidia.run(ranks(2), *flags, '--pipeline-schedule', 'pipedream-2bw')
    reference = nvidia.run(ranks(2), *flags, event=WeightsByHand('pipedream-2bw'))
    assert ours.param_norms == reference.param_norms and ours.losses == reference.losses
    assert len({*ours.param_norms.values()}) > 2
