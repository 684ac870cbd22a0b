"""Programs: the passes of a rank in one iteration, and between them messages and collectives."""

from __future__ import annotations

from typing import NamedTuple

from megatron_zbpp.ir import Pass


class Send(NamedTuple):
    """Send what `producer`, which has just ended on this rank, made for `consumer` on `peer`.

    It has ended by itself, or together with others (`Join`).

    Attributes:
        producer: of this rank.
        consumer: of `peer`.
        peer: that takes it.
        under_way: how many sends to `peer` may not have come, this one included: that the older
            ones have, shows in what this rank has taken from `peer` since.
        saved: whether it is no message of the pipeline, but what a forward has saved, on its way to
            the partner or back: that has connections of its own.
        message: its name, as in `ir.graph.Need`; empty for what was saved.
    """

    producer: Pass
    consumer: Pass
    peer: int
    under_way: int = 1
    saved: bool = False
    message: str = ''

    def __str__(self) -> str:
        if self.saved:
            return f'send(what {self.producer} saved to rank {self.peer})'
        return f'send({self.producer} to rank {self.peer} for {self.consumer})'


class Receive(NamedTuple):
    """Post the receive of what `producer` makes on `peer`, for a later pass of this rank.

    Attributes:
        producer: of `peer`; of what was saved, the forward.
        consumer: of this rank; of what comes to be kept for `peer`, the pass that frees it there.
        peer: that sends it.
        saved: as of the send.
        message: as of the send.
    """

    producer: Pass
    consumer: Pass
    peer: int
    saved: bool = False
    message: str = ''

    def __str__(self) -> str:
        if self.saved:
            return f'receive(what {self.producer} saved from rank {self.peer})'
        return f'receive(for {self.consumer} from rank {self.peer})'


class Hand(NamedTuple):
    """Keep what `producer`, which has just ended, made for `consumer` of this same rank.

    Attributes:
        producer: of the message.
        consumer: of the same rank.
        message: its name, as of a send.
    """

    producer: Pass
    consumer: Pass
    message: str = ''

    def __str__(self) -> str:
        return f'hand(to {self.consumer})'


class Exchange(NamedTuple):
    """Enter a collective of all ranks; nobody waits for it here, but at the passes that take it.

    It is equal on all ranks.

    Attributes:
        operation: as in `ir.graph.Collective`.
        message: its name, as in `ir.graph.Need`.
        root: the rank that broadcasts, or to which is reduced; None: there is none.
        producers: passes that make what is exchanged, by rank; of a broadcast, one.
        consumers: passes that take the result, by rank; of a reduction, one.
        after: the message of the same producers whose result they contribute with, or ''.
    """

    operation: str
    message: str
    root: int | None
    producers: tuple[Pass, ...]
    consumers: tuple[Pass, ...]
    after: str = ''

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
