"""Heartbeats: statements of each rank about itself, in stores that all ranks of a job have.

A thread of each rank writes its latest statement now and then, and at once when somebody asks. So
a rank that ends since others do not come can tell those that live from those that do not. The first
that finds a culprit writes that down, too, for those that come to ask when nobody is left.

The ranks' own store is kept by the launcher, or by rank 0, which may be the one that dies: so the
last rank keeps a spare.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import NamedTuple

from torch.distributed.distributed_c10d import PrefixStore, Store

from megatron_zbpp.runtime import compat
from megatron_zbpp.runtime.guard.culprit import NOBODY, Statement, accuse

_POLL = 0.25  # seconds between two looks whether somebody asks
_SOON = 0.05  # seconds between two looks for the spare
_ANSWER = 1.0  # seconds in which who lives answers
_PATIENCE = 3.0  # seconds for all of it: a store that hangs is not waited for
_MEET = timedelta(seconds=60)  # to connect with the spare
_GONE = (
    'culprit: not known: no store in which ranks say where they are answers; global rank 0 keeps '
    'one, or the launcher of its host, and the last rank the other'
)


class Heartbeats:
    """The statements of one rank, and its questions to the others.

    Args:
        rank: this one in the world.
        size: ranks of the world.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._keeps = rank in (0, size - 1)
        self._statement = Statement('before its first pass')
        self._ended = threading.Event()
        common = _Board('the common store', rank, size, self._latest, _common)
        spare = _Board(
            'the spare store',
            rank,
            size,
            self._latest,
            lambda: _spare(rank, size, common, self._ended),
        )
        self._boards = common, spare

    def _latest(self) -> Statement:
        return self._statement

    def meet(self) -> None:
        """Wait for the stores, so that whoever dies from now on is named; not for long."""
        deadline = time.monotonic() + _PATIENCE
        for board in self._boards:
            board.looked.wait(max(0, deadline - time.monotonic()))

    def say(self, statement: Statement) -> None:
        """Take note of where the rank stands, until it has said its last word; never waits."""
        if not self._statement.ending:
            self._statement = statement

    def end(self) -> None:
        """Say that the training is over."""
        self._statement = Statement('the end', over=True)
        self._ended.set()
        deadline = time.monotonic() + _PATIENCE
        for board in self._boards:
            board.questions.put(None)
        for board in self._boards:
            board.thread.join(max(0, deadline - time.monotonic()))

    def accuse(self, own: Statement, stalled: float) -> str:
        """Return who is to blame, in one line, after a second or two.

        Args:
            own: the last statement of this rank.
            stalled: see `culprit.accuse`.
        """
        self._statement = own
        question = _Question(own, stalled, queue.SimpleQueue())
        asked = [board for board in self._boards if board.thread.is_alive()]
        for board in asked:
            board.questions.put(question)
        deadline = time.monotonic() + _PATIENCE
        for _ in asked:
            try:
                line = question.lines.get(timeout=max(0, deadline - time.monotonic()))
            except queue.Empty:
                break
            if line:
                return line
        return self._heard()

    def _heard(self) -> str:
        return next((board.verdict for board in self._boards if board.verdict), _GONE)

    def linger(self) -> None:
        """Wait a moment on a rank that keeps a store: others are still to ask."""
        if self._keeps:
            time.sleep(_ANSWER)


class _Question(NamedTuple):
    """A question for the culprit; see `Heartbeats.accuse`. A lost store puts an empty line."""

    own: Statement
    stalled: float
    lines: queue.SimpleQueue[str]


class _Board:
    """One store, and the thread that writes there, answers and asks.

    Args:
        name: of the thread.
        rank: this one in the world.
        size: ranks of the world.
        latest: returns the latest statement of this rank.
        opened: returns the store; None: there is none.

    Attributes:
        thread: it ends with the training, or with the store.
        questions: to be asked there; None is the last.
        looked: whether it is known if there is a store.
        store: once it is open.
        verdict: what the first rank that found a culprit has said; empty: nothing.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        size: int,
        latest: Callable[[], Statement],
        opened: Callable[[], Store | None],
    ) -> None:
        self._rank, self._size, self._latest, self._opened = rank, size, latest, opened
        self._written: Statement | None = None
        self._answered = 0
        self.verdict = ''
        self.looked = threading.Event()
        self.store: Store | None = None
        self.questions: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=f'heartbeats in {name}', daemon=True)
        self.thread.start()

    def _run(self) -> None:
        question = None
        try:
            self.store = self._opened()
            self.looked.set()
            while self.store is not None:
                try:
                    question = self.questions.get(timeout=_POLL)
                except queue.Empty:
                    self._write(self.store)
                    continue
                if question is None:
                    self._write(self.store)
                    return
                question.lines.put(self._accuse(self.store, *question[:2]))
        except (RuntimeError, OSError):  # it is gone: who asks hears that, and asks elsewhere
            self.looked.set()
            if question is not None:
                question.lines.put('')

    def _write(self, store: Store) -> None:
        asked = self._answered
        while store.check([f'asked {asked + 1}']):
            asked += 1
        if asked:
            self._hear(store)
        statement = self._latest()
        if asked == self._answered and statement == self._written:
            return
        store.set(f'said {self._rank}', f'{asked} {statement.to_json()}')
        self._answered, self._written = asked, statement

    def _hear(self, store: Store) -> None:
        if not self.verdict and store.check(['verdict']):
            self.verdict = store.get('verdict').decode()

    def _accuse(self, store: Store, own: Statement, stalled: float) -> str:
        number = store.add('questions', 1)
        store.set(f'said {self._rank}', f'{number} {own.to_json()}')
        store.set(f'asked {number}', '')
        deadline = time.monotonic() + _ANSWER
        while True:
            self._hear(store)  # who keeps the store may leave before its ranks have answered
            said = dict(self._said(store))
            answering = {rank for rank, (at, _) in said.items() if at >= number}
            if len(answering) == self._size or time.monotonic() > deadline:
                break
            time.sleep(_POLL / 2)
        statements = {rank: statement for rank, (_, statement) in said.items()}
        line = accuse(self._rank, statements, answering, stalled)
        if line != NOBODY:
            store.compare_set('verdict', '', f'{line} (so says global rank {self._rank})')
        return line

    def _said(self, store: Store) -> Iterator[tuple[int, tuple[int, Statement]]]:
        for rank in range(self._size):
            if store.check([f'said {rank}']):
                number, _, statement = store.get(f'said {rank}').decode().partition(' ')
                yield rank, (int(number), Statement.from_json(statement))


_PREFIX = 'megatron_zbpp heartbeats'
_served: compat.TCPStore | None = None  # as long as the process lives: others may still ask


def _common() -> Store:
    """Return a connection of its own to the ranks' store: a call on another's may wait for it."""
    return PrefixStore(_PREFIX, compat.another_client(compat.default_store()))


def _spare(rank: int, size: int, common: _Board, ended: threading.Event) -> Store | None:
    global _served
    server = compat.tcp_store(compat.default_store())
    if server is None or size == 1:
        return None
    while common.store is None or not (rank == size - 1 or common.store.check(['spare'])):
        if ended.wait(_SOON) or not common.thread.is_alive():
            return None
    if rank == size - 1:
        served = _served if common.store.check(['spare']) else None
        if served is None:  # nor is one left of an earlier training of these ranks
            host = _address_towards(server.host, server.port)
            served = _served = compat.TCPStore(host, 0, is_master=True, wait_for_workers=False)
            common.store.set('spare', f'{served.port} {host}')
        return PrefixStore(_PREFIX, served)
    port, _, host = common.store.get('spare').decode().partition(' ')
    spare = compat.TCPStore(host, int(port), timeout=_MEET, wait_for_workers=False)
    return PrefixStore(_PREFIX, spare)


def _address_towards(host: str, port: int) -> str:
    """Return the address of this host on its way to another one; nothing is sent."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return probe.getsockname()[0]
