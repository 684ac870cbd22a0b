"""Values of weights are compared behind the first early steps, and now and then: counted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_zbpp.mcore.optimizer import entry_check
from megatron_zbpp.mcore.settings import Settings
from megatron_zbpp.post_validation import watch


@pytest.mark.parametrize(
    ('every', 'later'), [(0, []), (1, list(range(10, 40))), (10, [10, 20, 30]), (15, [15, 30])]
)
def test_steps_behind_which_values_are_compared(every, later):
    session = SimpleNamespace(settings=Settings(post_validation=1, check_interval=every))
    watching_ = entry_check.Watching(session)
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
    looking = watch.Watch(watch.Watched([module]), hashed, entry_check.unseen_by_autograd)
    looking.changes()
    looking.differ()
    tensors = [*module.parameters(), *module.buffers()]
    assert len(counted) == 2 * len(tensors) * hashed
