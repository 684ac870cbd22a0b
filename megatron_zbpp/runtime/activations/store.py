"""The activation store: tensors that autograd saved of each pass, freed and brought back as one.

A storage moves if nobody but autograd holds it when it is to go. So what outlives the pass stays by
itself, whoever holds it: weights and their FP8 copies, rotary tables, masks, the buffer into which
sequence parallelism gathers, tensors that a layer keeps beside what it saves.

An executor moves tensors by `ActivationTransfers`, the passes and instructions of its program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from megatron_zbpp.analysis.program import Begin, Receive, Send
from megatron_zbpp.ir import Pass
from megatron_zbpp.runtime import compat
from megatron_zbpp.runtime.activations.copies import Copies, Engine, Keeping, Partner, PinningError
from megatron_zbpp.runtime.channels import Channels
from megatron_zbpp.runtime.log import rank_log
from megatron_zbpp.runtime.stage import Key, key_of
from megatron_zbpp.runtime.tables import BACK, FETCHED, OUT, SENT, Tables

_HELD = 'held by others'
SMALL = 1024  # elements: below, a copy costs more than it frees
_MUCH = 0.1  # of what was to leave


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
    stayed: Counter[str] = field(default_factory=Counter[str])

    def __str__(self) -> str:
        stayed = ', '.join(f'{why} {size / 2**20:.2f}' for why, size in self.stayed.items())
        stay = f'; stay: {stayed}' if stayed else ''
        return f'{self.moved / 2**20:.2f} MiB of a microbatch leave{stay}'

    @classmethod
    def sum(cls, parts: Iterable[Bytes]) -> Bytes:
        """Return the bytes of all slices of a microbatch; slices share the bytes that stay."""
        whole = cls()
        for own in parts:
            whole.moved += own.moved
            for why, nbytes in own.stayed.items():
                whole.stayed[why] = max(nbytes, whole.stayed[why])
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
        self._copies, self._small = copies, small
        self._staying, self._shared = staying, shared
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
                self.bytes.stayed[why] += tensor.nbytes
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
        going = [piece for piece in self._pieces.values() if self._may_go(piece)]
        storages = [piece.storage for piece in going if piece.storage is not None]
        self._left, self._mark = self._copies.out(storages)
        self._going = going
        self.bytes.moved = sum(piece.nbytes for piece in going)

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
            return 'needed by other slices'
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
            self.bytes.stayed['recomputed by layers'] += piece.storage.nbytes()
            return False
        if compat.holders(piece.storage) > (1 if piece.lasting else 0):
            self.bytes.stayed[_HELD] += piece.nbytes
            return False
        return True


class ActivationStore:
    """Bundles of passes, by their keys, from F to B: on the device, the host or a partner."""

    def __init__(
        self,
        device: torch.device,  # whose memory is freed
        say: Callable[[str], None] | None = None,  # tells the user
        small: int | None = None,  # tensors of fewer elements stay; None: as SMALL says
        copies: Copies | None = None,  # the copy engine of the device; None: its own
    ) -> None:
        # what this rank keeps for its partner; None: none has joined
        self.keeping: Keeping | None = None
        self._copies, self._small = copies or Copies(device), SMALL if small is None else small
        self._say = say or rank_log.warning
        self._staying: frozenset[int] = frozenset()
        self._shared: Sequence[Set[int]] = ()
        self._latest: dict[int, dict[int, Bytes]] = {}  # by stage and slice
        self._parameters: dict[tuple, torch.Tensor] = {}
        self.bundles: dict[Key, SavedActivations] = {}
        self._said = False
        self._told = False

    @property
    def away(self) -> frozenset[Key]:
        """The keys of bundles that are not on the device."""
        return frozenset(key for key, bundle in self.bundles.items() if bundle.away)

    @property
    def bytes(self) -> dict[int, Bytes]:
        """Bytes that each stage moved in its latest pass that left, summed over slices."""
        return {stage: Bytes.sum(own.values()) for stage, own in self._latest.items()}

    def copy_times(self) -> dict[int, float]:
        """Return seconds of one way of an activation to the host, by stage, as measured now."""
        rate = self._copies.seconds_per_byte()
        return {} if rate is None else {s: rate * b.moved for s, b in self.bytes.items()}

    @property
    def kept(self) -> int:
        """The number of bundles that this rank keeps for its partner."""
        return 0 if self.keeping is None else len(self.keeping)

    def join(self, channels: Channels) -> None:
        """Let bundles go to partners, by channels of nothing else."""
        if self.keeping is None or channels is not self.keeping.channels:
            self.keeping = Keeping(self._copies.device, channels)

    def keep(self, parameters: Iterable[torch.Tensor], shared: Sequence[Set[int]] = ()) -> None:
        """Let these stay, and be seen as themselves by the backwards of what leaves.

        Quantized ones have no memory of their own: some tell another place whenever they are asked,
        which may be that of an activation later. Their parts stay since they hold them. `shared`
        has addresses of storages that several passes save, which change while passes run.
        """
        self._shared = shared
        found: list[Any] = list(parameters)
        plain = [each for each in found if type(each.data) is torch.Tensor]
        self._parameters = {compat.place_of(each): each for each in plain}
        every = [*plain, *(p.main_grad for p in found if hasattr(p, 'main_grad'))]
        self._staying = frozenset(each.untyped_storage()._cdata for each in every)

    def tell(self, everything: bool) -> None:
        """Say, once there is something to say, what leaves and what stays."""
        if self._told or not (left := self.bytes):
            return
        self._told = True
        for stage, found in sorted(left.items()):
            held = found.stayed[_HELD]
            much = held > _MUCH * (held + found.moved)
            if everything or much:
                more = ': so the device holds more than planned' if much else ''
                self._say(f'offload of stage {stage}: {found}{more}')

    @contextmanager
    def packing(
        self, key: Key, received: torch.Tensor | None = None, partner: int | None = None
    ) -> Iterator[None]:
        """Enter the forward of a pass that leaves, to a partner or the host.

        The memory of `received`, the stage's input, goes too; its holder keeps it until B.
        """
        engine: Engine = self._copies
        if partner is not None:
            assert self.keeping is not None, 'programs for partners come with channels to them'
            engine = Partner(self._copies.device, self.keeping.channels, partner)
        bundle = self.bundles[key] = SavedActivations(
            engine, self._staying, self._small, self._shared
        )
        if received is not None:
            bundle.take(received)
        with saved_tensors_hooks(bundle.pack, bundle.unpack):
            yield

    def begin_out(self, key: Key) -> None:
        """Begin to copy it out; where the host has no room it stays, which is said once."""
        bundle = self.bundles[key]
        try:
            bundle.begin_out()
        except PinningError as error:
            if not self._said:
                self._say(f'activations stay on the device: {error}')
            self._said = True
        stage, _, part = key
        self._latest.setdefault(stage, {})[part] = bundle.bytes

    @contextmanager
    def during_backward(self, key: Key) -> Iterator[None]:
        """Enter the backward of a pass, which needs it; forget it then."""
        if key not in self.bundles:
            yield
            return
        with compat.saved_parameters(self._parameters):
            yield
        self.bundles.pop(key).drop()

    def finish(self) -> None:
        """Wait until all that goes by channels has left; give back what the host needs no more."""
        self._copies.finish()
        if self.keeping is not None:
            self.keeping.finish()
            self.keeping.channels.finish()

    def clear(self) -> None:
        """Forget everything: after an error, so that no activation outlives its iteration."""
        while self.bundles:
            self.bundles.popitem()[1].drop()
        if self.keeping is not None:
            self.keeping.clear()

    def drop(self) -> None:
        """Forget everything once all that was sent has come: forwards run ahead for nothing."""
        for bundle in self.bundles.values():
            bundle.settle()
        if self.keeping is not None:
            self.keeping.drop()
            self.keeping.channels.finish()
        self.clear()

    def transfers(self, tables: Tables) -> ActivationTransfers:
        """Return the transfers of one iteration of a program."""
        return ActivationTransfers(tables, self)


class ActivationTransfers:
    """The transfers of one iteration on one rank."""

    def __init__(self, tables: Tables, store: ActivationStore) -> None:
        # the send or receive of what was saved that this rank waits for, while it does
        self.waits: Send | Receive | None = None
        self.store = store
        self._sent, self._fetched = tables.sent, tables.fetched
        # of each kind of pass that moves something
        self.actions: dict[str, Callable[[Pass, object], None]] = {
            OUT: self._leave,
            BACK: lambda p, _: store.bundles[key_of(p)].begin_back(),
            SENT: self._leave,
            FETCHED: lambda p, _: None,  # the receive in front of it has taken the memory
        }

    def held(self, saved: Collection[Key]) -> int:
        """Return how many activations this rank keeps for its partner, less those that are away.

        `saved` are those that count: not the input, which is away, of a forward that runs again.
        """
        return self.store.kept - sum(key in saved for key in self.store.away)

    def packing(self, key: Key, received: torch.Tensor | None) -> AbstractContextManager[None]:
        """Enter the forward of a pass that leaves; its input leaves, too."""
        sent = self._sent.get(key)
        return self.store.packing(key, received, None if sent is None else sent.peer)

    def wait_until_loaded(self, key: Key) -> None:
        """Let later passes wait until the saved activations of a pass are back."""
        self.waits = self._fetched.get(key)
        if key in self.store.bundles:
            self.store.bundles[key].arrived()
        self.waits = None

    def begin(self, instruction: Begin) -> None:
        """Begin to copy out to the host."""
        self.store.begin_out(key_of(instruction.leaving))

    def transfer(self, i: Send | Receive) -> None:
        """Begin to send or to receive saved activations: of this rank, or of its partner."""
        key = key_of(i.consumer)
        if i == self._sent.get(key):
            self.store.begin_out(key)
        elif i == self._fetched.get(key):
            self.store.bundles[key].begin_back()
        else:
            keeping = self.store.keeping
            assert keeping is not None, 'programs for partners come with channels to them'
            self.waits = i
            if isinstance(i, Receive):
                keeping.keep(key, i.peer)
            else:
                keeping.give_back(key)
            self.waits = None

    def _leave(self, p: Pass, _: object) -> None:
        self.waits = self._sent.get(key_of(p))
        self.store.bundles[key_of(p)].leave()
        self.waits = None
