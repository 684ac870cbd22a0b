"""What is done on the host before each iteration: as much for many microbatches as for few."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from unittest import mock

import pytest
from models import Job, train

FEW, MANY = 4, 12  # microbatches


def calls(job, argv):
    """Calls of Python functions in the preparation of each iteration, and what is looked through.

    Returns:
        The former, how many chunks' modules, and for how many weights aliases were made.
    """
    from megatron_zbpp.mcore.iteration import forward_backward
    from megatron_zbpp.mcore.layers import delayed_module, transformer_engine

    counts = []
    prepare = forward_backward.prepare

    def counting(*args, **kwargs):
        counts.append(0)
        sys.setprofile(lambda _, event, __: counts.append(counts.pop() + (event == 'call')))
        try:
            return prepare(*args, **kwargs)
        finally:
            sys.setprofile(None)

    with ExitStack() as stack:
        replaced = stack.enter_context
        replaced(mock.patch.object(forward_backward, 'prepare', counting))
        looked, made = (
            replaced(mock.patch.object(owner, name, wraps=getattr(owner, name)))
            for owner, name in (
                (transformer_engine, 'delaying_modules'),
                (delayed_module, 'alias_of'),
            )
        )
        train(job, argv)
        weights = made.call_count
    return counts, looked.call_count, weights


def prepared(ranks, data, job, schedule, microbatches):
    """Of the first rank."""
    argv = [*job.argv(schedule, False, data), '--global-batch-size', str(microbatches)]
    return ranks(job.size).run(calls, job, argv)[0]


@pytest.mark.te
def test_layers_of_transformer_engine(te_ranks, data):
    """What a program and a model tell is looked up once, not in each iteration."""
    job = Job(bf16=True, fused=True, layers=4)
    (few, _, _), (many, looked, weights) = (
        prepared(te_ranks, data, job, 'zb-v', m) for m in (FEW, MANY)
    )
    assert len(many) == len(few) == 4
    assert many[2:] == few[2:], 'later iterations cost the same, however many microbatches'
    assert len({*many[2:]}) == 1
    chunks, modules, a_weight_and_a_bias = 2, job.layers * 4, 2
    assert looked == 2 * chunks, 'once to run them, once to see that the first iteration left none'
    assert weights == modules * a_weight_and_a_bias


def test_layers_of_megatron(ranks, data):
    job = Job(te=False)
    (few, *_), (many, *_) = (prepared(ranks, data, job, 'zb-v', m) for m in (FEW, MANY))
    assert many[2:] == few[2:] and len(few) == 4
