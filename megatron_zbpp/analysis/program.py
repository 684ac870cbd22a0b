"""Programs: the passes of a rank in one iteration, and between them messages and collectives.

Receives are posted as late as it costs nothing. On NCCL a receive is a kernel that spins until its
message comes, and a send is one that spins until its receive is posted: both take multiprocessors
from passes. So the best place of a receive is the end of a pass of its rank that is nearest to the
time of the send.

`lowering` puts a message, its send and its receive, at one place of the one order of everything.
That place may be behind passes of the receiver as long as the sender's next pass comes later: where
a pass waits for its device, it waits for what its rank has sent, too. So each receive has a limit
of its own, and programs with late receives end under every rule, as others do.

Where the host must wait for a message's shape before it can post the receive, that place is right
before the pass that takes the message, as often as the rules allow.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence, Set
from typing import NamedTuple

from megatron_zbpp.ir import F, Pass, Schedule


class Send(NamedTuple):
    """Send what `producer`, which has just ended on this rank, made for `consumer` on `peer`.

    It has ended by itself, or together with others (`Join`).
    """

    producer: Pass  # of this rank
    consumer: Pass  # of `peer`
    peer: int  # that takes it
    # how many sends to `peer` may not have come, this one included: that the older ones have, shows
    # in what this rank has taken from `peer` since
    under_way: int = 1
    # whether it is no message of the pipeline, but what a forward has saved, on its way to the
    # partner or back: that has connections of its own
    saved: bool = False
    message: str = ''  # its name, as in `ir.graph.Need`; empty for what was saved

    def __str__(self) -> str:
        if self.saved:
            return f'send(what {self.producer} saved to rank {self.peer})'
        return f'send({self.producer} to rank {self.peer} for {self.consumer})'


class Receive(NamedTuple):
    """Post the receive of what `producer` makes on `peer`, for a later pass of this rank."""

    producer: Pass  # of `peer`; of what was saved, the forward
    # of this rank; of what comes to be kept for `peer`, the pass that frees it there
    consumer: Pass
    peer: int  # that sends it
    saved: bool = False  # as of the send
    message: str = ''  # as of the send

    def __str__(self) -> str:
        if self.saved:
            return f'receive(what {self.producer} saved from rank {self.peer})'
        return f'receive(for {self.consumer} from rank {self.peer})'


class Hand(NamedTuple):
    """Keep what `producer`, which has just ended, made for `consumer` of this same rank."""

    producer: Pass  # of the message
    consumer: Pass  # of the same rank
    message: str = ''  # its name, as of a send

    def __str__(self) -> str:
        return f'hand(to {self.consumer})'


class Exchange(NamedTuple):
    """Enter a collective of all ranks; nobody waits for it here, but at the passes that take it.

    It is equal on all ranks.
    """

    operation: str  # as in `ir.graph.Collective`
    message: str  # its name, as in `ir.graph.Need`
    root: int | None  # the rank that broadcasts, or to which is reduced; None: there is none
    producers: tuple[Pass, ...]  # passes that make what is exchanged, by rank; of a broadcast, one
    consumers: tuple[Pass, ...]  # passes that take the result, by rank; of a reduction, one
    after: str = ''  # the message of the same producers whose result they contribute with, or ''

    def __str__(self) -> str:
        return f'{self.operation}({self.message} for {self.consumers[0]})'

    @property
    def size(self) -> int:
        """The number of ranks."""
        return max(len(self.producers), len(self.consumers))


class Begin(NamedTuple):
    """Begin to copy out what `leaving` moves; at that pass itself its memory is given back."""

    leaving: Pass

    def __str__(self) -> str:
        return f'begin({self.leaving})'


class Join(NamedTuple):
    """Run the `passes` that follow as one; what they made is sent behind the last of them."""

    passes: tuple[Pass, ...]

    def __str__(self) -> str:
        return f'join({" ".join(map(str, self.passes))})'


Instruction = Pass | Send | Receive | Hand | Exchange | Begin | Join
Program = tuple[Instruction, ...]


# before the pass during which its message comes; behind that pass, where this is nearer and
# another pass computes while the message travels; so, too, where its taker waits for the message
EARLY, LATE, LATEST = RECEIVES = ('early', 'late', 'latest')
BY_TAKER = 'by taker'  # of forwards whose shapes vary: as late as no rule forbids; others: late
_TRAVEL = 0.5  # longest time of a message, in forwards of a stage
_Held = list[tuple[Send, Receive]]  # of one message, or of none: it has been put


class Posting:
    """Decides behind which pass of its rank each receive is posted. Passes are numbers.

    `spans` are simulated; `joined` are passes that run as one with the pass behind them.
    """

    def __init__(
        self,
        receives: str,
        schedule: Schedule,
        spans: Sequence[tuple[float, float]],
        joined: Set[int],
    ) -> None:
        self._by_taker = receives == BY_TAKER
        if receives not in (BY_TAKER, *RECEIVES):
            raise ValueError(f'receives is {receives!r}: give {EARLY!r}, {LATE!r} or {LATEST!r}')
        self._travel = 0.0 if receives == LATEST else _TRAVEL / schedule.placement.num_chunks
        self._forwards = [p.kind == F for _, p in schedule] if self._by_taker else []
        self._starts, self._ends = zip(*spans, strict=True)
        self._joined = joined
        self._behind_all = list(itertools.accumulate(map(len, schedule.passes)))  # by rank
        self.following = [0, *self._behind_all[:-1]]  # by rank, its next pass; kept by the user

    def behind(self, giver: int, peer: int, handed_on: Sequence[tuple[int, str]]) -> int | None:
        """Return the pass of `peer` behind which to post what `giver` sends; None: at once.

        `giver` is the pass that has just ended; `handed_on` are the passes that take what it made,
        and what those made that ran as one with it, each with the name of the message.
        """
        first = last = self.following[peer]
        behind_all = self._behind_all[peer]
        if first == behind_all:
            return None
        joined, starts, ends = self._joined, self._starts, self._ends
        if self._by_taker:
            own = [taker for taker, _ in handed_on if first <= taker < behind_all]
            if any(self._forwards[taker] for taker in own):
                before = min(own) - 1
                while before in joined:
                    before -= 1
                return before if before >= first else None
        while last in joined:
            last += 1
        sent, end = ends[giver], ends[last]
        if end - sent > sent - starts[first]:
            return None
        for taker, _ in handed_on:
            while taker - 1 in joined:
                taker -= 1
            if first <= taker < behind_all and (
                taker <= last or starts[taker] - end < self._travel
            ):
                return None
        return last


class Postponed:
    """Messages that are not in the programs yet; one that has been put meanwhile is empty."""

    def __init__(self, programs: list[list[Instruction]]) -> None:
        self._programs = programs
        self.sent_by: list[list[_Held]] = [[] for _ in programs]
        self.posted_behind: dict[int, list[_Held]] = defaultdict(list)

    def hold(self, behind: int, send: Send, receive: Receive) -> None:
        """Keep a message until the pass `behind` has run, or its sender's next one is to run."""
        held = [(send, receive)]
        self.sent_by[receive.peer].append(held)
        self.posted_behind[behind].append(held)

    def put_behind(self, number: int) -> None:
        """Put what is posted behind that pass into the programs, by sender: it has run."""
        posted = [held for held in self.posted_behind.pop(number) if held]
        if len(posted) > 1:
            posted.sort(key=lambda held: held[0][1].peer)
        for held in posted:
            self.put(held)

    def put(self, held: _Held) -> None:
        """Put a message into the programs, unless it is there."""
        if held:
            send, receive = held.pop()
            self._programs[receive.peer].append(send)
            self._programs[send.peer].append(receive)
