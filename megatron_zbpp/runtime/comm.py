"""Messages between neighbours of a pipeline: posted early, kept until done, never waiting on host.

Each direction between two ranks is a channel of its own, first in first out. On gloo that holds
within one group. NCCL orders all messages of a communicator on one stream, so that two ranks that
send to each other could block each other: there, each direction gets its own communicator.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Message:
    """Shape and type of what stages exchange, and where it lives."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Incoming:
    """A receive that has been posted."""

    tensor: torch.Tensor
    work: dist.Work

    def wait(self) -> torch.Tensor:
        """The tensor, arrived (on CUDA: for whatever the current stream does next)."""
        self.work.wait()
        return self.tensor


class Channels:
    """Sends and receives of one rank of `pp_group`.

    Args:
        pp_group: the pipeline group; peers are ranks in it.
        pairs: every (sender, receiver) pair of the placement, the same on all ranks: a collective.
    """

    def __init__(self, pp_group: dist.ProcessGroup, pairs: Iterable[tuple[int, int]]) -> None:
        self.rank = dist.get_rank(pp_group)
        self._ranks = dist.get_process_group_ranks(pp_group)
        self._groups: dict[tuple[int, int], dist.ProcessGroup] = {}
        separate = dist.get_backend(pp_group) == 'nccl'
        for pair in sorted(pairs):  # one order for all, so that creating them cannot deadlock
            if self.rank in pair:
                members = sorted(self._ranks[rank] for rank in pair)
                self._groups[pair] = (
                    dist.new_group(members, use_local_synchronization=True)
                    if separate
                    else pp_group
                )
        self._unfinished: dict[int, deque[tuple[dist.Work, torch.Tensor]]] = defaultdict(deque)

    def send(self, tensor: torch.Tensor, peer: int, keep: int) -> None:
        """Starts sending `tensor`, which is held until it has left.

        Args:
            tensor: what to send; its storage must not be written to until the peer has it.
            peer: rank in the pipeline group.
            keep: how many sends to this peer may be unfinished. Backends that cannot tell whether a
                send is done (gloo) hold that many tensors.
        """
        tensor = tensor.detach().contiguous()
        work = dist.isend(tensor, self._ranks[peer], group=self._groups[self.rank, peer])
        unfinished = self._unfinished[peer]
        unfinished.append((work, tensor))
        while unfinished and (len(unfinished) > keep or unfinished[0][0].is_completed()):
            unfinished.popleft()[0].wait()

    def post(self, message: Message, peer: int) -> Incoming:
        """Posts the receive of the next message from `peer`."""
        tensor = torch.empty(message.shape, dtype=message.dtype, device=message.device)
        work = dist.irecv(tensor, self._ranks[peer], group=self._groups[peer, self.rank])
        return Incoming(tensor, work)

    def finish(self) -> None:
        """Waits for every send."""
        for unfinished in self._unfinished.values():
            while unfinished:
                unfinished.popleft()[0].wait()
