"""S and T on real ranks: collectives begin in the program's order, and who takes them waits."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from programs import pairs
from stages import message_of
from test_nccl import MODES
from vocabulary import CPU, executor, reference, split_1f1b

from devtools import nccl
from megatron_zbpp.analysis.lowering import lower
from megatron_zbpp.analysis.program import Exchange
from megatron_zbpp.ir import Pass
from megatron_zbpp.runtime.channels import Channels, Message
from megatron_zbpp.runtime.clock import HostClock
from megatron_zbpp.runtime.collectives import Collectives
from megatron_zbpp.runtime.executor import Executor
from megatron_zbpp.runtime.weight_grads import WeightGradStore


def train(p, m):
    run, stage, shard = executor(split_1f1b(p, m))
    return made_by(run.run(), stage, shard)


def made_by(record, stage, shard):
    losses = [each.item() for each in shard.losses]
    return record.passes, losses, [w.grad for w in stage.parameters()], shard.gradient


def require_right(p, m, results):
    losses, gradients, words = reference(p, m)
    for rank, (passes, made, grads, _) in enumerate(results):
        assert tuple(passes) == split_1f1b(p, m).passes[rank]
        assert made == pytest.approx(losses, rel=1e-5)
        for found, expected in zip(grads, gradients[rank], strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    found = torch.cat([each[-1] for each in results])
    torch.testing.assert_close(found, words, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('p', [4, pytest.param(2, marks=pytest.mark.full)])
def test_losses_and_gradients_are_those_of_one_process(ranks, p):
    require_right(p, 6, ranks(p).run(train, p, 6))


def train_on_nccl(p, m, mode):
    with nccl.Device(**MODES[mode]) as device:
        schedule = split_1f1b(p, m)
        pipeline, group = (dist.new_group(backend=nccl.NAME) for _ in range(2))
        channels = Channels(pipeline, pairs(lower(schedule)), CPU)
        run, stage, shard = executor(schedule, channels, group, named=device.passing)
        record = run.run()
        device.synchronize()
    return made_by(record, stage, shard)


@pytest.mark.parametrize(
    'mode',
    ['both', *(pytest.param(mode, marks=pytest.mark.full) for mode in MODES if mode != 'both')],
)
def test_it_ends_whatever_nccl_makes_wait(ranks, mode):
    require_right(4, 6, ranks(4).run(train_on_nccl, 4, 6, mode))


def test_without_a_group_for_them_collectives_are_refused():
    program, store = lower(split_1f1b(2, 2))[0], WeightGradStore()
    actions = {'S': print, 'T': print}
    with pytest.raises(NotImplementedError, match=r'^broadcast\(hidden for 2S0\) is a collective'):
        Executor(program, {}, None, message_of(), store, HostClock(), actions=actions)


class Failing(Exception):
    """An error in what a rank contributes."""


@pytest.mark.on_ranks(2)
def test_an_error_beside_the_passes_is_raised_by_whoever_comes_next():
    own = (Pass('S', 2, 0), Pass('S', 3, 0))
    gather = Exchange('all-gather', 'statistics', None, own, own)
    reduce = Exchange('reduce', 'vocabulary', 1, own, own[1:], after='statistics')
    message = Message((2,), torch.float32, CPU)
    collectives = Collectives(dist.new_group(), (0, 1), CPU, {'vocabulary': (message,)})
    collectives.begin(gather, torch.ones(2))

    def part(gathered):
        raise Failing(len(gathered))

    reduced = collectives.begin(reduce, part)
    for late in (reduced.wait, lambda: collectives.begin(gather, torch.ones(2))):
        with pytest.raises(Failing, match='2'):
            late()


@pytest.mark.on_ranks(2)
def test_memory_of_a_collective_is_let_go_of_with_a_later_result():
    """Not at the end of the iteration: each holds hidden states."""
    own = (Pass('S', 2, 0), Pass('S', 3, 0))
    gather = Exchange('all-gather', 'statistics', None, own, own)
    collectives = Collectives(dist.new_group(), (0, 1), CPU, {})
    results = [collectives.begin(gather, torch.full((1,), float(k))) for k in range(3)]
    assert [each.item() for each in results[1].wait()] == [1, 1]
    assert len(collectives._open) == 1
    collectives.finish()
    assert not collectives._open


@pytest.mark.on_ranks(2)
def test_who_broadcasts_does_not_wait_for_the_others():
    maker, takers = (Pass('F', 1, 0),), (Pass('S', 2, 0), Pass('S', 3, 0))
    broadcast = Exchange('broadcast', 'hidden', 0, maker, takers)
    message = Message((2,), torch.float32, CPU)
    collectives = Collectives(dist.new_group(), (0, 1), CPU, {'hidden': (message,)})
    root, start, begun = dist.get_rank() == 0, collectives._lane.start, []

    def started(job):
        begun.append(start(job))
        return pytest.fail if root else begun[0]

    with mock.patch.object(collectives._lane, 'start', started):
        sent = collectives.begin(broadcast, torch.ones(2) if root else None)
    assert sent.wait().tolist() == [1, 1]
    begun[0]()
