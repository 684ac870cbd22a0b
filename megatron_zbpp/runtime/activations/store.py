"""The activation store: which passes' saved tensors are where, and how many bytes that is.

An executor moves tensors by `ActivationTransfers`, the passes and instructions of its program.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from megatron_zbpp.analysis.program import Begin, Receive, Send
from megatron_zbpp.ir import Pass
from megatron_zbpp.runtime import compat
from megatron_zbpp.runtime.activations.bundle import HELD, SMALL, Bytes, SavedActivations
from megatron_zbpp.runtime.activations.copies import Copies, Engine, Keeping, Partner
from megatron_zbpp.runtime.activations.host_memory import PinningError
from megatron_zbpp.runtime.channels import Channels
from megatron_zbpp.runtime.log import rank_log
from megatron_zbpp.runtime.stage import Key, key_of
from megatron_zbpp.runtime.tables import BACK, FETCHED, OUT, SENT, Tables

_MUCH = 0.1  # of what was to leave


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
        self._channels: Channels | None = None
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
        if channels is not self._channels:
            self._channels = channels
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
            held = found.stayed.get(HELD, 0)
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
            assert self._channels is not None, 'programs for partners come with channels to them'
            engine = Partner(self._copies.device, self._channels, partner)
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
        bundle = self.bundles.get(key)
        if bundle is None:
            yield
            return
        with compat.saved_parameters(self._parameters):
            yield
        self.bundles.pop(key).drop()

    def finish(self) -> None:
        """Wait until all that goes by channels has left; give back what the host needs no more."""
        self._copies.finish()
        if self.keeping is not None and self._channels is not None:
            self.keeping.finish()
            self._channels.finish()

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
        if self.keeping is not None and self._channels is not None:
            self.keeping.drop()
            self._channels.finish()
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
