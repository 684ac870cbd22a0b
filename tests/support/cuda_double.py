"""CUDA on a machine without one: tensors that claim to be there, and a record of what was asked.

Tensors lie in the host's memory and compute there, at once. `Cuda` says of each whether it would be
on a GPU, in page-locked or in plain memory, on which stream it is used, and what makes the host
wait. torch's own CUDA sanitizer finds uses of one tensor that no stream, event or wait puts in
order; the host is one of its streams, for page-locked memory.

Whole trainings, their races and what waits in their passes are on the device that records streams
(`recorded`). This one is for single functions, and for the executor without Megatron. It needs no
compiler. No test on that device shows by now what these show on the double:

- of the executor: figures wait for one event, once; a transfer to a partner that nobody waits for
  is found; messages by way of the host copy between passes only;
- the GPU that each thread of the watchdog has entered: that device is one;
- page-locked memory: a driver that refuses it, when it is unlocked, how often it is allocated;
- early steps, their reduction and agreement, side tasks: what runs ahead is not waited for.

Where it runs within the emulation of `emulation.cpu`, it answers first.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.cuda import _sanitizer
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_zbpp.emulation import cpu

HOST, DEFAULT = -1, 0  # streams
GPU = 1  # the one that the main thread chooses: a thread that has chosen none is on 0
_ATEN = torch.ops.aten
_BACKWARD = (torch.Tensor.backward, torch.autograd.backward)
_MOVING = (torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda)
_INDEXING = (_ATEN.index.Tensor, _ATEN.index_put_.default, _ATEN.index_put.default)
_CROSSING = (_ATEN.copy_.default, *_INDEXING)  # take tensors of both
_NEED_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_device = torch._C.TensorBase.device.__get__
_ANSWERS = {
    'memory_allocated': 7,
    'memory_reserved': 60,
    'max_memory_allocated': 50,
    'mem_get_info': (10, 100),
}


@dataclass(frozen=True)
class Call:
    """Something that was asked of CUDA.

    Attributes:
        what: it was.
        within: the pass that ran, by name; None between passes.
        thread: that asked, by name.
        gpu: that was current in this thread.
        waits: whether the host waits for the device.
    """

    what: str
    within: str | None
    thread: str
    gpu: int
    waits: bool


class Cuda(TorchFunctionMode):
    """Within it, `torch.cuda` and tensors answer as on a machine with GPUs.

    Args:
        group: the class of process groups whose messages run on a stream of their own, as NCCL's.

    Attributes:
        calls: what was asked so far.
        races: uses of one tensor that are not in order, in words.
        refuses: the error that page-locking ends with; 0: none.
        locked: addresses and bytes of memory of the host that was page-locked by address.
    """

    def __init__(self, group: type | None = None) -> None:
        super().__init__()
        self._group = group
        self.calls: list[Call] = []
        self.races: list[str] = []
        self.refuses, self._error = 0, 0  # the latter is told to who starts a kernel next
        self.locked: dict[int, int] = {}
        self._locks: dict[int, int] = {}  # keys, by address
        self._within: str | None = None
        self._thread = threading.local()
        self._placed: dict[int, tuple[StorageWeakRef, str, int]] = {}  # by address
        self._keys, self._streams = itertools.count(1), itertools.count(DEFAULT + 1)
        self._events, self._reached = itertools.count(), -1
        self._sanitizer = _sanitizer.EventHandler()
        for stream in (HOST, DEFAULT):
            self._sanitizer._handle_stream_creation(stream)

    def __enter__(self) -> Cuda:
        self._stack = ExitStack()
        for owner, name, value in self._replacements():
            self._stack.enter_context(mock.patch.object(owner, name, value))
        self._stack.enter_context(_Operations(self))
        self._thread.gpu = GPU
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._stack.close()

    # What tests ask and tell

    @property
    def waits(self) -> list[str]:
        """What made the host wait for the device, and in which pass."""
        return [f'{call.what} in {call.within}' for call in self.calls if call.waits]

    def gpus(self, thread: str) -> set[int]:
        """The GPUs that were current when threads of this name asked for something."""
        return {call.gpu for call in self.calls if call.thread == thread}

    @contextmanager
    def within(self, name: object) -> Iterator[None]:
        """A pass runs meanwhile."""
        before, self._within = self._within, str(name)
        try:
            yield
        finally:
            self._within = before

    def arrive(self) -> None:
        """The device has done all that it was asked for."""
        self._reached = next(self._events)

    # Where tensors are

    def place(self, tensor: torch.Tensor, where: str) -> None:
        """From now on it is on the 'device', 'pinned' or in memory of the 'host'."""
        storage = StorageWeakRef(tensor.untyped_storage())
        self._placed.pop(storage.cdata, None)
        if where != 'host':
            self._placed[storage.cdata] = storage, where, next(self._keys)

    def where(self, tensor: torch.Tensor) -> str:
        """'device', 'pinned' or 'host'."""
        storage = tensor.untyped_storage()
        found = self._placed.get(storage._cdata)
        if found:
            return found[1]
        return 'pinned' if self._locks and storage.data_ptr() in self._locks else 'host'

    def placed(self, tensor: torch.Tensor, known: Set[int]) -> bool:
        """Whether its storage is one of these, or has a place: a tensor may be set to one."""
        address = tensor.untyped_storage()._cdata
        return address in known or address in self._placed

    # What happens in which order

    @property
    def stream(self) -> int:
        """The current one of this thread."""
        return getattr(self._thread, 'stream', DEFAULT)

    def log(self, what: str, waits: bool = False) -> None:
        """Writes a call down."""
        gpu, name = getattr(self._thread, 'gpu', 0), threading.current_thread().name
        self.calls.append(Call(what, self._within, name, gpu, waits))

    def record(self, stream: int) -> int:
        """The number of an event on `stream`."""
        event = next(self._events)
        self._sanitizer._handle_event_creation(event)
        self._sanitizer._handle_event_record(event, stream)
        return event

    def wait(self, event: int, stream: int) -> None:
        """What `stream` is given from now on comes behind `event`."""
        self._sanitizer._handle_event_wait(event, stream)

    def order(self, before: int, after: int) -> None:
        """What stream `after` is given from now on comes behind all that `before` has."""
        self.wait(self.record(before), after)

    def use(self, stream: int, what: str, read: list, written: list) -> None:
        """The host starts an operation on `stream`."""
        if stream != HOST:
            self._started()
            self.order(HOST, stream)
        reads, writes = self._known(read), self._known(written)
        errors = self._sanitizer._handle_kernel_launch(
            stream, reads - writes, writes, set(), what, defaultdict(list)
        )
        earlier = (error.previous_access.operator for error in errors)
        self.races += [f'{what} in {self._within} does not wait for {each}' for each in earlier]

    def _known(self, tensors: list[torch.Tensor]) -> set[int]:
        storages = [tensor.untyped_storage() for tensor in tensors]
        placed = {storage._cdata for storage in storages} & self._placed.keys()
        locked = {storage.data_ptr() for storage in storages} & self._locks.keys()
        return {self._placed[a][2] for a in placed} | {self._locks[a] for a in locked}

    def _started(self) -> None:
        """PyTorch asks for the latest error behind each kernel, whose ever it was."""
        error, self._error = self._error, 0
        if error:
            raise RuntimeError(f'CUDA error {error}, of an earlier call')

    def lock(self, address: int, nbytes: int, flags: int) -> int:
        """cudaHostRegister: returns its error, and keeps it."""
        self.log('page-locked allocation')
        if self.refuses:
            self._error = self.refuses
            return self.refuses
        self.locked[address], self._locks[address] = nbytes, next(self._keys)
        return 0

    def unlock(self, address: int) -> int:
        """cudaHostUnregister."""
        del self.locked[address], self._locks[address]
        return 0

    # torch.cuda

    def _replacements(self) -> Iterator[tuple[Any, str, Any]]:
        cuda, thread = torch.cuda, self._thread
        yield cuda, 'is_available', lambda: True
        yield cuda, 'is_initialized', lambda: True
        yield cuda, '_lazy_init', lambda: None
        yield cuda, 'set_device', lambda gpu: setattr(thread, 'gpu', gpu)
        yield cuda, 'current_device', lambda: getattr(thread, 'gpu', 0)
        yield cuda, 'Stream', lambda *_, **__: _Stream(self, self._new_stream())
        yield cuda, 'Event', lambda *_, **__: _Event(self)
        yield cuda, 'default_generators', (torch.default_generator,) * (GPU + 1)
        yield cuda, 'get_rng_state', lambda *_: torch.default_generator.get_state()
        yield cuda, 'set_rng_state', lambda state, *_: torch.default_generator.set_state(state)
        yield cuda, 'current_stream', lambda *_: _Stream(self, self.stream)
        yield cuda, 'stream', self._on_stream
        yield cuda, 'synchronize', lambda *_: self.synchronize('synchronize')
        yield cuda, 'cudart', lambda: _Runtime(self.lock, self.unlock)
        yield cuda, 'empty_cache', lambda: self.synchronize('empty_cache')
        for name, answer in _ANSWERS.items():
            yield cuda, name, lambda *_, name=name, answer=answer: self.log(name) or answer
        # optimizers ask it whether a graph is being captured
        yield torch.accelerator, 'is_available', lambda: False
        tensor = torch.Tensor
        yield tensor, 'device', property(self._device)
        yield tensor, 'is_cuda', property(lambda t: self.where(t) == 'device')
        yield tensor, 'is_cpu', property(lambda t: self.where(t) != 'device')
        yield tensor, 'is_pinned', lambda t, *_: self.where(t) == 'pinned'
        yield tensor, 'pin_memory', lambda t, *_: self._pinned(t.clone())
        for name in ('send', 'recv') if self._group else ():
            yield self._group, name, self._message(name, getattr(self._group, name))
        if self._group:
            yield self._group, '_end_coalescing', self._together(self._group._end_coalescing)

    def _new_stream(self) -> int:
        stream = next(self._streams)
        self._sanitizer._handle_stream_creation(stream)
        return stream

    def synchronize(self, what: str) -> None:
        """The host waits for the whole device."""
        self.log(what, waits=True)
        self._sanitizer._handle_device_synchronization()
        self.arrive()

    @contextmanager
    def _on_stream(self, stream: _Stream) -> Iterator[None]:
        before, self._thread.stream = self.stream, stream.number
        try:
            yield
        finally:
            self._thread.stream = before

    def _device(self, tensor: torch.Tensor) -> torch.device:
        return _made_device(GPU) if tensor.is_cuda else _device(tensor)

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        self.log('page-locked allocation')
        self.place(tensor, 'pinned')
        return tensor

    def _message(self, name: str, original: Callable) -> Callable:
        """A send or receive on the stream of its communicator, behind the current one."""

        def call(group: Any, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> _Work:
            (tensor,) = tensors
            assert self.where(tensor) == 'device', f'NCCL is to {name} memory of the host'
            stream = vars(group).setdefault('_its_stream', self._new_stream())
            self.order(self.stream, stream)
            work = original(group, tensors, peer, tag)
            self.use(stream, name, [tensor][name == 'recv' :], [tensor][name == 'send' :])
            return _Work(self, work, self.record(stream))

        return call

    def _together(self, original: Callable) -> Callable:
        """The work of messages that were called as one: who waits for it waits for all."""

        def call(group: Any, device: torch.device) -> _Work:
            return _Work(self, original(group, device), self.record(vars(group)['_its_stream']))

        return call

    # torch

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in _BACKWARD:  # torch leaves the mode while it runs `func`
            TorchFunctionMode.__enter__(self)
            try:
                return cpu._backward(*args, **kwargs)
            finally:
                TorchFunctionMode.__exit__(self, None, None, None)
        if func is torch.device:
            return _made_device(*args, **kwargs)
        if func in _MOVING:
            return self._moved(func, *args, **kwargs)
        if func is torch.Tensor.tolist and args[0].is_cuda:  # no operation on the CPU
            self.log('tolist', waits=True)
        device, pinned = kwargs.get('device'), kwargs.pop('pin_memory', False)
        if device is not None:
            kwargs['device'] = 'cpu'
        made = func(*args, **kwargs)
        if pinned:
            return self._pinned(made)
        if device is not None and isinstance(made, torch.Tensor):
            self.place(made, _kind(device))
            if made.is_cuda and func is not torch.empty:  # it is filled
                self._started()
        return made

    def _moved(self, func: Callable, tensor: torch.Tensor, *args: Any, **kwargs: Any):
        """What Tensor.to and its like give."""
        copy, dtype = kwargs.pop('copy', False), None
        non_blocking = kwargs.get('non_blocking', False)
        if func is not torch.Tensor.to:
            target = 'device' if func is torch.Tensor.cuda else 'host'
        elif args and isinstance(args[0], torch.Tensor):
            target, dtype = self.where(args[0]), args[0].dtype
        else:
            device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
            target = self.where(tensor) if device is None else _kind(device)
        dtype = tensor.dtype if dtype is None else dtype
        if (target == 'device') == tensor.is_cuda:
            return tensor.to(dtype, copy=copy)
        made = tensor.to(dtype, copy=True)
        self.place(made, 'pinned' if non_blocking and target == 'host' else target)
        self.copied(made, tensor, non_blocking)
        return made

    def copied(self, to: torch.Tensor, tensor: torch.Tensor, non_blocking: bool) -> None:
        """A copy between host and device."""
        places = {self.where(to), self.where(tensor)}
        asynchronous = non_blocking and 'pinned' in places
        direction = 'to the device' if to.is_cuda else 'to the host'
        kind = 'page-locked' if 'pinned' in places else 'pageable'
        self.use(self.stream, f'{kind} copy {direction}', [tensor], [to])
        self.log(f'{kind} copy {direction}', waits=not asynchronous)
        if not asynchronous:
            self.order(self.stream, HOST)


class _Operations(TorchDispatchMode):
    """Tells `cuda` what torch computes, where and with what."""

    def __init__(self, cuda: Cuda) -> None:
        super().__init__()
        self._cuda = cuda

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and importing the compiler takes seconds

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        cuda, kwargs = self._cuda, kwargs or {}
        given = _tensors((args, kwargs))
        places = {cuda.where(t) for t in given}
        known = {t.untyped_storage()._cdata for t in given}
        made = func(*args, **kwargs)
        if places <= {'host'}:
            return made
        if func not in _CROSSING and 'device' in places:
            apart = [t.shape for t in given if t.dim() and cuda.where(t) != 'device']
            assert not apart, f'{func} of tensors on the device and {apart} on the host'
        fresh = [t for t in _tensors(made) if not cuda.placed(t, known)]
        for tensor in fresh:
            cuda.place(tensor, 'device' if 'device' in places else 'host')
        if func is _ATEN.copy_.default and places != {'device'} and 'device' in places:
            cuda.copied(args[0], args[1], kwargs.get('non_blocking', len(args) > 2 and args[2]))
            return made
        read, written = _uses(func, args, kwargs)
        stream = cuda.stream if 'device' in places else HOST
        cuda.use(stream, str(func), read, written + fresh)
        if 'device' in places and _needs_values(func, args, kwargs):
            cuda.log(str(func), waits=True)
            cuda.order(stream, HOST)
        return made


class _Stream:
    def __init__(self, cuda: Cuda, number: int) -> None:
        self.cuda, self.number = cuda, number

    def wait_stream(self, other: _Stream) -> None:
        self.cuda.order(other.number, self.number)

    def wait_event(self, event: _Event) -> None:
        self.cuda.wait(event.number, self.number)

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event(self.cuda)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.record_event().synchronize()


class _Event:
    """Has happened when the host has waited for it, or the test says that the device arrives."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda, self.number, self.time = cuda, -1, 0.0

    def record(self, stream: _Stream | None = None) -> None:
        self.cuda.log('event.record')
        self.time = time.perf_counter()
        self.number = self.cuda.record(self.cuda.stream if stream is None else stream.number)

    def wait(self, stream: _Stream | None = None) -> None:
        self.cuda.wait(self.number, self.cuda.stream if stream is None else stream.number)

    def query(self) -> bool:
        self.cuda.log('event.query')
        return self.number <= self.cuda._reached

    def synchronize(self) -> None:
        self.cuda.log('event.synchronize', waits=True)
        self.cuda.wait(self.number, HOST)
        self.cuda._reached = max(self.cuda._reached, self.number)

    def elapsed_time(self, end: _Event) -> float:
        latest = max(self.number, end.number)
        assert latest <= self.cuda._reached, 'asked before the events have happened'
        return (end.time - self.time) * 1e3


class _Runtime(NamedTuple):
    """What torch.cuda.cudart() has."""

    cudaHostRegister: Callable[[int, int, int], int]
    cudaHostUnregister: Callable[[int], int]


class _Work:
    """Of a message: who waits for it is the stream that is current."""

    def __init__(self, cuda: Cuda, work: Any, event: int) -> None:
        self._cuda, self._work, self._event = cuda, work, event
        self.is_completed = work.is_completed

    def wait(self) -> bool:
        self._cuda.wait(self._event, self._cuda.stream)
        return self._work.wait()


def _made_device(*args: Any, **kwargs: Any) -> torch.device:
    """torch.device, whatever emulation there is beside this one."""
    with torch._C.DisableTorchFunction():
        if args and isinstance(args[0], int):
            return torch.device('cuda', *args)
        return torch.device(*args, **kwargs)


def _kind(device: Any) -> str:
    return 'host' if _made_device(device).type == 'cpu' else 'device'


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _uses(func: Any, args: tuple, kwargs: dict) -> tuple[list, list]:
    """Tensors whose data `func` reads, and those that it writes; a view does neither."""
    read: list[torch.Tensor] = []
    written: list[torch.Tensor] = []
    name = func._schema.name
    if name != 'aten::set_' and not _sanitizer.FACTORY_FUNCTION_REGEX.match(name):
        for argument, value in _sanitizer.zip_arguments(func._schema, args, kwargs):
            if argument.alias_info is None:
                read += _tensors(value)
            elif argument.alias_info.is_write:
                written += _tensors(value)
    return read, written


def _needs_values(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether the host cannot go on without knowing what is in a tensor."""
    if func in _INDEXING:
        values = args[2:3]
        if values and values[0].numel() == 1:  # torch fills by the mask, and counts nothing
            return False
        return any(t.dtype in (torch.bool, torch.uint8) for t in _tensors(args[1]))
    if func is _ATEN.repeat_interleave.Tensor and kwargs.get('output_size') is not None:
        return False
    return not _NEED_VALUES.isdisjoint(func.tags)
