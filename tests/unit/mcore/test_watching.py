"""Values of weights are compared behind the first early steps, and now and then: counted."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron_zbpp.mcore.optimizer import early_steps
from megatron_zbpp.mcore.settings import Settings
from megatron_zbpp.post_validation import watch


@pytest.mark.parametrize(
    ('every', 'later'), [(0, []), (1, list(range(10, 40))), (10, [10, 20, 30]), (15, [15, 30])]
)
def test_steps_behind_which_values_are_compared(every, later):
    session = SimpleNamespace(settings=Settings(post_validation=1, check_interval=every))
    watching_ = early_steps.Watching(session)
    found = []
    for step in range(40):
        watching_._steps = step
        if watching_._hashes:
            found.append(step)
    assert found == [*range(10), *later]


@pytest.mark.parametrize('hashed', [False, True])
def test_passes_over_weights(monkeypatch, hashed):
    """None where values are not compared; two where they are."""
    counted = []
    digest = watch.digest
    monkeypatch.setattr(watch, 'digest', lambda t: counted.append(t) or digest(t))
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    looking = watch.Watch(watch.Watched([module]), hashed, early_steps.unseen_by_autograd)
    looking.changes()
    looking.differ()
    tensors = [*module.parameters(), *module.buffers()]
    assert len(counted) == 2 * len(tensors) * hashed


# How much old state an early step keeps, of the memory that there is.


BYTES = {
    'memory_allocated': 7,
    'memory_reserved': 60,
    'max_memory_allocated': 50,
    'mem_get_info': (10, 100),
}


@pytest.mark.parametrize(
    ('share', 'limit', 'expected'), [(1.0, None, 13), (0.5, None, 35), (0.5, 20 / 2**30, 20)]
)
def test_an_early_step_keeps_what_there_is_memory_for(share, limit, expected):
    """Of 63 bytes that are free 56 can be used, and passes have needed 43: those ahead a share."""
    answers = {name: lambda device, value=value: value for name, value in BYTES.items()}
    with mock.patch.object(early_steps, 'KEPT_BYTES', 0):
        with mock.patch.multiple(torch.cuda, **answers):
            assert early_steps.most_kept(torch.device('cuda', 1), share, limit) == expected
        assert early_steps.most_kept(torch.device('cpu'), share, limit) == 0
    assert early_steps.most_kept(torch.device('cpu'), share, None) == early_steps.KEPT_BYTES
