"""The tensors that autograd saved of one pass: packed by hooks, freed and brought back as one.

A storage moves if nobody but autograd holds it when it is to go. So what outlives the pass stays by
itself, whoever holds it: weights and their FP8 copies, rotary tables, masks, the buffer into which
sequence parallelism gathers, tensors that a layer keeps beside what it saves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from megatron_zbpp.runtime import compat
from megatron_zbpp.runtime.activations.copies import Engine
from megatron_zbpp.runtime.activations.host_memory import PinningError

HELD = 'held by others'
_SHARED = 'needed by other slices'
SMALL = 1024  # elements: below, a copy costs more than it frees


@dataclass(eq=False, slots=True)
class SavedStorage:
    """A storage that autograd has saved tensors of."""

    storage: torch.UntypedStorage | None  # on the device; None while it is away
    nbytes: int  # of it
    # whether somebody holds the storage itself, which so loses its memory only
    lasting: bool = False


class Handle(NamedTuple):
    """A saved tensor as part of a piece."""

    piece: SavedStorage
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


@dataclass
class Bytes:
    """Bytes of a microbatch in a stage: moved away, and kept on the device by the reason."""

    moved: int = 0
    stayed: dict[str, int] = field(default_factory=dict[str, int])

    def __str__(self) -> str:
        stayed = ', '.join(f'{why} {size / 2**20:.2f}' for why, size in self.stayed.items())
        stay = f'; stay: {stayed}' if stayed else ''
        return f'{self.moved / 2**20:.2f} MiB of a microbatch leave{stay}'

    def stay(self, why: str, nbytes: int) -> None:
        """Count bytes that stay."""
        self.stayed[why] = self.stayed.get(why, 0) + nbytes

    @classmethod
    def sum(cls, parts: Iterable[Bytes]) -> Bytes:
        """Return the bytes of all slices of a microbatch; slices share the bytes that stay."""
        whole = cls()
        for own in parts:
            whole.moved += own.moved
            for why, nbytes in own.stayed.items():
                whole.stayed[why] = max(nbytes, whole.stayed.get(why, 0))
        return whole


class SavedActivations:
    """The saved tensors of one (stage, microbatch, slice)."""

    def __init__(
        self,
        copies: Engine,  # of the device
        staying: Set[int],  # storages that stay, by their address: those of parameters
        small: int = SMALL,  # memory of fewer elements stays
        shared: Sequence[Set[int]] = (),  # storages of several passes, when a tensor is saved
    ) -> None:
        self._copies = copies
        self._staying = staying
        self._small = small
        self._shared = shared
        self._pieces: dict[int, SavedStorage] = {}
        self._going: list[SavedStorage] = []
        self._left: Any = None  # what has left, by the engine
        self._mark: object = None  # of the copy that was begun last
        self._arriving = False
        self.bytes = Bytes()  # what became of them
        self.away = False  # whether it is not on the device

    def pack(self, tensor: torch.Tensor) -> Handle | torch.Tensor:
        """Return the handle that autograd keeps in place of `tensor`."""
        storage = tensor.untyped_storage()
        why = self._why_it_stays(tensor, storage)
        if why:
            if storage._cdata not in self._pieces:
                self.bytes.stay(why, tensor.nbytes)
            return tensor.detach()  # an output that kept itself would never be freed
        piece = self._piece(storage)
        return Handle(
            piece, tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride()
        )

    def unpack(self, packed: Handle | torch.Tensor) -> torch.Tensor:
        """Return the tensor that was packed; where it comes back, there for what runs now."""
        if isinstance(packed, torch.Tensor):
            return packed
        if self._arriving:
            self.arrived()
        piece, dtype, offset, size, stride = packed
        assert piece.storage is not None, 'its load comes before its backward'
        tensor = torch.empty(0, dtype=dtype, device=self._copies.device)
        return tensor.set_(piece.storage, offset, size, stride)  # type: ignore[call-overload]

    def take(self, received: torch.Tensor) -> None:
        """Move the memory of `received`, too, which its holder keeps: the input of the stage."""
        storage = received.untyped_storage()
        if self._why_it_stays(received, storage) is None:
            self._piece(storage).lasting = True

    def begin_out(self) -> None:
        """Begin to copy what may go; PinningError: the host has no room, and everything stays."""
        self._going = [piece for piece in self._pieces.values() if self._may_go(piece)]
        storages = [piece.storage for piece in self._going if piece.storage is not None]
        try:
            self._left, self._mark = self._copies.out(storages)
        except PinningError:
            self._going = []
            raise
        self.bytes.moved = sum(piece.nbytes for piece in self._going)

    def leave(self) -> None:
        """Free the storages that are copied away: later passes wait until the copy has ended."""
        if not self._going:
            return
        self._copies.wait(self._mark)
        self._mark = None  # which may hold what leaves
        for piece in self._going:
            if piece.lasting and piece.storage is not None:
                piece.storage.resize_(0)
            else:
                piece.storage = None
        self.away = True

    def begin_back(self) -> None:
        """Take memory, and begin to copy into it."""
        if not self.away or self._left is None:
            return
        storages: list[torch.UntypedStorage] = []
        for piece in self._going:
            if piece.storage is None:
                piece.storage = self._copies.allocate(piece.nbytes)
            else:
                piece.storage.resize_(piece.nbytes)
            storages.append(piece.storage)
        self._mark = self._copies.back(self._left, storages)
        self._left, self._arriving, self.away = None, True, False

    def arrived(self) -> None:
        """Let later passes wait until all storages are back."""
        if self._arriving:
            self._copies.wait(self._mark)
            self._arriving = False

    def settle(self) -> None:
        """Let the host wait for the copy that was begun last: of one that is given up."""
        if self._mark is not None:
            self._copies.wait(self._mark)
            self._mark = None

    def drop(self) -> None:
        """Forget everything; memory that a W still uses is freed behind that."""
        if self._left is not None:
            self._copies.free(self._left)
            self._left = None
        self._pieces.clear()
        self._going = []

    def _piece(self, storage: torch.UntypedStorage) -> SavedStorage:
        piece = self._pieces.get(storage._cdata)
        if piece is None:
            piece = self._pieces[storage._cdata] = SavedStorage(storage, storage.nbytes())
        return piece

    def _why_it_stays(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> str | None:
        if storage._cdata in self._staying:
            return 'parameters'
        if any(storage._cdata in own for own in self._shared):
            return _SHARED
        if storage._cdata in self._pieces:
            return None
        if type(tensor) is not torch.Tensor or tensor.is_neg() or tensor.is_conj():
            return 'special types'
        if tensor.device != self._copies.device or tensor.layout is not torch.strided:
            return 'elsewhere'
        # of a small part of what is large, all would stay
        return 'small tensors' if storage.nbytes() < self._small * tensor.element_size() else None

    def _may_go(self, piece: SavedStorage) -> bool:
        assert piece.storage is not None
        if piece.storage.nbytes() != piece.nbytes:  # a layer drops it, and makes it again
            self.bytes.stay('recomputed by layers', piece.storage.nbytes())
            return False
        if compat.holders(piece.storage) > (1 if piece.lasting else 0):
            self.bytes.stay(HELD, piece.nbytes)
            return False
        return True
