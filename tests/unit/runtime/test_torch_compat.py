"""What torch keeps to itself is in the installed release, and does what we take it to do."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_zbpp.runtime import compat


@pytest.fixture
def alone(tmp_path):
    """A world of one rank."""
    store = dist.FileStore(str(tmp_path / 'store'), 1)
    dist.init_process_group('gloo', store=store, rank=0, world_size=1, timeout=timedelta(seconds=9))
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_backward():
    leaf = torch.ones(3, requires_grad=True)
    root = (2 * leaf).sum()
    compat.run_backward((root,), (torch.ones(()),), False, False, (), True, accumulate_grad=True)
    assert leaf.grad.tolist() == [2, 2, 2]


def test_profiler():
    assert not compat.profiler_enabled()
    with torch.profiler.profile():
        assert compat.profiler_enabled()


@pytest.mark.parametrize('told', [False, True])
def test_writes_that_autograd_does_not_see(told):
    weight = torch.ones(2, requires_grad=True)
    loss = (weight * weight).sum()
    with torch.no_grad():
        if told:
            weight.mul_(3)
            with pytest.raises(RuntimeError, match='inplace operation'):
                loss.backward()
            return
        with compat.unseen_by_autograd((weight,)):
            weight.mul_(3)
    loss.backward()
    assert weight.grad.tolist() == [6, 6]


def test_group(alone):
    compat.default_store().set('said by', 'one')
    assert compat.default_store().get('said by') == b'one'
    options = compat.group_options(alone, torch.device('cpu'))
    assert compat.group_timeout(options) == timedelta(seconds=9)
