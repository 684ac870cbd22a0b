"""No parameter is read past its module's hooks: DDP's wait there for what ranks gather."""

from __future__ import annotations

import functools
from dataclasses import replace
from unittest import mock

import pytest
from models import assert_same, train
from nvidia import needs_training, run
from test_launch import DISTRIBUTED, NO_CLIPPING, OVERLAP, PIPELINE
from test_sliced_models import UNTIED
from test_vocabulary_loop import FLAG
from test_vocabulary_training import BOTH, OUTPUT, few, of_ranks, train_in_shards


def arriving_late(original):
    """`run_batch`, with NaN in each parameter until a hook of its module is called.

    In shards of layers again behind each of their calls, as where hooks free what they gather.
    """

    def run_batch(args, models, *rest, **options):
        import torch

        from megatron_zbpp.mcore.techniques.vocabulary_shards import InputShard, OutputShard

        modules = [module for model in models for module in model.modules()]
        values = {p: p.detach().clone() for model in models for p in model.parameters()}
        called = set()

        def arrive(module, *_):
            called.add(module)
            for p in module.parameters(recurse=False):
                p.data.copy_(values[p])

        def leave(module, *_):
            for p in module.parameters(recurse=False):
                p.data.fill_(torch.nan)

        hooks = [module.register_forward_pre_hook(arrive) for module in modules]
        shards = [module for module in modules if isinstance(module, InputShard | OutputShard)]
        hooks += [shard.register_forward_hook(leave) for shard in shards]
        for module in modules:
            leave(module)
        try:
            return original(args, models, *rest, **options)
        finally:
            for hook in hooks:
                hook.remove()
            for module in modules:
                assert module in called or not [*module.parameters(recurse=False)], module
                arrive(module)

    return run_batch


def train_late(how, job, argv):
    import pretrain_gpt as script

    with mock.patch.object(script, 'run_batch', arriving_late(script.run_batch)):
        return how(job, argv)


# schedule, layers on all ranks, whether they are tied, of the job, techniques
CASES = {
    'whole layers': ('zb-v', None, False, {}, {}),
    'experts': ('zb-h1', None, False, {'kind': 'experts'}, {}),
    'output layer': ('1f1b', OUTPUT, False, {}, {'recompute': 'all'}),
    'both': ('zb-h1', BOTH, False, {}, {}),
    'both, sliced': ('zb-v', BOTH, False, {}, {'slices': 4, 'offload': 'all'}),
    'both, tied': ('zb-v', BOTH, True, {}, {}),
}


@pytest.mark.shared
@pytest.mark.parametrize('case', CASES)
def test_hooks_run_before_parameters_are_read(ranks, data, case):
    schedule, layers, tied, of_job, more = CASES[case]
    job = replace(few(), **of_job)
    argv = [*job.argv(schedule, False, data), *([] if tied else UNTIED)]
    how = train
    if layers:
        options = {'slices': None, **more}
        how = functools.partial(train_in_shards, layers, options.pop('slices'), **options)
    late, found = ranks(2).run(train_late, how, job, argv), ranks(2).run(how, job, argv)
    assert_same(*(of_ranks(each, layers) for each in (late, found)), job.iterations)


@needs_training
@pytest.mark.parametrize(
    ('layers', 'schedule'),
    [
        (f'{BOTH}, tied', '1f1b'),
        *(
            pytest.param(layers, schedule, marks=pytest.mark.full)
            for layers in (OUTPUT, BOTH, f'{BOTH}, tied')
            for schedule in ('1f1b', 'zb-h1', 'zb-v')
            if (layers, schedule) != (f'{BOTH}, tied', '1f1b')
        ),
    ],
)
def test_gathers_that_overlap(ranks, layers, schedule):
    """Replicas gather parameters while forwards run: to the bit as where all wait for them."""
    layers, _, tied = layers.partition(', ')
    flags = [*PIPELINE, *NO_CLIPPING, *DISTRIBUTED, *OVERLAP, '--train-iters', 3]
    flags += ['--pipeline-schedule', schedule, FLAG, layers, *([] if tied else UNTIED)]
    assert run(ranks(4), *flags, '--overlap-param-gather') == run(ranks(4), *flags)
