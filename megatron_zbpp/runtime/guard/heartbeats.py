"""What each rank says of itself, in the store that all ranks of a job have.

A thread of each rank writes its latest statement now and then, and at once when somebody asks. So
a rank that ends since others do not come can tell those that live from those that do not. The store
is kept by the launcher, or by rank 0; where it is gone, nobody is accused.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

from megatron_zbpp.runtime import compat
from megatron_zbpp.runtime.guard.culprit import Statement, accuse

_POLL = 0.25  # seconds between two looks whether somebody asks
_ANSWER = 1.0  # seconds in which who lives answers
_PATIENCE = 3.0  # seconds for all of it: a store that hangs is not waited for
_GONE = (
    'culprit: not known: the store in which ranks say where they are does not answer; '
    'global rank 0 keeps it, or the launcher of its host'
)


class Heartbeats:
    """The statements of one rank, and its questions to the others.

    Args:
        rank: this one in the world.
        size: ranks of the world.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._statement = Statement('before its first pass')
        self._written: Statement | None = None
        self._answered = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name='heartbeats', daemon=True)
        self._thread.start()

    def say(self, statement: Statement) -> None:
        """Take note of where the rank stands, until it has said its last word; never waits."""
        if not self._statement.ending:
            self._statement = statement

    def end(self) -> None:
        """Say that the training is over."""
        self._statement = Statement('the end', over=True)
        self._ended.set()
        self._thread.join(_PATIENCE)

    def accuse(self, own: Statement, stalled: float) -> str:
        """Return who is to blame, in one line, after a second or two.

        Args:
            own: the last statement of this rank.
            stalled: see `culprit.accuse`.
        """
        self._statement = own
        lines = [_GONE]
        asking = threading.Thread(target=self._ask, args=(own, stalled, lines), daemon=True)
        try:
            asking.start()
        except RuntimeError:  # Python is ending, and begins no more threads
            return _GONE
        asking.join(_PATIENCE)
        return lines[-1]

    def linger(self) -> None:
        """Wait a moment on rank 0, with which the store may go: others are still to ask."""
        if self._rank == 0:
            time.sleep(_ANSWER)

    def _run(self) -> None:
        """Write what is new, and answer; end with the training, or with the store."""
        try:
            store = _store()
            while not self._ended.wait(_POLL):
                self._write(store)
            self._write(store)
        except RuntimeError:  # the store is gone: a question will find that out and say so
            return

    def _write(self, store: Store) -> None:
        asked = self._answered
        while store.check([f'asked {asked + 1}']):
            asked += 1
        if asked == self._answered and self._statement == self._written:
            return
        statement = self._statement
        store.set(f'said {self._rank}', f'{asked} {statement.to_json()}')
        self._answered, self._written = asked, statement

    def _ask(self, own: Statement, stalled: float, lines: list[str]) -> None:
        try:
            store = _store()
            number = store.add('questions', 1)
            store.set(f'said {self._rank}', f'{number} {own.to_json()}')
            store.set(f'asked {number}', '')
            deadline = time.monotonic() + _ANSWER
            while True:
                said = dict(self._said(store))
                answering = {rank for rank, (at, _) in said.items() if at >= number}
                if len(answering) == self._size or time.monotonic() > deadline:
                    break
                time.sleep(_POLL / 2)
            statements = {rank: statement for rank, (_, statement) in said.items()}
            lines.append(accuse(self._rank, statements, answering, stalled))
        except RuntimeError:
            return  # what is said then stands in `lines` already

    def _said(self, store: Store) -> Iterator[tuple[int, tuple[int, Statement]]]:
        """Yield each rank with the latest question that it has heard, by number, and its word."""
        for rank in range(self._size):
            if store.check([f'said {rank}']):
                number, _, statement = store.get(f'said {rank}').decode().partition(' ')
                yield rank, (int(number), Statement.from_json(statement))


def _store() -> Store:
    """Return a connection of its own to the job's store: a call on another's may wait for it."""
    store: Any = compat.default_store()
    if hasattr(store, 'clone'):
        store = store.clone()
    return PrefixStore('megatron_zbpp heartbeats', store)
