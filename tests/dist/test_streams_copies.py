"""Copies of activations on recorded streams, and the page-locked memory that they go to."""

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


def leaving(say=None):
    """A store, and the loss of a forward that is to leave by it."""
    store = ActivationStore(DEVICE, say, small=1)
    received = torch.ones(ONES, device=DEVICE).requires_grad_()
    with store.packing((0, 0, 0), received):
        loss = received.exp().sum()
    return store, received, loss


def refused():
    said = []
    store, received, loss = leaving(said.append)
    with device.refusing(2):
        store.begin_out((0, 0, 0))
    store.leave((0, 0, 0))
    assert not store.away
    with store.using((0, 0, 0)):
        loss.backward()
    assert torch.equal(received.grad.cpu(), torch.ones(ONES).exp())
    return said


def test_a_refusal_names_the_cure_and_is_forgotten(cuda):
    """CUDA tells an error to who starts a kernel next, which is none of ours."""
    (message,) = cuda(refused)
    assert '2.0 MiB of host memory cannot be page-locked (CUDA error 2)' in message
    assert message.endswith('or offload fewer chunks')


def unlocked(sound):
    """Waits and races of memory that is unlocked, behind its copies or at once."""
    unlock = (
        host_memory._unlock
        if sound
        else lambda runtime, address, streams: runtime.cudaHostUnregister(address)
    )
    with device.recording() as order, mock.patch.object(host_memory, '_unlock', unlock):
        store, received, loss = leaving()
        store.begin_out((0, 0, 0))
        store.leave((0, 0, 0))
        assert store.away and not device.look(order).waits
        (nbytes,) = order.locked.values()
        assert nbytes >= received.nbytes
        store.begin_back((0, 0, 0))
        with store.using((0, 0, 0)):
            loss.backward()
        assert device.look(order).locked, 'it is for what leaves next'
        del store, loss
        assert not device.look(order).locked
    return [wait.what for wait in order.waits], [*map(str, order.races)]


@pytest.mark.parametrize('sound', [True, False])
def test_memory_is_unlocked_before_it_is_freed(cuda, sound):
    waits, races = cuda(unlocked, sound)
    assert waits == ['stream.synchronize'] * BOTH_WAYS * sound
    assert bool(races) != sound and all('free for unlock on the host' in race for race in races)


def outgrown():
    with device.recording() as order:
        engine = Copies(DEVICE)
        for size in (100, 150):
            engine.free(engine.out([engine.allocate(100 * size)])[0])
        assert len(device.look(order).locked) == 2 and not order.waits
        engine.finish()
        (nbytes,) = device.look(order).locked.values()
        assert nbytes >= 15000 and len(order.waits) == BOTH_WAYS
    assert not order.races


def test_memory_that_is_too_small_is_unlocked_between_iterations(cuda):
    """Not before: copies may be under way, and a driver may wait for the whole device."""
    cuda(outgrown)


def both_ways():
    """A copy out, and one back of what left before, which the stream of the passes waits for."""
    with device.recording() as order:
        engine = Copies(DEVICE)
        first, second, back = (engine.allocate(2048) for _ in '123')
        left, written = engine.out([first])
        engine.wait(written)
        slab, _ = engine.out([second])
        engine.wait(engine.back(left, [back]))
        assert not device.look(order).races and not order.waits
        device.launch('a pass', [], [slab])
    return [*map(str, order.races)]


def test_copies_in_both_directions_at_once(cuda):
    """What comes back is there whether or not what leaves has left."""
    (race,) = cuda(both_ways)
    assert race.startswith('a pass on stream 0') and 'wait for copy to the host' in race


def used_again(sound):
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
    return [*map(str, order.races)]


@pytest.mark.parametrize('sound', [True, False])
def test_memory_of_the_host_is_used_again_behind_what_has_read_it(cuda, sound):
    races = cuda(used_again, sound)
    assert bool(races) != sound
    assert all('does not wait for copy to the device' in race for race in races)


def nothing():
    with device.recording() as order:
        engine = Copies(DEVICE)
        slab, mark = engine.out([])
        engine.wait(mark)
        engine.free(slab)
    return order.page_locked


def test_nothing_to_copy_locks_nothing(cuda):
    """Nor is anything said: a driver refuses to lock no bytes."""
    assert cuda(nothing) == []


def beside_passes():
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


def test_copies_beside_the_passes_are_in_order(cuda):
    """Each use of memory comes behind the copy or the pass before it."""
    cuda(beside_passes)
