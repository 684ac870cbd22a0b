"""Saved activations in the memory of another rank: BPipe's partner.

The one side sends storages where it would copy them to the host, the other keeps the bytes and
sends them back. How many bytes each storage has, which may differ from microbatch to microbatch,
goes ahead from host to host; the storages of a pass then travel by one call. Both sides do so at
the places that lowering has given them, in one order of all ranks: no wait here is for something
that comes later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_zbpp.runtime.activations.copies import bytes_of
from megatron_zbpp.runtime.channels import Channels, Transfer
from megatron_zbpp.runtime.key import Key


class Partner:
    """The partner that the bundles of this rank go to; begins copies as `copies.Copies` does.

    Args:
        device: whose memory is freed.
        channels: to the partner and back, of nothing else.
        peer: the partner.
    """

    def __init__(self, device: torch.device, channels: Channels, peer: int) -> None:
        self.device = device
        self._channels = channels
        self._peer = peer

    def out(self, storages: Sequence[torch.UntypedStorage]) -> tuple[object, Transfer]:
        """Begin to send `storages`; return what tells when they have left."""
        self._channels.tell_sizes([storage.nbytes() for storage in storages], self._peer)
        leaving = [bytes_of(storage, self.device) for storage in storages]
        return self._peer, self._channels.begin(leaving, self._peer)

    def back(self, left: object, storages: Sequence[torch.UntypedStorage]) -> Transfer:
        """Post receives into `storages`; return what tells when they have come."""
        arriving = [bytes_of(storage, self.device) for storage in storages]
        return self._channels.into(arriving, self._peer)

    def wait(self, mark: Transfer) -> None:
        """Let what computes from now on wait for `mark`."""
        mark.wait()

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        """Return memory of the device, there for what computes from now on."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device).untyped_storage()

    def free(self, left: object) -> None:
        """Forget what has left: its keeper sends it back, or forgets it, too."""


@dataclass(eq=False)
class _Kept:
    """The tensors that this rank keeps for a pass of its partner's.

    Attributes:
        peer: whose they are.
        tensors: what comes.
        arriving: its receive.
    """

    peer: int
    tensors: list[torch.Tensor]
    arriving: Transfer


class Keeping:
    """The activations that a rank keeps for its partner.

    Args:
        device: in whose memory.
        channels: to the partner and back.
    """

    def __init__(self, device: torch.device, channels: Channels) -> None:
        self._device = device
        self._channels = channels
        self._kept: dict[Key, _Kept] = {}
        self._leaving: deque[Transfer] = deque()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, key: Key, peer: int) -> None:
        """Post the receives of a bundle once the host of `peer` has told how much comes.

        Memory of what was sent back is free before more is taken.
        """
        sizes = self._channels.ask_sizes(peer)
        self.finish()
        tensors = [torch.empty(n, dtype=torch.uint8, device=self._device) for n in sizes]
        self._kept[key] = _Kept(peer, tensors, self._channels.into(tensors, peer))

    def give_back(self, key: Key) -> None:
        """Begin to send a bundle back."""
        kept = self._kept.pop(key)
        kept.arriving.wait()
        self._leaving.append(self._channels.begin(kept.tensors, kept.peer))

    def finish(self) -> None:
        """Wait until all that was sent back has left."""
        while self._leaving:
            self._leaving.popleft().wait()

    def drop(self) -> None:
        """Forget all that is kept, once it has come: forwards that were run ahead for nothing."""
        for kept in self._kept.values():
            kept.arriving.wait()
        self.clear()

    def clear(self) -> None:
        """Forget everything, without a wait."""
        self._kept.clear()
        self._leaving.clear()
