"""Versions of weights, and the calls that number them, without a pipeline."""

from datetime import timedelta
from typing import cast

import pytest
import torch
import torch.distributed as dist

from megatron_zbpp import Pass
from megatron_zbpp.ir import chain
from megatron_zbpp.runtime import compat
from megatron_zbpp.runtime.endless import EndlessTraining
from megatron_zbpp.runtime.executor import Executor
from megatron_zbpp.runtime.versions import Corrected, OneStorage, Slots
from megatron_zbpp.techniques.updates.calls import calls_of
from megatron_zbpp.techniques.updates.orders import without_flush
from megatron_zbpp.techniques.updates.versions import Updates, updating


def forward(j):
    return Pass('F', 0, j)


def backward(j):
    return Pass('BW', 0, j)


def test_weights_of_forwards_and_backwards():
    weight = torch.zeros(1, requires_grad=True)
    versions = Slots([weight], 1, None)

    def step():
        weight.data += 1
        return 'stepped'

    graphs = []
    for j in range(3):
        versions.before_forward(forward(j))
        graphs.append((weight * weight).sum())
        assert versions.step(step) == 'stepped'
        assert weight.item() == j + 1
    assert versions.most == 4
    for j, graph in enumerate(graphs):
        weight.grad = None
        versions.before_backward(backward(j))
        graph.backward()
        assert weight.grad is not None and weight.grad.item() == 2 * j
    # version 1 is what version 0 was; forwards of batch b have version b-1
    weight = torch.zeros(1)
    versions = Slots([weight], 2, 1)
    seen = []
    for batch, by in enumerate((0, 1, 1, 1)):
        for j in (2 * batch, 2 * batch + 1):
            versions.before_forward(forward(j))
            seen.append(weight.item())
            versions.before_backward(backward(j))
        versions.step(lambda by=by: weight.data.add_(by))
    assert seen == [0, 0, 0, 0, 0, 0, 1, 1]
    assert versions.most == 2


def test_one_storage_is_stepped_unseen():
    weight = torch.ones(1, requires_grad=True)
    versions = OneStorage([weight])
    graph = (weight * weight).sum()

    @torch.no_grad()
    def step():
        weight.mul_(3)

    versions.step(step)
    graph.backward()
    assert weight.grad is not None and weight.grad.item() == 6


def test_forwards_that_run_again_have_the_versions_that_they_had():
    """With other numbers behind a restart, and in batches of another size."""
    weight = torch.zeros(1)
    versions = Slots([weight], 2, None, ahead=3)
    seen = []

    def run(j):
        versions.before_forward(forward(j))
        seen.append(int(weight))

    for j in range(5):
        run(j)
    for batch in range(2):
        for j in (2 * batch, 2 * batch + 1):
            versions.before_backward(backward(j))
        versions.step(lambda: weight.data.add_(1))
        run(2 * batch + 5)
        run(2 * batch + 6)
    in_flight = seen[4:7]
    versions.restart(2, 2)
    del seen[:]
    for j in range(3):
        run(j)
    assert seen == in_flight == [0, 1, 1]
    versions.restart(2, 3)
    del seen[:]
    for j in range(4):
        run(j)
    assert seen == [1, 1, 1, 2]


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


def test_steps_of_buffers_are_copied_out_of_them():
    """The optimizer writes to its buffer, wherever parameters are pointed to."""
    buffer = torch.zeros(2)
    weight = buffer[:1]
    versions = Slots([weight], 1, None, buffered=True)
    versions.before_forward(forward(0))
    versions.step(lambda: buffer.add_(1))
    assert weight.item() == 1 and versions.most == 2
    versions.before_backward(backward(0))
    assert weight.item() == 0
    versions.before_forward(forward(1))
    versions.step(lambda: buffer.add_(5))
    assert weight.item() == 6
    versions.before_backward(backward(1))
    assert weight.item() == 1
    versions.close()
    buffer.add_(1)
    assert weight.item() == 7, 'parameters end in the memory that their optimizer knows'


def test_a_step_that_is_taken_when_its_weights_are_needed():
    """The first at once; of the next, the result is that of the one before until it is taken."""
    weight, stepped = torch.zeros(1), []
    training = EndlessTraining(late=True)
    calls = calls_of(without_flush('endless', updating(chain(1), 1, delays=(1,)), 1))

    def begin(call: int):
        def take() -> int:
            stepped.append(call)
            weight.data += 1
            return call

        return lambda: take

    updates = Updates(1, delays=(1,))
    versions = training.begin(
        updates, lambda: Slots([weight], 1, 1, finish_step=training.finish_step)
    )
    for call in range(3):
        training.next_tables(calls, 0)
        if not call:
            training.enter(cast(Executor, object()))
        versions.before_forward(forward(call))
        assert weight.item() == max(call - 1, 0)
        versions.before_backward(backward(call))
        assert training.step(lambda: -1, begin(call)) == max(call - 1, 0)
        assert stepped == list(range(max(call, 1)))
        assert training.unfinished == (call > 0)
    versions.before_forward(forward(3))  # of call 4, ahead
    assert stepped == [0, 1] and weight.item() == 2
    training.finish_step()
    assert stepped == [0, 1, 2] and weight.item() == 3
    assert versions.most == 2


def test_backwards_on_corrected_weights():
    """By the formula of the paper; forwards and steps have the newest."""
    weight = torch.full((1,), 4.0)
    versions = Corrected([weight], [weight], every=1, ahead=2, decay=0.25)
    for by, corrected in ((0.0, 4.0), (2.0, 6 - 2 * 1.0), (1.0, 7 - 2 * (0.5 + 0.5))):
        versions.step(lambda by=by: weight.data.add_(by))
        newest = weight.item()
        versions.before_backward(backward(0))
        assert weight.item() == corrected
        versions.before_backward(backward(1))
        assert weight.item() == corrected
        versions.before_forward(forward(2))
        assert weight.item() == newest
        versions.before_backward(backward(2))
    # the average goes on; from then on forwards are fewer steps late
    weight = torch.full((1,), 4.0)
    versions = Corrected([weight], [weight], every=1, ahead=2, decay=0.25)
    versions.step(lambda: weight.data.add_(2.0))
    versions.before_backward(backward(0))
    versions.restart(batch=1, every=2)
    assert weight.item() == 6
    versions.before_backward(backward(0))
    assert weight.item() == 6 - 1 * 1.0
    versions.step(lambda: weight.data.add_(2.0))
    versions.before_backward(backward(2))
    assert weight.item() == 8 - 1 * (0.25 * 1 + 0.75 * 2)


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


# ---- What torch keeps to itself is in the installed release, and does what we take it to do.


@pytest.fixture
def alone(tmp_path):
    """A world of one rank."""
    store = dist.FileStore(str(tmp_path / 'store'), 1)
    dist.init_process_group('gloo', store=store, rank=0, world_size=1, timeout=timedelta(seconds=9))
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_backward_and_profiler():
    leaf = torch.ones(3, requires_grad=True)
    root = (2 * leaf).sum()
    compat.run_backward((root,), (torch.ones(()),), False, False, (), True, accumulate_grad=True)
    assert leaf.grad.tolist() == [2, 2, 2]
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
