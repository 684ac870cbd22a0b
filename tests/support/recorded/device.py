"""`torch.cuda` on the recorded device, and what it wrote down."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import threading
import time
import types
from array import array
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.cuda import _sanitizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_zbpp.emulation import cpu
from recorded.ordering import Order

_CUDA_TYPE = 1  # of c10::DeviceType
_library: Any = None
_within = ['']  # the pass that runs
_thread = threading.local()  # its GPU, once it has chosen one
# threads that have asked for an event or a number of bytes, each with the GPU that was its own: on
# this device all are one
asked: set[tuple[int, int]] = set()


def installed() -> bool:
    return _library is not None


def library() -> Any:
    assert _library is not None, 'recorded.device.install() comes first'
    return _library


class Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **ids: int) -> Stream:
        if 'stream_id' in ids:
            return super().__new__(cls, **ids)
        return super().__new__(cls, device='cuda', priority=priority)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def record_event(self, event: Any = None) -> Any:
        event = Event() if event is None else event
        event.record(self)
        return event


class Event(torch.Event):
    def __new__(cls, enable_timing=False, blocking=False, interprocess=False) -> Event:
        return super().__new__(cls, device='cuda', enable_timing=enable_timing)

    def record(self, stream: Any = None) -> None:
        _ask()
        self._time = time.perf_counter()
        super().record(current_stream() if stream is None else stream)

    def wait(self, stream: Any = None) -> None:
        super().wait(current_stream() if stream is None else stream)

    def query(self) -> bool:
        _ask()
        return super().query()

    def synchronize(self) -> None:
        _ask()
        super().synchronize()

    def elapsed_time(self, end: Event) -> float:
        if not (self.query() and end.query()):
            raise RuntimeError('Both events must be completed before calculating elapsed time.')
        return (end._time - self._time) * 1e3


def _set_gpu(gpu: Any) -> None:
    _thread.gpu = gpu if isinstance(gpu, int) else torch.device(gpu).index or 0


def _current_gpu() -> int:
    return getattr(_thread, 'gpu', 0)


def _ask() -> None:
    asked.add((threading.get_ident(), _current_gpu()))


def stream_of(number: int) -> Stream:
    return Stream(stream_id=number, device_index=0, device_type=_CUDA_TYPE)


def current_stream(device: Any = None) -> Stream:
    return stream_of(library().recorded_stream(-1))


def set_stream(stream: Any) -> None:
    if stream is not None:
        library().recorded_stream(stream.stream_id)


@contextlib.contextmanager
def _on_stream(stream: Any) -> Iterator[None]:
    before = library().recorded_stream(-1)
    set_stream(stream)
    try:
        yield
    finally:
        library().recorded_stream(before)


def _no_graph(*args: object, **kwargs: object) -> None:
    raise RuntimeError('the recorded device captures no CUDA graphs')


def _bytes(most: bool) -> int:
    _ask()
    return library().recorded_bytes(most)


_RUNTIME = types.SimpleNamespace(
    cudaHostRegister=lambda address, nbytes, flags: library().recorded_lock(address, nbytes),
    cudaHostUnregister=lambda address: library().recorded_unlock(address),
    cudaGetErrorString=str,
    cudaError=types.SimpleNamespace(success=0),
)
_MEMORY = 1 << 34
_PEAKS = 'memory_reserved', 'max_memory_allocated', 'max_memory_reserved'

# name in torch.cuda: replacement; what is not here is the CPU emulation's
_CUDA: dict[str, object] = {
    'is_initialized': lambda: True,
    '_is_in_bad_fork': lambda: False,
    'set_device': _set_gpu,
    'current_device': _current_gpu,
    'synchronize': lambda *args: library().recorded_synchronize(),
    'Stream': Stream,
    'Event': Event,
    'current_stream': current_stream,
    'default_stream': lambda *args: stream_of(0),
    'stream': _on_stream,
    'set_stream': set_stream,
    'CUDAGraph': _no_graph,
    'graph': _no_graph,
    'cudart': lambda: _RUNTIME,
    'empty_cache': lambda: library().recorded_synchronize(),
    'memory_allocated': lambda *args: _bytes(False),
    **dict.fromkeys(_PEAKS, lambda *args: _bytes(True)),
    'reset_peak_memory_stats': lambda *args: library().recorded_reset_peak(),
    'mem_get_info': lambda *args: (_MEMORY - _bytes(False), _MEMORY),
    'memory_stats': lambda *args: {'allocated_bytes.all.peak': _bytes(True)},
    'get_device_name': lambda *args: 'recorded',
    'get_device_capability': lambda *args: (9, 0),
}


def install(path: Path | str) -> None:
    """Give this process the device at `path`; megatron.core is imported afterwards."""
    global _library
    if installed():
        return
    os.environ.setdefault('TORCHDYNAMO_DISABLE', '1')
    os.environ.setdefault('CUDA_DEVICE_MAX_CONNECTIONS', '1')
    torch.ops.load_library(str(path))
    _library = ctypes.CDLL(str(path))
    for name in ('stream', 'new_stream', 'event', 'log', 'bytes', 'lock', 'unlock'):
        getattr(_library, f'recorded_{name}').restype = ctypes.c_int64
    for name in ('stream', 'event', 'unlock', 'refuse', 'name'):
        getattr(_library, f'recorded_{name}').argtypes = [ctypes.c_int64]
    _library.recorded_lock.argtypes = [ctypes.c_int64] * 2
    _library.recorded_wait.argtypes = [ctypes.c_int64] * 2
    _library.recorded_host_wait.argtypes = [ctypes.c_int64, ctypes.c_char_p]
    _library.recorded_log.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    _library.recorded_name.restype = ctypes.c_char_p
    for name, value in {**cpu._CUDA, **_CUDA}.items():
        setattr(torch.cuda, name, value)
        if name in vars(torch.cuda.random):  # its own 'from . import'
            setattr(torch.cuda.random, name, value)
    torch.UntypedStorage.resize_ = _resize(torch.UntypedStorage.resize_)
    _library.recorded_install()
    cpu.install_gloo(alias_sends=False)
    cpu.install_packages()
    random = logging.getLogger('megatron.core.tensor_parallel.random')
    random.addFilter(lambda record: 'CPU RNG state changed' not in record.msg)  # it is the GPU's


def _resize(original: Any) -> Any:
    def resize_(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        if storage.device.type != 'cuda':
            return original(storage, nbytes)
        whole = torch.empty(0, dtype=torch.uint8, device='cuda').set_(storage)
        torch.ops.recorded.resize(whole, nbytes)
        return storage

    return resize_


def launch(name: str, read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
    """Run a kernel on the current stream, which computes nothing."""
    torch.ops.recorded.launch(name, read, written)


def host_use(name: str, read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
    """Let the host use memory by itself, on the device or page-locked."""
    torch.ops.recorded.host_use(name, read, written)


@contextlib.contextmanager
def _meanwhile(function: str, value: int) -> Iterator[None]:
    set_to = getattr(library(), f'recorded_{function}')
    set_to(value)
    try:
        yield
    finally:
        set_to(0)


def stalled() -> contextlib.AbstractContextManager[None]:
    return _meanwhile('stall', 1)


def refusing(error: int) -> contextlib.AbstractContextManager[None]:
    """Let page-locking end with this error, which whoever starts a kernel next is told."""
    return _meanwhile('refuse', error)


class HostUses(TorchDispatchMode):
    """Writes down what the host computes with page-locked memory, which copies use beside it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and importing the compiler takes seconds

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        fills = _sanitizer.FACTORY_FUNCTION_REGEX.match(func._schema.name)
        if tensors and not fills and not any(t.is_cuda for t in tensors):
            read: list[torch.Tensor] = []
            written: list[torch.Tensor] = []
            for argument, value in _sanitizer.zip_arguments(func._schema, args, kwargs):
                uses = [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
                if argument.alias_info is None:
                    read += uses
                elif argument.alias_info.is_write:
                    written += uses
            host_use(str(func), read, written)
        return func(*args, **kwargs)


@cache
def _name(number: int) -> str:
    return library().recorded_name(number).decode()


@contextlib.contextmanager
def within(name: object) -> Iterator[None]:
    """A pass runs meanwhile, or something in it."""
    before, _within[:] = _within[0], [str(name)]
    library().recorded_note(_within[0].encode())
    try:
        yield
    finally:
        _within[:] = [before]
        library().recorded_note(before.encode())


def current_pass() -> str:
    return _within[0]


@contextlib.contextmanager
def recording() -> Iterator[Order]:
    """Write down what is asked of the device; the order is there behind the context.

    What the host does by itself is in it within `HostUses` only. Garbage goes before: the end of
    what another test has left would be in the log.
    """
    gc.collect()
    gc.freeze()  # the next time it looks at what is new
    order = Order(_name)
    library().recorded_clear()
    library().recorded_record(True)
    try:
        yield order
    finally:
        library().recorded_record(False)
    order.read(_words())


def look(order: Order) -> Order:
    """Return the order as it is, within its `recording`."""
    return order.read(_words())


def waits(order: Order) -> list[str]:
    """Return what the host has waited for up to now, and in which pass."""
    return [f'{wait.what} in {wait.within or None}' for wait in look(order).waits]


def _words() -> array:
    room = library().recorded_log(None, 0)
    words = array('q', bytes(8 * room))
    library().recorded_log(words.buffer_info()[0], room)
    library().recorded_clear()
    return words


@contextlib.contextmanager
def passes() -> Iterator[None]:
    """Name the passes of Megatron's iterations in the log."""
    from megatron_zbpp.mcore.iteration import batch

    with mock.patch.object(batch, 'profiled', within):
        yield


def join(path: Path, te: Path | None = None) -> None:
    """Prepare a process of `ranks.Pool`: the device, groups, and Transformer Engine's layers."""
    from recorded import groups

    os.environ['LOCAL_RANK'] = '0'  # each process has a device
    install(path)
    groups.install()
    cpu.install = lambda alias_sends=True: None  # the device is here
    if te is not None:
        from megatron_zbpp.emulation import te as emulated

        emulated.install(te, cpu=False)
