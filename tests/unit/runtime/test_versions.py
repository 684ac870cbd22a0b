"""Versions of weights, and the calls that number them, without a pipeline."""

from typing import cast

import pytest
import torch

from megatron_zbpp import Pass
from megatron_zbpp.ir import chain
from megatron_zbpp.runtime.endless import EndlessTraining
from megatron_zbpp.runtime.executor import Executor
from megatron_zbpp.runtime.versions import Corrected, OneStorage
from megatron_zbpp.techniques.updates.calls import calls_of
from megatron_zbpp.techniques.updates.orders import without_flush
from megatron_zbpp.techniques.updates.versions import Updates, updating


def backward(j):
    return Pass('BW', 0, j)


def test_calls_have_one_step():
    calls = calls_of(without_flush('endless', updating(chain(2), 2), 2))
    training = EndlessTraining()
    assert training.step(lambda: 'no call yet') == 'no call yet'
    training.begin(Updates(2), lambda: OneStorage([torch.zeros(1)]))
    first = training.next_tables(calls, 0)
    with pytest.raises(ValueError, match=r'0 optimizer steps in 1 calls: .* step once after each'):
        training.next_tables(calls, 0)
    assert training.step(lambda: training.step(lambda: 'inner')) == 'inner'
    with pytest.raises(ValueError, match='a second optimizer step behind call 1'):
        training.step(lambda: None)
    training.enter(cast(Executor, object()))
    second = training.next_tables(calls, 0)
    assert [str(p) for p in first.passes] == ['0F0', '0F1', '0BW0', '0F2', '0BW1']
    assert [str(p) for p in second.passes] == ['0F3', '0BW2', '0F4', '0BW3']


@pytest.mark.parametrize('steps', [0, 1, 2])
def test_a_training_that_goes_on_corrects_as_the_one_that_ended(steps):
    """What is kept of it, and the newest weights, are all that there is."""
    by = [2.0, 1.0, -3.0]

    def step(weight, versions, amounts):
        for amount in amounts:
            versions.step(lambda amount=amount: weight.data.add_(amount))

    whole, ended = torch.full((1,), 4.0), torch.full((1,), 4.0)
    versions, other = (Corrected([w], [w], every=2, ahead=4, decay=0.25) for w in (whole, ended))
    step(whole, versions, by)
    step(ended, other, by[:steps])
    resumed = ended.clone()
    loaded = {name: {id(resumed): kept[id(ended)]} for name, kept in other.kept().items()}
    going_on = Corrected([resumed], [resumed], 2, 4, 0.25, loaded)
    step(resumed, going_on, by[steps:])
    for each in (versions, going_on):
        each.before_backward(backward(0))
    assert torch.equal(whole, resumed) and whole.item() != 4.0


def test_steps_of_a_training_that_goes_on():
    """Its warm-up is over where the one that ended had it behind it."""
    training = EndlessTraining(warm_up=2)
    training.resume(5)
    assert not training.warms_up() and training.steps == 5
    training.resume(1)
    assert training.warms_up() and training.steps == 2 and not training.warms_up()
