"""Asynchronous schedules leave what Megatron's own 1F1B leaves on weights put in by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from grids import grid
from models import Job
from supported import supports
from weights_by_hand import SIZES, Case, require_equal, trained

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
        'words': '--use-distributed-optimizer',
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
    multiple of p, and on gloo mixes messages of two ranks where m is more.
    """
    p, m = sizes
    if method == 'pipemare':
        return sizes != (4, 1) or UNTIED in more
    return {'pipedream-2bw': m >= p - 1, 'wpipe': not m % p and sizes != (2, 4)}.get(method, True)


@pytest.mark.shared
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
    """Whether there is a reference: W is put behind 1F1B's."""
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
@pytest.mark.shared
@supports('asynchronous: {model}', '{method}')
@grid(method=METHODS, model=tuple(TE))
def test_layers_of_transformer_engine(te_ranks, data, method, model):
    """The same by its layers, whose weights are read in each forward, too."""
    own = dict(TE[model])
    words = own.pop('words')
    require_equal(te_ranks, data, case(method, words, job=Job(**own)))


def test_at_rate_zero_all_are_1f1b(ranks, data):
    """Weights do not move: losses, gradients and what the optimizer keeps are those of 1F1B."""
    still = ('--lr', '0', '--min-lr', '0')
    _, *others = METHODS
    stock, interleaved = (
        trained(ranks, data, Case(method, 2, 2, still), True) for method in ('paci', 'wpipe')
    )
    for method in others:
        ours = trained(ranks, data, Case(method, 2, 2, still), False)
        like = interleaved if method == 'wpipe' else stock
        assert [own[:3] for own in ours] == [other[:3] for other in like], method
