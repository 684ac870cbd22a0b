"""Copies of activations on recorded streams, and the page-locked memory that they go to."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from recorded import device

from megatron_zbpp.runtime.activations import host_memory
from megatron_zbpp.runtime.activations.bundle import SavedActivations
from megatron_zbpp.runtime.activations.copies import Copies
from megatron_zbpp.runtime.activations.store import ActivationStore

DEVICE = torch.device('cuda', 0)
ONES = 2**18
BOTH_WAYS = 2  # streams of copies
_unlock = host_memory._unlock


def leaving(say=None):
    """A store, and the loss of a forward that is to leave by it."""
    store = ActivationStore(DEVICE, say, small=1)
    received = torch.ones(ONES, device=DEVICE).requires_grad_()
    with store.packing((0, 0, 0), received):
        loss = received.exp().sum()
    return store, received, loss


@pytest.mark.on_device
def test_a_refusal_names_the_cure_and_is_forgotten():
    """CUDA tells an error to who starts a kernel next, which is none of ours."""
    said = []
    store, received, loss = leaving(said.append)
    with device.refusing(2):
        store.begin_out((0, 0, 0))
    store.bundles[0, 0, 0].leave()
    assert not store.away
    with store.during_backward((0, 0, 0)):
        loss.backward()
    assert torch.equal(received.grad.cpu(), torch.ones(ONES).exp())
    (message,) = said
    assert '2.0 MiB of host memory cannot be page-locked (CUDA error 2)' in message
    assert message.endswith('or offload fewer chunks')


@pytest.mark.parametrize('sound', [True, False])
@pytest.mark.on_device
def test_memory_is_unlocked_before_it_is_freed(sound):
    """Behind its copies; at once is a seeded race."""
    at_once = mock.patch.object(host_memory, '_unlock', lambda cuda, at, _: _unlock(cuda, at, ()))
    with device.recording() as order, nullcontext() if sound else at_once:
        store, received, loss = leaving()
        store.begin_out((0, 0, 0))
        store.bundles[0, 0, 0].leave()
        assert store.away and not device.look(order).waits
        (nbytes,) = order.locked.values()
        assert nbytes >= received.nbytes
        store.bundles[0, 0, 0].begin_back()
        with store.during_backward((0, 0, 0)):
            loss.backward()
        assert device.look(order).locked, 'it is for what leaves next'
        del store, loss
        assert not device.look(order).locked
    assert [wait.what for wait in order.waits] == ['stream.synchronize'] * BOTH_WAYS * sound
    assert bool(order.races) != sound
    assert all('free for unlock on the host' in str(race) for race in order.races)


@pytest.mark.on_device
def test_memory_that_is_too_small_is_unlocked_between_iterations():
    """Not before: copies may be under way, and a driver may wait for the whole device."""
    with device.recording() as order:
        engine = Copies(DEVICE)
        for size in (100, 150):
            engine.free(engine.out([engine.allocate(100 * size)])[0])
        assert len(device.look(order).locked) == 2 and not order.waits
        engine.finish()
        (nbytes,) = device.look(order).locked.values()
        assert nbytes >= 15000 and len(order.waits) == BOTH_WAYS
    assert not order.races


@pytest.mark.on_device
def test_copies_in_both_directions_at_once():
    """What comes back, which the passes wait for, is there whether or not what leaves has left."""
    with device.recording() as order:
        engine = Copies(DEVICE)
        first, second, back = (engine.allocate(2048) for _ in '123')
        left, written = engine.out([first])
        engine.wait(written)
        slab, _ = engine.out([second])
        engine.wait(engine.back(left, [back]))
        assert not device.look(order).races and not order.waits
        device.launch('a pass', [], [slab])
    (race,) = map(str, order.races)
    assert race.startswith('a pass on stream 0') and 'wait for copy to the host' in race


@pytest.mark.parametrize('sound', [True, False])
@pytest.mark.on_device
def test_memory_of_the_host_is_used_again_behind_what_has_read_it(sound):
    with device.recording() as order:
        engine = Copies(DEVICE)
        storage = engine.allocate(2048)
        left, written = engine.out([storage])
        engine.wait(written)
        engine.back(left, [storage])  # nobody waits for it, as where an iteration is dropped
        if not sound:
            engine._read.clear()
        again, _ = engine.out([engine.allocate(2048)])
        assert again is left
    assert bool(order.races) != sound
    assert all('does not wait for copy to the device' in str(race) for race in order.races)


@pytest.mark.on_device
def test_nothing_to_copy_locks_nothing():
    """Nor is anything said: a driver refuses to lock no bytes."""
    with device.recording() as order:
        engine = Copies(DEVICE)
        slab, mark = engine.out([])
        engine.wait(mark)
        engine.free(slab)
    assert order.page_locked == []


@pytest.mark.on_device
def test_copies_beside_the_passes_are_in_order():
    """Each use of memory comes behind the copy or the pass before it."""
    with device.recording() as order:
        bundle = SavedActivations(Copies(DEVICE), frozenset(), small=1)
        received = torch.ones(64, device=DEVICE).requires_grad_()
        bundle.take(received)
        with torch.autograd.graph.saved_tensors_hooks(bundle.pack, bundle.unpack):
            loss = (received.exp() * received).sum()
        bundle.begin_out()
        bundle.leave()
        assert bundle.away
        bundle.begin_back()
        loss.backward()
        bundle.drop()
        (locked,) = device.look(order).locked.values()
        assert locked >= bundle.bytes.moved > 0
    assert not order.races and not order.waits
    assert torch.equal(received.grad.cpu(), 2 * torch.ones(64).exp())
