"""Collectives of tensor and sequence parallelism: what a split of the backward adds to Megatron's.
Every layer gathers twice in the forward and four times in the backward: inputs of its two products
that are parallel by columns, for their weight gradients, and gradients of the outputs of the two
that are parallel by rows. What waits for W does so as each rank's own rows, so that W gathers all
four; B needs those of outputs only."""

from collections import Counter
from unittest import mock

import pytest
from collectives import counted
from models import MICROBATCHES, Job, train

from megatron_zbpp.ir import W
from megatron_zbpp.schedules import build

pytestmark = pytest.mark.alone
PP = TP = 2
GATHERED_TWICE = 2  # in a layer: gradients of outputs, which B needs, too


def of_tensor_parallelism(ranks):
    """Whether they are neighbours, as Megatron has them: those of a pipeline are not."""
    return len(ranks) == TP and ranks[1] == ranks[0] + 1


def count(job, argv):
    with counted(of_tensor_parallelism) as found, norms_for_sequence_parallelism():
        train(job, argv)
    return found


def norms_for_sequence_parallelism():
    """In place of Megatron's own, which without apex knows no sequence parallelism."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from specs import SequenceParallelNorm

    def make(cls, config, hidden_size, eps=1e-5, **_):
        return SequenceParallelNorm(config, hidden_size, eps)

    return mock.patch.object(WrappedTorchNorm, '__new__', make)


def collectives(ranks, data, job, schedule):
    argv = [*job.argv(schedule, False, data), '--train-iters', '1']
    return sum(ranks(job.size).run(count, job, argv), Counter())


def added(job, schedule):
    """Gathers that W passes need beside Megatron's, of all ranks."""
    found = build(schedule, PP, MICROBATCHES)
    split = sum(p.kind == W for order in found.passes for p in order)
    layers = job.layers * PP // found.num_stages
    return TP * split * layers * GATHERED_TWICE


def check(ranks, data, job):
    """Each schedule adds what its W passes need, and where B and W are one pass, nothing."""
    theirs = collectives(ranks, data, job, 'megatron')
    assert theirs['reduce-scatter'], 'there is sequence parallelism'
    for schedule in SCHEDULES:
        more = added(job, schedule)
        assert bool(more) == (schedule != '1f1b')
        assert collectives(ranks, data, job, schedule) == theirs + Counter({'all-gather': more})


SCHEDULES = ('1f1b', 'zb-h1', 'dualpipe-v')


@pytest.mark.te
def test_layers_of_transformer_engine(te_ranks, data):
    check(te_ranks, data, Job(tp=TP, pp=PP, bf16=True, fused=True))


def test_layers_of_megatron(ranks, data):
    check(ranks, data, Job(tp=TP, pp=PP, te=False))
