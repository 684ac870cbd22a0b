"""What the runtime asks of CUDA, and when: on a double, where nothing waits that need not."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cuda_double import GPU, HOST, Cuda

from megatron_zbpp.guests.side_work import side_work
from megatron_zbpp.guests.side_work.side_work import SideWork
from megatron_zbpp.ir import B, F, Pass
from megatron_zbpp.mcore.post_validation import kept_state, side_effects
from megatron_zbpp.mcore.post_validation.agreement import Agreement, Verdict
from megatron_zbpp.mcore.post_validation.reduction import Reduction
from megatron_zbpp.post_validation import speculative_step, watch
from megatron_zbpp.runtime.clock import clock_for
from megatron_zbpp.runtime.compat import unseen_by_autograd
from megatron_zbpp.runtime.guard.position import Tracker
from megatron_zbpp.runtime.guard.watchdog import EXIT_CODE, Watchdog
from megatron_zbpp.runtime.observe.measure import Iteration
from megatron_zbpp.runtime.observe.record import Record
from megatron_zbpp.runtime.weight_grads import WeightGradStore
from megatron_zbpp.schedules import build

DEVICE = torch.device('cuda', GPU)
WIDTH = 4


@pytest.mark.parametrize('counting', [False, True])
def test_marks_wait_for_nothing(counting):
    """Until their seconds are asked for: then the host waits once, for all of them."""
    with Cuda() as cuda:
        clock = clock_for(DEVICE, counting)
        marks = [clock.mark() for _ in range(4)]
        assert not any(map(clock.reached, marks))
        assert not cuda.waits
        seconds = list(map(clock.seconds, marks))
        assert [call.what for call in cuda.calls if call.waits] == ['event.synchronize']
        assert seconds == sorted(seconds) and seconds[-1] == pytest.approx(clock.now(), abs=0.5)
        assert all(map(clock.reached, marks))


def test_a_side_task_looks_at_the_clock_amid_an_iteration():
    """The host waits before a step and behind it, outside of passes; later marks have seconds."""
    first, second = Pass(F, 0, 0), Pass(B, 0, 0)
    times = side_work._Times(
        0, {first: 0.0, second: 9.0}, {first: 0.0, second: 9.0}, 9.0, *[0.0] * 3
    )
    with Cuda() as cuda:
        clock, record = clock_for(DEVICE), Record()
        side = SideWork(lambda: torch.ones(WIDTH, device=DEVICE).sum() is None, 1.0)
        side._expected = times
        side.begin(clock, record)
        for p in (first, second):
            side.before(p)
            with cuda.within(p):
                record.marks.append((clock.mark(), clock.mark()))
                record.passes.append(p)
        spans = Iteration(build('gpipe', 1, 1), None, record, clock).spans()
        assert side.steps == 1 and side.finished and not side.overruns
        assert set(cuda.waits) == {'event.synchronize in None'} and not cuda.races
    (_, end), (start, _) = spans
    assert end <= start


def test_weight_gradients():
    """W on the device: accumulated without a look at them."""
    with Cuda() as cuda:
        store = WeightGradStore()
        weight = torch.nn.Parameter(torch.zeros(WIDTH, device=DEVICE))
        for microbatch in range(2):
            store.open((0, microbatch))
            with store.scope((0, microbatch)):
                store.defer([weight], lambda: [torch.ones_like(weight)])
        for microbatch in range(2):
            store.run((0, microbatch))
        assert not cuda.waits and not cuda.races
        assert weight.grad.is_cuda
    assert weight.grad.tolist() == [2.0] * WIDTH


def stepped(device, in_place):
    """Parameters that were stepped twice, what the model reads, the optimizer, and the pairs."""
    own = [torch.nn.Parameter(torch.full((WIDTH,), 1.0 + k, device=device)) for k in range(3)]
    read = [None if in_place else torch.zeros_like(p, dtype=torch.bfloat16) for p in own]
    optimizer = torch.optim.Adam(own, lr=0.1)
    for _ in range(2):
        for p in own:
            p.grad = torch.full((WIDTH,), 0.5, device=device)
        optimizer.step()
    pairs = list(
        map(speculative_step.Stepped, own, [None if r is None else r.detach() for r in read])
    )
    return own, read, optimizer, pairs


@pytest.mark.parametrize('kept_bytes', [0, 4096], ids=['nothing kept', 'some kept'])
@pytest.mark.parametrize('in_place', [True, False], ids=['fp32', 'bf16'])
def test_trial_step(in_place, kept_bytes):
    found = []
    for device in ('cpu', DEVICE):
        with Cuda() as cuda:
            own, read, optimizer, pairs = stepped(device, in_place)
            trying = speculative_step.SpeculativeStep(
                optimizer, pairs, buffer_bytes=2048, kept_bytes=kept_bytes
            )
            assert bool(trying.kept_bytes) == bool(kept_bytes)
            seen = [p if r is None else r for p, r in zip(own, read, strict=True)]
            tried = [tensor.detach().clone() for tensor in seen]
            trying.undo()
            trying.give_back()
        found.append([[t.tolist() for t in tensors] for tensors in (tried, own)])
        assert not cuda.waits and not cuda.races
        locked = [call for call in cuda.calls if 'page-locked' in call.what]
        assert bool(locked) == (in_place and device == DEVICE)
    assert found[0] == found[1], 'the same on both'
    assert found[0][0] != found[0][1], 'the speculative step took a step'


def test_plain_memory_in_a_trial_would_be_seen():
    plain = mock.patch.object(speculative_step, '_aside', lambda p: p.detach().to('cpu', copy=True))
    with Cuda() as cuda, plain:
        *_, optimizer, pairs = stepped(DEVICE, in_place=True)
        speculative_step.SpeculativeStep(optimizer, pairs, kept_bytes=0).undo()
    assert (
        cuda.waits
        == ['pageable copy to the host in None'] * 3 + ['pageable copy to the device in None'] * 3
    )


class Stalled:
    """Stands for an executor whose device never comes to the end of its first pass."""

    def __init__(self, clock):
        self.program, self.clock = (Pass(B, 0, 0),), clock
        self.record = Record([Pass(B, 0, 0)], [(clock.mark(), clock.mark())])
        self.current, self.awaiting = Pass(B, 0, 0), False
        self.channels = mock.Mock(leaving=None, ranks=[0])
        self.moves = mock.Mock(waits=None)


class Passes:
    """What the watchdog's threads ask of an iteration that does not end."""

    def __init__(self, executor):
        self.tracker, self.over = Tracker(executor), False

    def ended(self):
        pass

    def beat(self):
        return None if self.over else self.tracker.position()

    def lost(self):
        return False

    def standing(self):
        return self.tracker.standing()

    def waits(self):
        return self.tracker.waits()


@contextmanager
def alone(folder):
    dist.init_process_group('gloo', f'file://{folder}/met', rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize('sound', [True, False])
def test_each_thread_of_the_watchdog_enters_the_device(tmp_path, capfd, sound):
    """A thread starts on GPU 0, where the first question would make a context."""
    ended = threading.Event()
    watchdog = Watchdog(timeout=0.2)

    def leave(code):
        watchdog._stopping = True
        ended.code = code
        ended.set()

    enter = Watchdog._enter_device if sound else lambda self: None
    with (
        alone(tmp_path),
        Cuda() as cuda,
        mock.patch.object(Watchdog, '_enter_device', enter),
        mock.patch.object(os, '_exit', leave),
        # the ranks of other tests are children of this process, too
        mock.patch.object(multiprocessing, 'active_children', list),
    ):
        passes = Passes(Stalled(clock_for(DEVICE)))
        with watchdog._watching(passes):
            assert ended.wait(20), 'the watchdog did not see the stall'
        passes.over = True
        watchdog.stop()
    others = [c for c in cuda.calls if c.thread != threading.current_thread().name]
    assert len({c.thread for c in others}) == 2, 'one looks, the other writes last words'
    assert {c.gpu for c in others} == ({GPU} if sound else {0})
    assert not cuda.waits
    assert ended.code == EXIT_CODE and 'B stage 0 microbatch 0' in capfd.readouterr().err


def test_a_watchdog_where_cuda_is_not_used(tmp_path):
    """It makes no context by asking."""
    with alone(tmp_path), mock.patch.object(torch.cuda, 'set_device', side_effect=AssertionError):
        watchdog = Watchdog(timeout=0.2)
        with watchdog.collective('some barrier'):
            assert watchdog._device is None
            time.sleep(0.1)
        watchdog.stop()


class OnStream:
    """Stands for the work of a collective that a communicator runs on a stream of its own."""

    def __init__(self, cuda, tensor):
        stream = cuda._new_stream()
        cuda.order(cuda.stream, stream)
        cuda.use(stream, 'reduction', [], [tensor])
        self._cuda, self._done = cuda, cuda.record(stream)

    def wait(self):
        self._cuda.wait(self._done, self._cuda.stream)


@pytest.mark.parametrize('read', ['result', 'root_on_host'])
def test_a_reduction_is_read_before_forwards_that_run_ahead_have_ended(read):
    """The host waits for the reduction, and not for what was started behind it."""
    with Cuda() as cuda:
        begun = torch.tensor([4.0], device=DEVICE)

        def reduced(value, *_, **__):
            return OnStream(cuda, value)

        with mock.patch.object(dist, 'all_reduce', reduced):
            reduction = Reduction.begin(4.0, dist.ReduceOp.SUM, None, DEVICE)
        page_locked = [call.what for call in cuda.calls if 'page-locked' in call.what]
        ahead = begun + 1  # on the stream of the passes
        found = getattr(reduction, read)
        assert float(found() if callable(found) else found) in (2.0, 4.0)
        assert cuda.waits == ['event.synchronize in None'] and not cuda.races
        assert page_locked == ['page-locked allocation'], 'which may wait for the device'
        cuda.use(HOST, 'host', [], [ahead])
        assert cuda.races, 'what runs ahead need not have ended'


def test_ranks_agree_on_weights_without_waiting_for_passes():
    """Neither where the question is asked, behind forwards that ran ahead, nor at its answer."""
    with Cuda() as cuda, mock.patch.multiple(dist, get_rank=lambda: 0, get_world_size=lambda: 2):
        module = torch.nn.Linear(WIDTH, WIDTH, device=DEVICE)
        watching = watch.Watch(watch.Watched([module]), True, unseen_by_autograd)
        entry = SimpleNamespace(prefilled=False)
        reduced = mock.patch.object(
            dist, 'all_reduce', lambda value, *_, **__: OnStream(cuda, value)
        )
        with reduced:
            agreement = Agreement.begin(entry, watching, [], DEVICE)
        watching.hide()
        assert not cuda.waits
        ahead = module.weight + 1
        assert agreement.verdict() == Verdict(None, False)
        assert cuda.waits == ['event.synchronize in None'] and not cuda.races
        cuda.use(HOST, 'host', [], [ahead])
        assert cuda.races, 'passes need not have ended'


def test_buffers_that_forwards_ahead_write_are_set_back_without_a_look():
    states = {'random_states': tuple, 'same_states': lambda *_: True}
    unlooked = mock.patch.multiple(side_effects, set_random_states=lambda *_: None, **states)
    with Cuda() as cuda, unlooked:
        model = torch.nn.Module()
        model.register_buffer('count', torch.zeros(WIDTH, device=DEVICE))
        effects = side_effects.SideEffects([model])
        with effects.capture():
            model.count.add_(1)
        assert not cuda.waits and not cuda.races
        assert model.count.tolist() == [0.0] * WIDTH
        effects.commit()
        assert model.count.tolist() == [1.0] * WIDTH


@pytest.mark.parametrize(
    ('share', 'limit', 'expected'), [(1.0, None, 13), (0.5, None, 35), (0.5, 20 / 2**30, 20)]
)
def test_an_early_step_keeps_what_there_is_memory_for(share, limit, expected):
    """Of 63 bytes that are free 56 can be used, and passes have needed 43: those ahead a share."""
    with mock.patch.object(kept_state, 'KEPT_BYTES', 0):
        with Cuda() as cuda:
            assert kept_state.most_kept(DEVICE, share, limit) == expected
            assert not cuda.waits
        assert kept_state.most_kept(torch.device('cpu'), share, limit) == 0
    assert kept_state.most_kept(torch.device('cpu'), share, None) == kept_state.KEPT_BYTES


@pytest.mark.parametrize(('kept_bytes', 'steps'), [(2048, 4), (1 << 20, 1)])
def test_what_is_kept_is_stepped_once(kept_bytes, steps):
    """The optimizer steps all at once; of what is not kept, a part at a time and then again."""
    with Cuda():
        *_, optimizer, pairs = stepped(DEVICE, in_place=False)
        with mock.patch.object(optimizer, 'step', wraps=optimizer.step) as step:
            trying = speculative_step.SpeculativeStep(
                optimizer, pairs, buffer_bytes=0, kept_bytes=kept_bytes
            )
            trying.undo()
            trying.complete(optimizer.step)
        assert step.call_count == steps
