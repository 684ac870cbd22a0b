"""The first iteration in parallel: it changes no bit, and no rank waits for another in it."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import commands
import pytest
from example import MODEL, forget_groups
from grids import grid
from nvidia import needs_training, run
from paths import ROOT
from supported import supports
from test_launch import DISTRIBUTED, LLAMA, MOE, OVERLAP

from megatron_zbpp.mcore.iteration import prewarm

DROPOUT = ['--hidden-dropout', 0.1, '--attention-dropout', 0.1]
BIAS = ['--moe-router-enable-expert-bias', '--moe-router-score-function', 'sigmoid']
UNTIED = ['--untie-embeddings-and-output-weights']
ROPE = ['--position-embedding-type', 'rope']
EARLY = ['--enable-optimizer-post-validation', '--optimizer-post-validation-clean-steps', 0]
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
    'vocabulary': (
        2,
        ['--pipeline-vocab-parallel', 'output', *UNTIED],
    ),
    'offload': (2, ['--pipeline-offload', 'all']),
    'two-way': (4, ['--pipeline-schedule', 'chimera-zb']),
    'recompute': (2, ['--pipeline-recompute', 'all', *DROPOUT]),
}  # fmt: skip


@contextlib.contextmanager
def counting(training):
    """Counts forwards of the chunks of this rank in the first iteration."""
    from megatron.core.pipeline_parallel import schedules

    counts, original, log = [0], schedules.forward_step, training.training_log

    def forward_step(*args, **kwargs):
        counts[-1] += 1
        return original(*args, **kwargs)

    def training_log(*args, **kwargs):
        counts.append(0)
        return log(*args, **kwargs)

    with (
        mock.patch.object(schedules, 'forward_step', forward_step),
        mock.patch.object(training, 'training_log', training_log),
    ):
        yield counts


@needs_training
@supports('first iteration prepared in parallel: {case}')
@grid(schedule=('zb-v', 'zb-h1'), case=tuple(CASES))
def test_changes_nothing(ranks, schedule, case):
    """Losses, norms, parameters and optimizer state are those of the same schedule without it."""
    p, flags = CASES[case]
    require_no_change(ranks(p), '--pipeline-schedule', schedule, *flags, batch=3 * p)


@needs_training
@supports('first iteration prepared in parallel: FP8 with delayed scaling', 'zb-v')
@pytest.mark.te
def test_scales_of_fp8(te_ranks):
    flags = ['--transformer-impl', 'transformer_engine', '--bf16', *ROPE, '--fp8-format', 'hybrid']
    flags += ['--fp8-recipe', 'delayed', '--pipeline-schedule', 'zb-v']
    require_no_change(te_ranks(2), *flags, batch=6)


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
    ('calls', 'shape', 'config', 'why'),
    [
        (None, (1,), {'cuda_graph_impl': 'none'}, None),
        (3, (1,), {}, 'an asynchronous schedule has no first microbatch of its own'),
        (None, None, {}, 'shapes vary from microbatch to microbatch'),
        (None, (1,), {'cuda_graph_impl': 'local'}, 'CUDA graphs are captured in it'),
        (None, (1,), OFFLOADING, "Megatron's offloading measures it"),
    ],
)
def test_what_is_left_out(calls, shape, config, why):
    """With what the log says of it."""
    lowered, messages = SimpleNamespace(calls=calls), [SimpleNamespace(shape=shape)]
    executors = SimpleNamespace(lowered=lowered, messages=messages)
    assert prewarm._obstacle(executors, SimpleNamespace(**config)) == why


def first_calls(argv, prewarm, seconds):
    """Trains one iteration on each rank; whether its first forward began beside all others'."""
    import pretrain_gpt
    import torch.distributed as dist

    import megatron_zbpp

    args = pretrain_gpt.parse_args(argv)
    store, met = dist.distributed_c10d._get_default_store(), []
    name = f'first calls {prewarm}'

    def meeting(original):
        def forward_step(*given):
            if not met:
                store.add(name, 1)
                store.set(f'{name} {dist.get_rank()}', '')
                others = [f'{name} {rank}' for rank in range(dist.get_world_size())]
                try:
                    store.wait(others, timedelta(seconds=seconds))
                    met.append(True)
                except dist.DistStoreError:
                    met.append(False)
            return original(*given)

        return forward_step

    with megatron_zbpp.enable(args.pipeline_schedule, prewarm=prewarm):
        pretrain_gpt.initialize(args)
        models = pretrain_gpt.build_model(args)
        pretrain_gpt.build_optimizer(args, models)
        data = pretrain_gpt.iterators(args, pretrain_gpt.build_datasets(args)[0], 0)
        with mock.patch.object(pretrain_gpt, 'forward_step', meeting(pretrain_gpt.forward_step)):
            pretrain_gpt.run_batch(args, models, data)
    forget_groups()
    return met


def test_all_ranks_begin_at_once(ranks, data):
    """Each rank's first forward waits there for those of all: only without messages can it end."""
    argv = [*MODEL, '--num-layers', 8, '--pipeline-model-parallel-size', 4, '--data-path', data]
    argv = [*map(str, argv), '--pipeline-schedule', 'zb-v', '--global-batch-size', '4']
    assert ranks(4).run(first_calls, argv, True, 100) == [[True]] * 4
    assert [False] in ranks(4).run(first_calls, argv, False, 1), 'that nothing is prepared is seen'


def failing_first(argv):
    """Trains on each rank with a chunk that fails when it first runs; returns the error."""
    import pretrain_gpt

    import megatron_zbpp

    def forward_step(*given):
        raise ZeroDivisionError('a kernel that is not there')

    args = pretrain_gpt.parse_args(argv)
    try:
        with megatron_zbpp.enable(args.pipeline_schedule, prewarm=True):
            pretrain_gpt.initialize(args)
            models = pretrain_gpt.build_model(args)
            data = pretrain_gpt.iterators(args, pretrain_gpt.build_datasets(args)[0], 0)
            with mock.patch.object(pretrain_gpt, 'forward_step', forward_step):
                pretrain_gpt.run_batch(args, models, data)
    except RuntimeError as error:
        return str(error)
    finally:
        forget_groups()


def test_failing_inside(ranks, data):
    argv = [*MODEL, '--num-layers', 4, '--pipeline-model-parallel-size', 2, '--data-path', data]
    argv = [*map(str, argv), '--pipeline-schedule', 'zb-v', '--global-batch-size', '4']
    for said in ranks(2).run(failing_first, argv):
        assert 'ZeroDivisionError: a kernel that is not there' in said
        assert '--no-pipeline-prewarm' in said


FAILING = """
import functools
import os

import megatron_zbpp
import pretrain_gpt

trains = pretrain_gpt.forward_step


def forward_step(*given):
    if os.environ['RANK'] == '1':
        raise ZeroDivisionError('a kernel that is not there')
    return trains(*given)


pretrain_gpt.forward_step = forward_step
megatron_zbpp.enable = functools.partial(megatron_zbpp.enable, prewarm=True)
pretrain_gpt.main()
"""


def test_one_rank_that_fails_inside_ends_all(tmp_path, data):
    """The other has run its chunks and waits for the first message of the iteration."""
    script = tmp_path / 'failing.py'
    script.write_text(FAILING)
    argv = [*MODEL, '--num-layers', 4, '--pipeline-model-parallel-size', 2, '--data-path', data]
    argv += ['--pipeline-schedule', 'zb-v', '--global-batch-size', 4, '--train-iters', 2]
    torchrun = [sys.executable, '-m', 'torch.distributed.run', '--standalone']
    paths = os.pathsep.join(map(str, (ROOT, ROOT / 'examples' / 'gpt')))
    command = [*torchrun, '--nproc-per-node', 2, script, *argv]
    done = commands.run(command, env={'PYTHONPATH': paths}, timeout=100)
    assert done.returncode
    assert done.stderr.count('ZeroDivisionError: a kernel that is not there. If they work') == 1
    assert '--no-pipeline-prewarm' in done.stderr


def held_gradients(argv):
    """Trains one iteration on each rank on gradients that are there already; forwards that ran."""
    import pretrain_gpt

    import megatron_zbpp

    args, forwards = pretrain_gpt.parse_args(argv), []
    original = pretrain_gpt.forward_step

    def forward_step(*given):
        forwards.append(None)
        return original(*given)

    with megatron_zbpp.enable(args.pipeline_schedule, prewarm=True):
        pretrain_gpt.initialize(args)
        models = pretrain_gpt.build_model(args)
        for model in models:
            for parameter in model.parameters():
                parameter.main_grad.fill_(1)
        data = pretrain_gpt.iterators(args, pretrain_gpt.build_datasets(args)[0], 0)
        with mock.patch.object(pretrain_gpt, 'forward_step', forward_step):
            pretrain_gpt.run_batch(args, models, data)
        kept = all(p.main_grad.min() > -1 for model in models for p in model.parameters())
    forget_groups()
    return len(forwards), kept


def test_gradients_that_are_there_stay(ranks, data):
    argv = [*MODEL, '--num-layers', 4, '--pipeline-model-parallel-size', 2, '--data-path', data]
    argv = [*map(str, argv), '--pipeline-schedule', 'zb-v', '--global-batch-size', '4']
    assert ranks(2).run(held_gradients, argv) == [(8, True)] * 2
