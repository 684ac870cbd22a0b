"""Programs whose forwards may not run twice, or whose parameters arrive by hooks."""

import functools
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from unittest import mock

import pytest
import torch
from grids import some
from models import assert_same, train
from nvidia import needs_training, run
from ranks import RankError
from test_launch import DISTRIBUTED, NO_CLIPPING, OVERLAP, PIPELINE
from test_sliced_models import UNTIED
from test_vocabulary_loop import ALL, FLAG, TIED
from test_vocabulary_training import BOTH, HOSTS, OUTPUT, few, of_ranks, train_in_shards


def stepped(how, change, job, argv):
    """Runs on each rank: trains with another forward_step."""
    import pretrain_gpt as script

    with mock.patch.object(script, 'forward_step', change(script.forward_step)):
        return how(job, argv)


def with_own_backward(original):
    def forward_step(*args):
        with torch.enable_grad():
            torch.ones(2, requires_grad=True).square().sum().backward()
        return original(*args)

    return forward_step


def with_own_gradient(original):
    """In the loss function."""

    def forward_step(*args):
        def loss(losses):
            weight = torch.ones(2, requires_grad=True)
            with torch.enable_grad():
                torch.autograd.grad(weight.square().sum(), weight)
            return loss_function(losses)

        output, loss_function = original(*args)
        return output, loss

    return forward_step


@pytest.mark.parametrize(
    ('change', 'recompute', 'later'),
    [
        (with_own_backward, None, False),
        (with_own_backward, 'all', False),
        (with_own_gradient, None, True),
    ],
)
def test_a_backward_inside_a_forward(ranks, data, change, recompute, later):
    """Through layers of the program's own it runs where each forward runs once, in its turn."""
    job = replace(few(), again=recompute)
    argv = job.argv('zb-h1', later, data)
    refused = pytest.raises(RankError, match='NotImplementedError: a backward inside a forward ')
    with refused if recompute or later else nullcontext():
        trained = ranks(2).run(stepped, train, change, job, argv)
        assert_same(trained, ranks(2).run(train, job, argv), job.iterations)


def with_noise(original):
    """The model gets other tokens each time."""

    def forward_step(data, model, *args):
        def noisy(tokens, *rest, **named):
            return model((tokens + torch.randint(2, tokens.shape)) % 24, *rest, **named)

        return original(data, noisy, *args)

    return forward_step


def test_tokens_of_the_second_call(ranks, data):
    """With the embedding on all ranks forward_step is called twice for each microbatch."""
    job = few()
    how = functools.partial(train_in_shards, BOTH, None)
    with pytest.raises(RankError, match='NotImplementedError: other tokens in the second call'):
        ranks(2).run(stepped, how, with_noise, job, job.argv('zb-h1', False, data))


def arriving_late(original):
    """`run_batch`, with NaN in each parameter until a hook of its module is called. In shards of
    layers again behind each of their calls, as where hooks free what they gather."""

    def run_batch(args, models, *rest, **options):
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
@some('layers, schedule', [(TIED, '1f1b')], *product(ALL, HOSTS))
def test_gathers_that_overlap(ranks, layers, schedule):
    """Replicas gather parameters while forwards run: to the bit as where all wait for them."""
    layers, _, tied = layers.partition(', ')
    flags = [*PIPELINE, *NO_CLIPPING, *DISTRIBUTED, *OVERLAP, '--train-iters', 3]
    flags += ['--pipeline-schedule', schedule, FLAG, layers, *([] if tied else UNTIED)]
    assert run(ranks(4), *flags, '--overlap-param-gather') == run(ranks(4), *flags)
