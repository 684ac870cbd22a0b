"""Messages between neighbours of a pipeline: posted early, kept until done, never waiting on host.

Each direction between two ranks is a channel of its own, first in first out. On gloo that holds
within one group. NCCL orders all messages of a communicator on one stream, so that two ranks that
send to each other could block each other: there, each direction gets its own communicator. gloo
takes messages of the host only: those of a GPU are copied, so that ranks that share one can talk.

NCCL makes a communicator when it is first used, and connects two ranks when they first talk: either
holds both up on the host until the other comes there, even the one that would only post a receive.
So all channels are used once, in an order that all ranks share, before any pass is.

What forwards have saved goes to a partner by channels of its own, as bytes.

A shape that the receiver cannot know goes ahead of its message from host to host: no rank waits for
a device to learn it.
"""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_zbpp.analysis.program import Send
from megatron_zbpp.runtime import MessageKernels
from megatron_zbpp.runtime.groups import backend_for, directions, host_group

# Of all messages, and of their shapes: those of one direction are told apart by their order. What
# goes by a second set of channels in the same groups has tags of its own.
_TAG, _SHAPE_TAG, _TAGS = 0, 1, 2
_MOST_DIMENSIONS = 7


@dataclass(frozen=True)
class Message:
    """Shape and type of what stages exchange, and where it lives."""

    shape: tuple[int, ...] | None  # None if it differs from message to message
    dtype: torch.dtype
    device: torch.device

    @functools.cached_property
    def on_cpu(self) -> bool:
        """True if that is the host's memory."""
        return self.device.type == 'cpu'


class Incoming(NamedTuple):
    """A receive that has been posted."""

    tensor: torch.Tensor
    work: dist.Work | None = None  # None: it is here
    device: torch.device | None = None  # where it belongs, if it comes by way of the host

    def wait(self) -> torch.Tensor:
        """Return the tensor, arrived (on CUDA: for whatever the current stream does next)."""
        if self.work is not None:
            self.work.wait()
        return self.tensor if self.device is None else self.tensor.to(self.device)


class Transfer(NamedTuple):
    """Bytes that leave, or arrive."""

    tensors: Sequence[torch.Tensor]  # that are sent, or received into
    works: Sequence[dist.Work]  # of them; one, where the backend carries them together
    # where to bring what has arrived, if it comes by way of the host
    targets: Sequence[torch.Tensor] = ()

    def wait(self) -> None:
        """Let the host (on CUDA: what computes from now on) wait until that is done."""
        for work in self.works:
            work.wait()
        if self.targets:
            for target, tensor in zip(self.targets, self.tensors, strict=True):
                target.copy_(tensor)


_Unfinished = deque[tuple[dist.Work, torch.Tensor, Send]]


class Channels:
    """Sends and receives of one rank of `pp_group`: made by all ranks of all pipelines together."""

    def __init__(
        self,
        pp_group: dist.ProcessGroup,  # the pipeline group; peers are ranks in it
        pairs: Iterable[tuple[int, int]],  # every (sender, receiver) pair of the placement
        device: torch.device,  # where messages live
        # around what waits for other ranks, which it is told in words
        collective: Callable[[str], AbstractContextManager] = nullcontext,
        # whether each direction gets a group of its own; None: unless the backend is gloo
        separate: bool | None = None,
        shapes: bool = False,  # whether shapes and sizes can be told
        saved: bool = False,  # whether they are for what forwards have saved
        kernels: MessageKernels | None = None,  # of NCCL; None: those of `MessageKernels`
    ) -> None:
        self.pp_group = pp_group
        self._tag, self._shape_tag = (tag + _TAGS * saved for tag in (_TAG, _SHAPE_TAG))
        self.rank = dist.get_rank(pp_group)  # this rank in it
        self.leaving: Send | None = None  # the send that this rank waits for, while it does
        self.ranks = dist.get_process_group_ranks(pp_group)  # the global rank of each of its ranks
        pairs = list(pairs)
        self._on_host = backend_for(pp_group, device) == 'gloo'
        backend: Any = pp_group._get_backend(device) if saved and not self._on_host else None
        self._together = bool(getattr(backend, 'supports_coalescing', False))
        self._device = device
        if separate or (separate is None and not self._on_host):
            with collective('making of the groups for messages between stages'):
                groups = directions(pp_group, device, pairs, kernels or MessageKernels())
        else:
            groups = dict.fromkeys(pairs, pp_group)
        # by peer: the group of the messages to it, or from it, and its rank there
        self._to = {b: self._seen(b, groups[a, b]) for a, b in groups if a == self.rank}
        self._from = {a: self._seen(a, groups[a, b]) for a, b in groups if b == self.rank}
        self._unfinished: dict[int, _Unfinished] = defaultdict(deque)
        self._untold: dict[int, _Unfinished] = defaultdict(deque)  # shapes
        self._told: deque[tuple[dist.Work, torch.Tensor]] = deque()  # sizes
        self._host_group = pp_group
        if shapes and not self._on_host:
            with collective('making of the group for shapes of messages'):
                self._host_group = host_group(pp_group)
        self._use_all_once(pairs, device, collective)

    def _use_all_once(
        self,
        pairs: list[tuple[int, int]],
        device: torch.device,
        collective: Callable[[str], AbstractContextManager],
    ) -> None:
        """Send one element through each channel; pairs without a common rank go at once."""
        tensor = torch.zeros(1, device='cpu' if self._on_host else device)
        for a, b in sorted(pairs, key=lambda pair: (min(pair) % 2, *pair)):
            if self.rank not in (a, b):
                continue
            with collective(f'first message from pipeline rank {a} to {b}'):
                if self.rank == a:
                    self.begin([tensor], b).wait()
                else:
                    self.into([tensor], a).wait()
                tensor.item()  # waits for the device

    def send(self, tensor: torch.Tensor, send: Send) -> None:
        """Start sending `tensor`, which is held until it has left and must not be written to.

        Backends that cannot tell whether a send is done (gloo) hold as many as may be under way.
        """
        tensor = tensor.contiguous()
        if self._on_host and not tensor.is_cpu:
            tensor = tensor.to('cpu')
        group, peer = self._to[send.peer]
        work = group.send([tensor], peer, self._tag)
        self._keep(self._unfinished[send.peer], work, tensor, send)

    def tell(self, shape: Sequence[int], send: Send) -> None:
        """Start sending the shape of the tensor that `send` is about to send."""
        if len(shape) > _MOST_DIMENSIONS:
            raise ValueError(
                f'{send} has the shape {tuple(shape)}: of messages whose shapes vary, '
                f'{_MOST_DIMENSIONS} dimensions at most'
            )
        padding = [0] * (_MOST_DIMENSIONS - len(shape))
        tensor = torch.tensor([len(shape), *shape, *padding])
        work = self._host_group.send([tensor], send.peer, self._shape_tag)
        self._keep(self._untold[send.peer], work, tensor, send)

    def ask(self, peer: int) -> Callable[[], tuple[int, ...]]:
        """Post the receive of the next shape from `peer`; return what waits for it."""
        tensor = torch.empty(1 + _MOST_DIMENSIONS, dtype=torch.int64)
        work = self._host_group.recv([tensor], peer, self._shape_tag)

        def shape() -> tuple[int, ...]:
            work.wait()
            dimensions, *sizes = tensor.tolist()
            return tuple(sizes[:dimensions])

        return shape

    def tell_sizes(self, sizes: Sequence[int], peer: int) -> None:
        """Start sending how many bytes each of the next transfers to `peer` has."""
        for numbers in ([len(sizes)], sizes) if sizes else ([0],):
            tensor = torch.tensor(numbers, dtype=torch.int64)
            work = self._host_group.send([tensor], peer, self._shape_tag)
            self._told.append((work, tensor))

    def ask_sizes(self, peer: int) -> list[int]:
        """Return the next sizes from `peer`, once its host has told them."""
        count = torch.empty(1, dtype=torch.int64)
        self._host_group.recv([count], peer, self._shape_tag).wait()
        sizes = torch.empty(int(count.item()), dtype=torch.int64)
        if len(sizes):
            self._host_group.recv([sizes], peer, self._shape_tag).wait()
        return sizes.tolist()

    def begin(self, tensors: Sequence[torch.Tensor], peer: int) -> Transfer:
        """Start sending tensors, which nobody may write to until that is done."""
        if self._on_host:
            tensors = [tensor if tensor.is_cpu else tensor.to('cpu') for tensor in tensors]
        group, there = self._to[peer]
        return Transfer(tensors, self._each(group, group.send, tensors, there))

    def into(self, tensors: Sequence[torch.Tensor], peer: int) -> Transfer:
        """Post the receives of the next tensors from `peer`."""
        copied = self._on_host and not all(tensor.is_cpu for tensor in tensors)
        taken = [torch.empty_like(t, device='cpu') for t in tensors] if copied else tensors
        group, there = self._from[peer]
        works = self._each(group, group.recv, taken, there)
        return Transfer(taken, works, tensors if copied else ())

    def _each(
        self, group: Any, start: Callable, tensors: Sequence[torch.Tensor], there: int
    ) -> list[dist.Work]:
        """Start a message for each tensor: in one call, and one kernel, where they are saved."""
        together = self._together and bool(tensors)
        if together:
            group._start_coalescing(self._device)
        works = [start([tensor], there, self._tag) for tensor in tensors]
        return [group._end_coalescing(self._device)] if together else works

    def let_go(self) -> None:
        """Release tensors that have left by now; never waits. Of gloo only `finish` can tell."""
        if self._on_host:
            return
        for unfinished in self._unfinished.values():
            while unfinished and unfinished[0][0].is_completed():
                self._finish_oldest(unfinished)

    def post(self, message: Message, peer: int) -> Incoming:
        """Post the receive of the next message from `peer`."""
        assert message.shape is not None, 'to be asked for first'
        copied = self._on_host and not message.on_cpu
        device = 'cpu' if copied else message.device
        tensor = torch.empty(message.shape, dtype=message.dtype, device=device)
        group, there = self._from[peer]
        work = group.recv([tensor], there, self._tag)
        return Incoming(tensor, work, message.device if copied else None)

    def finish(self) -> None:
        """Wait for every send of messages, shapes and sizes."""
        while self._told:
            self._told.popleft()[0].wait()
        for unfinished in (*self._untold.values(), *self._unfinished.values()):
            while unfinished:
                self._finish_oldest(unfinished)

    def _seen(self, peer: int, group: dist.ProcessGroup) -> tuple[dist.ProcessGroup, int]:
        return group, dist.get_group_rank(group, self.ranks[peer])

    def _keep(
        self, unfinished: _Unfinished, work: dist.Work, tensor: torch.Tensor, send: Send
    ) -> None:
        unfinished.append((work, tensor, send))
        while len(unfinished) > send.under_way:
            self._finish_oldest(unfinished)

    def _finish_oldest(self, unfinished: _Unfinished) -> None:
        work, _tensor, self.leaving = unfinished.popleft()  # held until it has left
        work.wait()
        self.leaving = None  # not after an error: it tells what was waited for


class NoPeers(Channels):
    """Channels of a rank that runs by itself: sent tensors are dropped, received ones are noise.

    Noise and not zeros, by which all tokens would go to the same experts; the same on all ranks, as
    those of a tensor-parallel group take one tensor for theirs. Whole numbers are 1: an index or a
    divisor that there is.
    """

    def __init__(self, pp_group: dist.ProcessGroup) -> None:
        self.pp_group = pp_group
        self.rank = dist.get_rank(pp_group)
        self.ranks: Sequence[int] = dist.get_process_group_ranks(pp_group)
        self.leaving = None
        self._generator = torch.Generator().manual_seed(0)  # the host's
        self._sent: torch.Tensor | None = None  # held as a message that is on its way

    def send(self, tensor: torch.Tensor, send: Send) -> None:
        self._sent = tensor

    def post(self, message: Message, peer: int) -> Incoming:
        assert message.shape is not None, 'nobody tells shapes'
        if not message.dtype.is_floating_point:
            return Incoming(torch.ones(message.shape, dtype=message.dtype, device=message.device))
        noise = torch.randn(message.shape, generator=self._generator)
        return Incoming(noise.to(message.device, message.dtype))

    def let_go(self) -> None:
        pass

    def finish(self) -> None:
        self._sent = None
