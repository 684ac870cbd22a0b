"""Programs whose forwards may not run twice, or ahead of a step, are refused by name."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import pytest
from models import assert_same, train
from ranks import RankError
from test_vocabulary_training import BOTH, few, train_in_shards


def stepped(how, change, job, argv):
    """Runs on each rank: trains with another forward_step."""
    import pretrain_gpt as script

    with mock.patch.object(script, 'forward_step', change(script.forward_step)):
        return how(job, argv)


def with_own_backward(original):
    def forward_step(*args):
        import torch

        with torch.enable_grad():
            torch.ones(2, requires_grad=True).square().sum().backward()
        return original(*args)

    return forward_step


def with_own_gradient(original):
    """In the loss function."""

    def forward_step(*args):
        import torch

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
        import torch

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
