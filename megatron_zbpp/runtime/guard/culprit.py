"""The rank at fault where ranks wait for each other, found by each one's statement on itself.

>>> said = {0: RankStatus('0B0', (1,)), 1: RankStatus('1B0', (2,)), 2: RankStatus('2F4')}
>>> print(find_culprit(0, said, answering={0, 1}))
culprit: global rank 2, which does not answer (its last word: 2F4); 0 waits for 1, 1 waits for 2

A thread of each rank writes its latest statement into stores that all ranks of a job have, now and
then, and at once when a rank asks. So a rank that ends since others do not come can tell ranks that
live from ranks that do not. The first that finds a culprit writes its line down, too, for ranks
that come to ask when no other is left.

The ranks' own store is kept by the launcher, or by rank 0, which may be the one that dies: so the
last rank keeps a spare.
"""

from __future__ import annotations

import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from math import inf
from typing import NamedTuple

from torch.distributed.distributed_c10d import PrefixStore, Store

from megatron_zbpp.runtime import compat

NOBODY = 'culprit: none found among those that are waited for'


@dataclass(frozen=True)
class RankStatus:
    """The statement of a rank about itself."""

    now: str  # where it stands, for people
    # global ranks that it waits for: any of them may be late; empty: for none
    waits: tuple[int, ...] = ()
    seconds: float = 0.0  # since its last step forward
    failure: str = ''  # what it ends with by its own fault; empty: nothing
    ending: bool = False  # whether it ends since others have failed
    over: bool = False  # whether it has ended its training

    def to_json(self) -> str:
        """Return the status as text for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankStatus:
        """Return the status that `to_json` wrote."""
        said = json.loads(text)
        return cls(**said | {'waits': tuple(said['waits'])})


def find_culprit(
    rank: int, said: Mapping[int, RankStatus], answering: Collection[int], stalled: float = inf
) -> str:
    """Return one line: the rank at fault, and the ranks that wait for each other.

    The search follows what `rank` waits for, by the latest statements, and what those wait for.
    Ranks that are `answering` live. Who stands still for the `stalled` seconds that `rank` has
    waited, and waits for nobody, is to blame; infinite: a rank is known to have died.
    """

    def fault_of(one: int) -> str:
        if one not in said:
            return 'has never said where it is'
        own = said[one]
        if own.failure:
            return f'failed at {own.now}: {own.failure}'
        if own.over:
            return 'has ended its training'
        if own.ending:
            return ''
        if one not in answering:
            return f'does not answer (its last word: {own.now})'
        if not own.waits and own.seconds >= stalled / 2:
            return f'stands for {own.seconds:.0f} s at {own.now}'
        return ''

    found: dict[int, str] = {}
    to_ask = [rank]
    while to_ask:
        one = to_ask.pop(0)
        if one not in found:
            found[one] = fault_of(one)
            to_ask += () if found[one] else said[one].waits
    guilty = {one: why for one, why in sorted(found.items()) if why}
    if not guilty:
        return NOBODY
    waiting = {one: set(said[one].waits) for one in sorted(found) if one not in guilty}
    pairs = [
        f'{one} waits for {", ".join(map(str, sorted(whom & set(guilty) or whom)))}'
        for one, whom in waiting.items()
        if whom
    ]
    facts = ', and '.join(f'{one}, which {why}' for one, why in guilty.items())
    line = f'culprit: global rank{"s" * (len(guilty) > 1)} {facts}'
    return f'{line}; {", ".join(pairs)}' if pairs else line


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
    """The statements of one rank, and its questions to the others."""

    def __init__(self, rank: int, size: int) -> None:
        self._keeps = rank in (0, size - 1)
        self._statement = RankStatus('before its first pass')
        self._ended = threading.Event()
        store = partial(_StatusStore, rank=rank, size=size, latest=lambda: self._statement)
        # a connection of its own to the ranks' store: a call on another's may wait for it
        common = store(
            'the common store',
            opened=lambda: PrefixStore(_PREFIX, compat.another_client(compat.default_store())),
        )
        spare = store('the spare store', opened=lambda: _spare(rank, size, common, self._ended))
        self._boards = common, spare

    def meet(self) -> None:
        """Wait for the stores, so that whoever dies from now on is named; not for long."""
        deadline = time.monotonic() + _PATIENCE
        for board in self._boards:
            board.looked.wait(max(0, deadline - time.monotonic()))

    def say(self, statement: RankStatus) -> None:
        """Take note of where the rank stands, until it has said its last word; never waits."""
        if not self._statement.ending:
            self._statement = statement

    def end(self) -> None:
        """Say that the training is over."""
        self._statement = RankStatus('the end', over=True)
        self._ended.set()
        deadline = time.monotonic() + _PATIENCE
        for board in self._boards:
            board.questions.put(None)
        for board in self._boards:
            board.thread.join(max(0, deadline - time.monotonic()))

    def find_culprit(self, own: RankStatus, stalled: float) -> str:
        """Return the rank at fault, in one line, after a second or two."""
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
        return next((board.finding for board in self._boards if board.finding), _GONE)

    def wait_for_queries(self) -> None:
        """Wait a moment on a rank that keeps a store: others are still to ask."""
        if self._keeps:
            time.sleep(_ANSWER)


class _Question(NamedTuple):
    """A question for the rank at fault. A lost store puts an empty line."""

    own: RankStatus
    stalled: float
    lines: queue.SimpleQueue[str]


class _StatusStore:
    """One store, and the thread that writes there, answers and asks."""

    def __init__(
        self,
        name: str,  # of the thread
        rank: int,  # this one in the world
        size: int,  # ranks of the world
        latest: Callable[[], RankStatus],  # returns the latest statement of this rank
        opened: Callable[[], Store | None],  # returns the store; None: there is none
    ) -> None:
        self._rank, self._size, self._latest, self._opened = rank, size, latest, opened
        self._written: RankStatus | None = None
        self._answered = 0
        self.finding = ''  # what the first rank that found a culprit has said; empty: nothing
        self.looked = threading.Event()  # whether it is known if there is a store
        self.store: Store | None = None  # once it is open
        # to be asked there; None is the last
        self.questions: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        # it ends with the training, or with the store
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
                question.lines.put(self._find_culprit(self.store, *question[:2]))
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
        if not self.finding and store.check(['verdict']):
            self.finding = store.get('verdict').decode()

    def _find_culprit(self, store: Store, own: RankStatus, stalled: float) -> str:
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
        line = find_culprit(self._rank, statements, answering, stalled)
        if line != NOBODY:
            store.compare_set('verdict', '', f'{line} (so says global rank {self._rank})')
        return line

    def _said(self, store: Store) -> Iterator[tuple[int, tuple[int, RankStatus]]]:
        for rank in range(self._size):
            if store.check([f'said {rank}']):
                number, _, statement = store.get(f'said {rank}').decode().partition(' ')
                yield rank, (int(number), RankStatus.from_json(statement))


_PREFIX = 'megatron_zbpp heartbeats'
_served: compat.TCPStore | None = None  # as long as the process lives: others may still ask


def _spare(rank: int, size: int, common: _StatusStore, ended: threading.Event) -> Store | None:
    global _served
    server = compat.default_store()
    while isinstance(server, PrefixStore):  # a view of the one that is served somewhere
        server = server.underlying_store
    if not isinstance(server, compat.TCPStore) or size == 1:
        return None
    while common.store is None or not (rank == size - 1 or common.store.check(['spare'])):
        if ended.wait(_SOON) or not common.thread.is_alive():
            return None
    if rank == size - 1:
        served = _served if common.store.check(['spare']) else None
        if served is None:  # nor is one left of an earlier training of these ranks
            # the address of this host on its way to the other one; nothing is sent
            there = socket.getaddrinfo(server.host, server.port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(*there[:2]) as probe:
                probe.connect(there[-1])
                host = probe.getsockname()[0]
            served = _served = compat.TCPStore(host, 0, is_master=True, wait_for_workers=False)
            common.store.set('spare', f'{served.port} {host}')
        return PrefixStore(_PREFIX, served)
    port, _, host = common.store.get('spare').decode().partition(' ')
    spare = compat.TCPStore(host, int(port), timeout=_MEET, wait_for_workers=False)
    return PrefixStore(_PREFIX, spare)
