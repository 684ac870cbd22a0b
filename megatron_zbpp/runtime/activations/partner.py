"""What forwards have saved, in the memory of another rank: BPipe's partner.

The one side sends storages where it would copy them to the host, the other keeps the bytes and
sends them back. How many bytes each storage has, which may differ from microbatch to microbatch,
goes ahead from host to host. Both sides do so at the places that lowering has given them, in one
order of all ranks: no wait here is for something that comes later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_zbpp.runtime.activations.copies import bytes_of
from megatron_zbpp.runtime.channels import Channels, Transfer

Key = tuple[int, int]  # (stage, microbatch)


class Partner:
    """Where the bundles of this rank go; begins copies as `copies.Copies` does.

    Args:
        device: whose memory is freed.
        channels: to the partner and back, of nothing else.
        peer: the partner.
    """

    def __init__(self, device: torch.device, channels: Channels, peer: int) -> None:
        self.device = device
        self._channels = channels
        self._peer = peer

    def out(self, storages: Sequence[torch.UntypedStorage]) -> tuple[object, Sequence[Transfer]]:
        """Begin to send `storages`; return what tells when they have left."""
        self._channels.tell_sizes([storage.nbytes() for storage in storages], self._peer)
        return self._peer, [
            self._channels.begin(bytes_of(s, self.device), self._peer) for s in storages
        ]

    def back(self, left: object, storages: Sequence[torch.UntypedStorage]) -> Sequence[Transfer]:
        """Post receives into `storages`; return what tells when they have come."""
        return [self._channels.into(bytes_of(s, self.device), self._peer) for s in storages]

    def wait(self, mark: Sequence[Transfer]) -> None:
        """Let what computes from now on wait for `mark`."""
        for transfer in mark:
            transfer.wait()

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        """Return memory of the device, there for what computes from now on."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device).untyped_storage()

    def free(self, left: object) -> None:
        """Forget what has left: its keeper sends it back, or forgets it, too."""


@dataclass(eq=False)
class _Kept:
    """What this rank keeps of a pass of its partner's.

    Attributes:
        peer: whose they are.
        pieces: what comes, each with its receive.
    """

    peer: int
    pieces: list[tuple[torch.Tensor, Transfer]]


class Keeping:
    """What a rank keeps for its partner.

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
        pieces = [(tensor, self._channels.into(tensor, peer)) for tensor in tensors]
        self._kept[key] = _Kept(peer, pieces)

    def give_back(self, key: Key) -> None:
        """Begin to send a bundle back."""
        kept = self._kept.pop(key)
        for tensor, arriving in kept.pieces:
            arriving.wait()
            self._leaving.append(self._channels.begin(tensor, kept.peer))

    def finish(self) -> None:
        """Wait until all that was sent back has left."""
        while self._leaving:
            self._leaving.popleft().wait()

    def drop(self) -> None:
        """Forget all that is kept, once it has come: forwards that were run ahead for nothing."""
        for kept in self._kept.values():
            for _, arriving in kept.pieces:
                arriving.wait()
        self.clear()

    def clear(self) -> None:
        """Forget everything, without a wait."""
        self._kept.clear()
        self._leaving.clear()
