"""Process groups that use the recorded device's streams as NCCL's do; gloo carries the data.

A communicator has a stream of its own; messages that are called together have that of all ranks.
What it is given comes behind the stream that is current, `record_stream` tells the allocator of its
tensors, and who waits for the result is the stream that is current then. Each communicator writes
down what it was given.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import Store
from torch.utils._pytree import tree_leaves, tree_map

from devtools.python_group import PythonGroup, over_gloo
from recorded import device
from recorded.communicators import Operation

NAME = 'recorded'
_POLLS = 2  # of an operation that has not ended, before it has
_READ_AND_WRITTEN = ('allreduce', 'allreduce_coalesced', 'broadcast', 'reduce')
# what they write is their first argument
_WRITTEN_FIRST = (
    'allgather', '_allgather_base', 'all_gather_single', 'all_gather_single_coalesced',
    'all_to_all_single', 'allgather_into_tensor_coalesced', 'alltoall', 'alltoall_base', 'gather',
    'reduce_scatter', '_reduce_scatter_base', 'reduce_scatter_single',
    'reduce_scatter_single_coalesced', 'reduce_scatter_tensor_coalesced', 'scatter', 'recv',
)  # fmt: skip
_WRITE_NOTHING = ('send', 'barrier')


operations: list[Operation] = []  # of this process, in order


class Work:
    """An operation: who waits for it is the current stream."""

    def __init__(self, works: list[Any], event: int | None, tensors: Any) -> None:
        self._works, self._event, self._tensors, self._polls = works, event, tensors, 0

    def wait(self, timeout: Any = None) -> bool:
        if self._event is not None:
            device.library().recorded_wait(self._event, device.current_stream().stream_id)
        self.wait_for_data()
        return True

    def wait_for_data(self) -> None:
        """Let gloo end, and nothing come behind that."""
        for work in self._works:
            work.wait()
        self._works, self._tensors = [], None  # gloo's is waited for once, and holds the memory

    def take(self) -> list[Any]:
        """Return gloo's, for who waits for several."""
        works, self._works = self._works, []
        return works

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        self._polls += 1
        if self._polls <= _POLLS or not all(work.is_completed() for work in self._works):
            return False
        if self._event is not None:
            device.library().recorded_host_wait(self._event, b'work.is_completed')
        return True


class Group(PythonGroup):
    """A process group whose tensors are on the device, or on the host."""

    NAME = NAME
    supports_coalescing = True

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size, timeout)
        self._gloo = over_gloo(store, rank, size, timeout)
        self._streams: dict[tuple[int, ...], int] = {}
        self._together: list[Work] | None = None  # messages of one call

    def shutdown(self) -> None:
        del self._gloo

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        """Run an operation: its data at once, its order as NCCL's."""
        run: Callable[..., Any] = getattr(self._gloo, name)
        tensors = [each for each in tree_leaves(args) if isinstance(each, torch.Tensor)]
        if not any(each.is_cuda for each in tensors):
            return run(*args, **options)
        members = ()
        if name in ('send', 'recv') and self._together is None:
            members = (min(self.rank(), args[1]), max(self.rank(), args[1]))
        event = self._launch(name, args, members)
        work = Work([run(*tree_map(_on_host, args), **options)], event, tensors)
        if self._together is not None:
            self._together.append(work)
        return work

    def _start_coalescing(self, on: torch.device) -> None:
        self._together = []

    def _end_coalescing(self, on: torch.device) -> Work:
        """Return the work of what was called since: who waits for it waits for all."""
        together, self._together = self._together or [], None
        event = device.library().recorded_event(self._streams[()])
        return Work([each for work in together for each in work.take()], event, together)

    def _launch(self, name: str, args: tuple, members: tuple[int, ...]) -> int:
        library = device.library()
        if members not in self._streams:
            self._streams[members] = library.recorded_new_stream()
        own, launching = self._streams[members], library.recorded_stream(-1)
        read, written = _uses(name, args, self.rank())
        nbytes = sum(each.nbytes for each in {id(t): t for t in (*read, *written)}.values())
        ranks = tuple(dist.get_process_group_ranks(self))
        thread = threading.get_ident()
        key = self.group_name, ranks, members
        title, by_peer = self._title_of(name, args), _by_peer(name, args, len(ranks))
        operations.append(Operation(key, title, nbytes, launching, thread, *by_peer))
        library.recorded_wait(library.recorded_event(launching), own)
        library.recorded_stream(own)
        try:
            device.launch(name, read, written)
        finally:
            library.recorded_stream(launching)
        for each in (*read, *written):
            each.record_stream(device.stream_of(own))
        return library.recorded_event(own)

    def _title_of(self, name: str, args: tuple) -> str:
        if name not in ('send', 'recv'):
            return name
        sender, receiver = (self.rank(), args[1])[:: 1 if name == 'send' else -1]
        return f'message from {sender} to {receiver}'


def _uses(name: str, args: tuple, rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tensors that an operation reads on a rank, and those that it writes.

    The root of a broadcast only reads: NCCL is given one tensor to send and receive, and has
    nothing to copy there.
    """
    first, rest = _tensors(args[:1]), _tensors(args[1:])
    if name == 'broadcast' and args[1].rootRank == rank:
        return first, []
    if name in _READ_AND_WRITTEN:
        return [], first + rest
    if name in _WRITTEN_FIRST:
        return rest, first
    return first + rest, []


def _by_peer(name: str, args: tuple, size: int) -> tuple[tuple[int, ...], ...]:
    """Return the bytes that an all-to-all sends to each rank, and those it receives from each."""
    if name == 'alltoall':
        received, sent = args[:2]
        return tuple(t.nbytes for t in sent), tuple(t.nbytes for t in received)
    if name not in ('alltoall_base', 'all_to_all_single'):
        return ()
    received, sent, rows_received, rows_sent = args[:4]
    return _of_rows(sent, rows_sent, size), _of_rows(received, rows_received, size)


def _of_rows(tensor: torch.Tensor, rows: list[int] | None, size: int) -> tuple[int, ...]:
    if rows is None or len(rows) == 0:
        return (tensor.nbytes // size,) * size
    return tuple(int(n) * math.prod(tensor.shape[1:]) * tensor.element_size() for n in rows)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor) and t.is_cuda]


def _on_host(value: Any) -> Any:
    return torch.ops.recorded.host(value.detach()) if isinstance(value, torch.Tensor) else value


def _operation(name: str) -> Callable[..., Any]:
    def call(self: Group, *args: Any, **options: Any) -> Any:
        return self.call(name, *args, **options)

    return call


for _name in (*_READ_AND_WRITTEN, *_WRITTEN_FIRST, *_WRITE_NOTHING):
    setattr(Group, _name, _operation(_name))


def install() -> None:
    """Let groups of NCCL, and the default group, be such groups."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, Group, devices=['cpu', 'cuda'])
    dist.init_process_group = _named(dist.init_process_group, ('nccl', 'gloo'))
    dist.new_group = distributed_c10d.new_group = _named(dist.new_group, ('nccl',))


def _named(original: Callable, names: tuple[str, ...]) -> Callable:
    def ours(value: Any) -> Any:
        return NAME if isinstance(value, str) and value in names else value

    def call(*args: Any, **kwargs: Any) -> Any:
        return original(*map(ours, args), **{key: ours(value) for key, value in kwargs.items()})

    return call
