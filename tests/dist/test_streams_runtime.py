"""What the runtime asks of CUDA, and when: on recorded streams nothing waits that need not."""

import multiprocessing
import os
import tempfile
import threading
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from recorded import device

from megatron_zbpp.guests import side_work
from megatron_zbpp.guests.side_work import SideWork
from megatron_zbpp.ir import B, F, Pass
from megatron_zbpp.post_validation import speculative_step, watch
from megatron_zbpp.runtime.activations import copies
from megatron_zbpp.runtime.activations.copies import Copies
from megatron_zbpp.runtime.activations.store import ActivationStore, SavedActivations
from megatron_zbpp.runtime.clock import Record, clock_for
from megatron_zbpp.runtime.compat import unseen_by_autograd
from megatron_zbpp.runtime.guard.activities import Tracker
from megatron_zbpp.runtime.guard.watchdog import EXIT_CODE, Watchdog
from megatron_zbpp.runtime.measure import Iteration
from megatron_zbpp.runtime.weight_grads import WeightGradStore
from megatron_zbpp.schedules import build

pytestmark = pytest.mark.on_device
DEVICE = torch.device('cuda', 0)
GPU = 1  # that the main thread chooses, of which this device is each
WIDTH = 4


@contextmanager
def recording():
    """What is asked of the device, and what the host does with page-locked memory."""
    with device.recording() as order, device.HostUses():
        yield order


def waits(order):
    """What the host has waited for up to now, and in which pass."""
    return [f'{wait.what} in {wait.within or None}' for wait in device.look(order).waits]


@pytest.mark.parametrize('counting', [False, True])
def test_marks_wait_for_nothing(counting):
    """Until their seconds are asked for: then the host waits once, for all of them."""
    with recording() as order:
        clock = clock_for(DEVICE, counting)
        taken = [clock.mark() for _ in range(4)]
        assert not any(map(clock.reached, taken))
        assert not waits(order)
        seconds = list(map(clock.seconds, taken))
        assert waits(order) == ['event.synchronize in None']
        assert seconds == sorted(seconds) and seconds[-1] == pytest.approx(clock.now(), abs=60)
        assert all(map(clock.reached, taken))


def test_a_side_task_looks_at_the_clock_amid_an_iteration():
    """The host waits before a step and behind it, outside of passes; later marks have seconds."""
    first, second = Pass(F, 0, 0), Pass(B, 0, 0)
    times = side_work._Times(
        0, {first: 0.0, second: 9.0}, {first: 0.0, second: 9.0}, 9.0, *[0.0] * 3
    )
    with recording() as order:
        clock, record = clock_for(DEVICE), Record()
        side = SideWork(lambda: torch.ones(WIDTH, device=DEVICE).sum() is None, 1.0)
        side._expected = times
        side.begin(clock, record)
        for p in (first, second):
            side.before(p)
            with device.within(p):
                record.marks.append((clock.mark(), clock.mark()))
                record.passes.append(p)
        spans = Iteration(build('gpipe', 1, 1), None, record, clock).spans()
    assert side.steps == 1 and side.finished and not side.overruns
    assert set(waits(order)) == {'stream.synchronize in None', 'event.synchronize in None'}
    assert not order.races
    (_, end), (start, _) = spans
    assert end <= start


def test_weight_gradients():
    """W on the device: accumulated without a look at them."""
    with recording() as order:
        store = WeightGradStore()
        weight = torch.nn.Parameter(torch.zeros(WIDTH, device=DEVICE))
        for microbatch in range(2):
            store.open((0, microbatch))
            with store.scope((0, microbatch)):
                store.defer([weight], lambda: [torch.ones_like(weight)])
        for microbatch in range(2):
            store.run((0, microbatch))
    assert not order.waits and not order.races
    assert weight.grad.is_cuda and weight.grad.tolist() == [2.0] * WIDTH


def stepped(on, in_place):
    """Parameters that were stepped twice, what the model reads, the optimizer, and the pairs."""
    own = [torch.nn.Parameter(torch.full((WIDTH,), 1.0 + k, device=on)) for k in range(3)]
    read = [None if in_place else torch.zeros_like(p, dtype=torch.bfloat16) for p in own]
    optimizer = torch.optim.Adam(own, lr=0.1)
    for _ in range(2):
        for p in own:
            p.grad = torch.full((WIDTH,), 0.5, device=on)
        optimizer.step()
    pairs = list(
        map(speculative_step.Stepped, own, [None if r is None else r.detach() for r in read])
    )
    return own, read, optimizer, pairs


@pytest.mark.parametrize('kept_bytes', [0, 4096], ids=['nothing kept', 'some kept'])
@pytest.mark.parametrize('in_place', [True, False], ids=['fp32', 'bf16'])
def test_trial_step(in_place, kept_bytes):
    found = []
    for on in ('cpu', DEVICE):
        with recording() as order:
            own, read, optimizer, pairs = stepped(on, in_place)
            trying = speculative_step.SpeculativeStep(
                optimizer, pairs, buffer_bytes=2048, kept_bytes=kept_bytes
            )
            assert bool(trying.kept_bytes) == bool(kept_bytes)
            seen = [p if r is None else r for p, r in zip(own, read, strict=True)]
            tried = [tensor.detach().clone() for tensor in seen]
            trying.undo()
            trying.give_back()
        found.append([[t.tolist() for t in tensors] for tensors in (tried, own)])
        assert not order.waits and not order.races
        assert bool(order.page_locked) == (in_place and on == DEVICE)
    assert found[0] == found[1], 'the same on both'
    assert found[0][0] != found[0][1], 'the speculative step took a step'


def test_plain_memory_in_a_trial_would_be_seen():
    plain = mock.patch.object(speculative_step, '_aside', lambda p: p.detach().to('cpu', copy=True))
    with recording() as order, plain:
        *_, optimizer, pairs = stepped(DEVICE, in_place=True)
        speculative_step.SpeculativeStep(optimizer, pairs, kept_bytes=0).undo()
    directions = ['pageable copy to the host in None', 'pageable copy to the device in None']
    assert waits(order) == [each for each in directions for _ in range(3)]


def stalled(clock):
    """Stands for an executor whose device never comes to the end of its first pass."""
    first = Pass(B, 0, 0)
    return SimpleNamespace(
        program=(first,),
        clock=clock,
        record=Record([first], [(clock.mark(), clock.mark())]),
        current=first,
        awaiting=False,
        channels=SimpleNamespace(leaving=None, ranks=[0]),
        transfers=SimpleNamespace(waits=None),
    )


@pytest.mark.parametrize('sound', [True, False])
def test_each_thread_of_the_watchdog_enters_the_device(sound):
    """A thread starts on GPU 0, where the first question would make a context."""
    ended, codes = threading.Event(), []
    watchdog = Watchdog(timeout=0.2)

    def leave(code):
        watchdog._stopping = True
        codes.append(code)
        ended.set()

    enter = Watchdog._enter_device if sound else lambda self: None
    own = threading.get_ident()
    torch.cuda.set_device(GPU)
    device.asked.clear()
    try:
        with (
            recording() as order,
            device.stalled(),
            errors_to_file() as said,
            mock.patch.object(Watchdog, '_enter_device', enter),
            mock.patch(f'{Watchdog.__module__}._LAST_WORDS', 60),
            mock.patch.object(os, '_exit', leave),
            mock.patch.object(multiprocessing, 'active_children', list),
        ):
            tracker, nothing = Tracker(stalled(clock_for(DEVICE))), lambda: None
            # an iteration that does not end
            passes = SimpleNamespace(ended=nothing, beat=tracker.position, lost=lambda: False)
            passes.standing, passes.waits = tracker.standing, tracker.waits
            with watchdog._watching(passes):
                assert ended.wait(60), 'the watchdog did not see the stall'
            passes.beat = nothing
            watchdog.stop()
            said.seek(0)
            words = said.read().decode()
    finally:
        torch.cuda.set_device(0)
    others = {(thread, gpu) for thread, gpu in device.asked if thread != own}
    threads, gpus = (set(each) for each in zip(*others, strict=True))
    assert len(threads) == 2, 'one looks, the other writes last words'
    assert gpus == ({GPU} if sound else {0})
    assert not order.waits
    assert codes == [EXIT_CODE] and 'B stage 0 microbatch 0' in words


@contextmanager
def errors_to_file():
    """What is written to this process's second file meanwhile."""
    before = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield file
        finally:
            os.dup2(before, 2)
            os.close(before)


@pytest.mark.parametrize('read', ['result', 'root'])
def test_a_reduction_is_read_before_forwards_that_run_ahead_have_ended(read):
    """The host waits for the reduction, and not for what was started behind it."""
    from megatron_zbpp.mcore.optimizer.split_step import Reduction

    with recording() as order:
        begun = torch.full((1,), 4.0, device=DEVICE)
        reduction = Reduction(4.0, dist.ReduceOp.SUM, None, DEVICE)
        before = waits(order)
        assert before == ['pageable copy to the device in None'], 'of its number, to begin with'
        page_locked = list(order.page_locked)
        ahead = begun + 1  # on the stream of the passes
        found = getattr(reduction, read)
        assert float(found(on_host=True) if callable(found) else found) in (2.0, 4.0)
        assert waits(order) == [*before, 'event.synchronize in None'] and not order.races
        assert len(order.page_locked) == len(page_locked) == 1, 'which may wait for the device'
        device.host_use('host', [], [ahead])
    assert order.races, 'what runs ahead need not have ended'


def test_ranks_agree_on_weights_without_waiting_for_passes():
    """Neither where the question is asked, behind forwards that ran ahead, nor at its answer."""
    from megatron_zbpp.mcore.optimizer.early_steps import Agreement

    with recording() as order:
        module = torch.nn.Linear(WIDTH, WIDTH, device=DEVICE)
        watching = watch.Watch(watch.Watched([module]), True, unseen_by_autograd)
        entry = SimpleNamespace(prefilled=False)
        agreement = Agreement(entry, watching, [], DEVICE)
        watching.hide()
        assert not waits(order)
        ahead = module.weight + 1
        assert agreement.verdict() == (None, False)
        assert waits(order) == ['event.synchronize in None'] and not order.races
        device.host_use('host', [], [ahead.detach()])
    assert order.races, 'passes need not have ended'


def test_buffers_that_forwards_ahead_write_are_set_back_without_a_look():
    from megatron_zbpp.mcore import side_effects

    states = {'random_states': tuple, 'same_states': lambda *_: True}
    unlooked = mock.patch.multiple(side_effects, set_random_states=lambda *_: None, **states)
    with recording() as order, unlooked:
        model = torch.nn.Module()
        model.register_buffer('count', torch.zeros(WIDTH, device=DEVICE))
        effects = side_effects.SideEffects([model])
        with effects.capture():
            model.count.add_(1)
        assert not waits(order) and not order.races
        assert model.count.tolist() == [0.0] * WIDTH
        effects.commit()
        assert model.count.tolist() == [1.0] * WIDTH


# ---- Copies of activations, and the page-locked memory that they go to.


ONES = 2**18
BOTH_WAYS = 2  # streams of copies
_unlock = copies._unlock


def leaving(say=None):
    """A store, and the loss of a forward that is to leave by it."""
    store = ActivationStore(DEVICE, say, small=1)
    received = torch.ones(ONES, device=DEVICE).requires_grad_()
    with store.packing((0, 0, 0), received):
        loss = received.exp().sum()
    return store, received, loss


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
def test_memory_is_unlocked_before_it_is_freed(sound):
    """Behind its copies; at once is a seeded race."""
    at_once = mock.patch.object(copies, '_unlock', lambda cuda, at, _: _unlock(cuda, at, ()))
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
def test_memory_of_the_host_is_used_again_behind_what_has_read_it(sound):
    with device.recording() as order:
        engine = Copies(DEVICE)
        storage = engine.allocate(2048)
        left, written = engine.out([storage])
        engine.wait(written)
        engine.back(left, [storage])  # nobody waits for it, as where an iteration is dropped
        if not sound:
            engine._latest.clear()
        again, _ = engine.out([engine.allocate(2048)])
        assert again is left
    assert bool(order.races) != sound
    assert all('does not wait for copy to the device' in str(race) for race in order.races)


def test_nothing_to_copy_locks_nothing():
    """Nor is anything said: a driver refuses to lock no bytes."""
    with device.recording() as order:
        engine = Copies(DEVICE)
        slab, mark = engine.out([])
        engine.wait(mark)
        engine.free(slab)
    assert order.page_locked == []


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
