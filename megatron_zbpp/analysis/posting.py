"""Posting of receives: as late as it costs nothing, so that few spin beside passes.

On NCCL a receive is a kernel that spins until its message comes, and a send is one that spins until
its receive is posted: both take multiprocessors from passes. So the best place of a receive is the
end of a pass of its rank that is nearest to the time of the send.

`lowering` puts a message, its send and its receive, at one place of the one order of everything.
That place may be behind passes of the receiver as long as the sender's next pass comes later: where
a pass waits for its device, it waits for what its rank has sent, too. So each receive has a limit
of its own, and programs with late receives end under every rule, as others do.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence, Set

from megatron_zbpp.analysis.program import Instruction, Receive, Send
from megatron_zbpp.ir import Schedule

# before the pass during which its message comes; behind that pass, where this is nearer and
# another pass computes while the message travels; so, too, where its taker waits for the message
EARLY, LATE, LATEST = RECEIVES = ('early', 'late', 'latest')
_TRAVEL = 0.5  # longest time of a message, in forwards of a stage


def require_known(receives: object, name: str = 'receives') -> None:
    """Return if `receives`, an argument called `name`, is one of `RECEIVES`.

    Raises:
        ValueError: it is not.
    """
    if receives not in RECEIVES:
        raise ValueError(f'{name} is {receives!r}: give {EARLY!r}, {LATE!r} or {LATEST!r}')


class Posting:
    """Decides behind which pass of its rank each receive is posted. Passes are numbers.

    Args:
        receives: one of `RECEIVES`.
        schedule: of the passes.
        spans: start and end of each pass, simulated.
        joined: passes that run as one with the pass behind them.

    Attributes:
        following: by rank, its next pass; kept by the user.

    Raises:
        ValueError: `receives` is none of them.
    """

    def __init__(
        self,
        receives: str,
        schedule: Schedule,
        spans: Sequence[tuple[float, float]],
        joined: Set[int],
    ) -> None:
        require_known(receives)
        self._early = receives == EARLY
        self._travel = _TRAVEL / schedule.placement.num_chunks if receives == LATE else 0.0
        self._spans, self._joined = spans, joined
        self._ends = list(itertools.accumulate(map(len, schedule.passes)))  # by rank
        self.following = [0, *self._ends[:-1]]

    def behind(
        self, giver: int, peer: int, handed_on: Sequence[tuple[int, tuple[int, str]]]
    ) -> int | None:
        """Return the pass of `peer` behind which to post what `giver` sends; None: at once.

        Args:
            giver: the pass that has just ended.
            peer: a rank that receives.
            handed_on: what it, and those that ran as one with it, have made, with the pass that
                takes it; of the latter, those of `peer` count.
        """
        first = last = self.following[peer]
        behind_all = self._ends[peer]
        if self._early or first == behind_all:
            return None
        joined, spans = self._joined, self._spans
        while last in joined:
            last += 1
        sent, end = spans[giver][1], spans[last][1]
        if end - sent > sent - spans[first][0]:
            return None
        for _, (taker, _) in handed_on:
            while taker - 1 in joined:
                taker -= 1
            if first <= taker < behind_all and (
                taker <= last or spans[taker][0] - end < self._travel
            ):
                return None
        return last


class Postponed:
    """Messages that are not in the programs yet.

    Args:
        programs: of all ranks, so far.

    Attributes:
        sent_by: by sender; each with the pass behind which it is posted.
        senders: by that pass.
    """

    def __init__(self, programs: list[list[Instruction]]) -> None:
        self._programs = programs
        self.sent_by: list[list[tuple[int, Send, Receive]]] = [[] for _ in programs]
        self.senders: dict[int, list[int]] = defaultdict(list)

    def hold(self, behind: int, send: Send, receive: Receive) -> None:
        """Keep a message until the pass `behind` has run, or its sender's next one is to run."""
        rank = receive.peer
        self.sent_by[rank].append((behind, send, receive))
        self.senders[behind].append(rank)

    def put_sent_by(self, rank: int) -> None:
        """Put all that `rank` sends into the programs: its next pass is to run."""
        for _, send, receive in self.sent_by[rank]:
            self._put(rank, send, receive)
        self.sent_by[rank] = []

    def put_behind(self, number: int) -> None:
        """Put what is posted behind that pass into the programs: it has run."""
        for rank in sorted(self.senders.pop(number)):
            held, self.sent_by[rank] = self.sent_by[rank], []
            for each in held:
                if each[0] == number:
                    self._put(rank, *each[1:])
                else:
                    self.sent_by[rank].append(each)

    def _put(self, rank: int, send: Send, receive: Receive) -> None:
        self._programs[rank].append(send)
        self._programs[send.peer].append(receive)
