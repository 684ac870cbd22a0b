"""Moves of saved activations in a program: the executor's hand on the activation store."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatron_zbpp.analysis.program import Begin, Program, Receive, Send
from megatron_zbpp.ir import Pass
from megatron_zbpp.ir.graph import HOST, PARTNER, TRANSFERS
from megatron_zbpp.runtime.key import Key, key_of

if TYPE_CHECKING:
    from megatron_zbpp.runtime.activations.copies import Keeping
    from megatron_zbpp.runtime.activations.store import ActivationStore

_OUT, _BACK = TRANSFERS[HOST]
_SENT, _FETCHED = TRANSFERS[PARTNER]
KINDS = (_OUT, _BACK, _SENT, _FETCHED)


@dataclass(frozen=True, eq=False)
class Moving:
    """Saved activations that a program moves."""

    sent: Mapping[Key, Send]  # by its key, the send of what its forward has saved
    fetched: Mapping[Key, Receive]  # the receive with which it comes back
    leaving: frozenset[Key]  # those that leave the device, to the host or to the partner

    @classmethod
    def of(cls, program: Program) -> Moving:
        """Return the transfers of activations in the program of a rank."""
        saved = [i for i in program if isinstance(i, Send | Receive) and i.saved]
        sent = {
            key_of(i.consumer): i for i in saved if isinstance(i, Send) and i.consumer.kind == _SENT
        }
        fetched = {
            key_of(i.consumer): i
            for i in saved
            if isinstance(i, Receive) and i.consumer.kind == _FETCHED
        }
        copied = {key_of(i) for i in program if isinstance(i, Pass) and i.kind == _OUT}
        return cls(sent, fetched, frozenset({*sent, *copied}))


class Moves:
    """The transfers of one iteration on one rank.

    Args:
        moving: of the program of the rank.
        store: moves; None: nothing may.
    """

    def __init__(self, moving: Moving, store: ActivationStore | None) -> None:
        # the send or receive of what was saved that this rank waits for, while it does
        self.waits: Send | Receive | None = None
        self._store = store
        self._sent, self._fetched, self._leaving = moving.sent, moving.fetched, moving.leaving
        # of each kind of pass that moves something
        self.actions: dict[str, Callable[[Pass, object], None]] = {
            _OUT: self._leave,
            _BACK: self._begin_back,
            _SENT: self._leave,
            _FETCHED: _nothing,  # the receive in front of it has taken the memory
        }

    def held(self, saved: Collection[Key]) -> int:
        """Return how many activations this rank keeps for its partner, less those that are away.

        Args:
            saved: those that count. Of a forward that runs again its input is away, which does not.
        """
        if self._store is None:
            return 0
        return self._store.kept - sum(key in saved for key in self._store.away)

    def leaves(self, key: Key) -> bool:
        """Return whether the saved activations of a forward are elsewhere until B."""
        return key in self._leaving

    def packing(self, key: Key, received: torch.Tensor | None) -> AbstractContextManager[None]:
        """Enter the forward of a pass; its input leaves, too."""
        if key not in self._leaving:
            return nullcontext()
        sent = self._sent.get(key)
        return self._of_store.packing(key, received, None if sent is None else sent.peer)

    def await_back(self, key: Key) -> None:
        """Let later passes wait until the saved activations of a pass are back."""
        if key in self._leaving:
            self.waits = self._fetched.get(key)
            self._of_store.arrived(key)
            self.waits = None

    @contextmanager
    def using(self, key: Key) -> Iterator[None]:
        """Enter the backward of a pass."""
        if key not in self._leaving:
            yield
            return
        self.await_back(key)
        with self._of_store.using(key):
            yield

    def begin(self, instruction: Begin) -> None:
        """Begin to copy out to the host."""
        self._of_store.begin_out(key_of(instruction.leaving))

    def transfer(self, i: Send | Receive) -> None:
        """Begin to send or to receive saved activations: of this rank, or of its partner."""
        key = key_of(i.consumer)
        if i == self._sent.get(key):
            self._of_store.begin_out(key)
        elif i == self._fetched.get(key):
            self._of_store.begin_back(key)
        else:
            self.waits = i
            if isinstance(i, Receive):
                self._keeping.keep(key, i.peer)
            else:
                self._keeping.give_back(key)
            self.waits = None

    def finish(self) -> None:
        """Wait until all that was given back has left."""
        if self._store is not None:
            self._store.finish()

    def drop(self) -> None:
        """Forget everything once all that was sent has come: forwards run ahead for nothing."""
        if self._store is not None:
            self._store.drop()

    def clear(self) -> None:
        """Forget everything: after the end, or an error."""
        if self._store is not None:
            self._store.clear()

    def _leave(self, p: Pass, _: object) -> None:
        self.waits = self._sent.get(key_of(p))
        self._of_store.leave(key_of(p))
        self.waits = None

    def _begin_back(self, p: Pass, _: object) -> None:
        self._of_store.begin_back(key_of(p))

    @property
    def _of_store(self) -> ActivationStore:
        assert self._store is not None, 'programs that move activations were refused'
        return self._store

    @property
    def _keeping(self) -> Keeping:
        keeping = self._of_store.keeping
        assert keeping is not None, 'programs for partners come with channels to them'
        return keeping


def _nothing(p: Pass, _: object) -> None:
    pass
