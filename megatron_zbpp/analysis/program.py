"""What a rank does in one iteration: its passes, and between them messages."""

from __future__ import annotations

from typing import NamedTuple

from megatron_zbpp.ir import Pass


class Send(NamedTuple):
    """Send what `producer`, which has just ended on this rank, made for `consumer` on `peer`.

    Attributes:
        producer: of this rank.
        consumer: of `peer`.
        peer: that takes it.
        under_way: how many sends to `peer` may not have come, this one included: that the older
            ones have, shows in what this rank has taken from `peer` since.
    """

    producer: Pass
    consumer: Pass
    peer: int
    under_way: int = 1

    def __str__(self) -> str:
        return f'send({self.producer} to rank {self.peer} for {self.consumer})'


class Receive(NamedTuple):
    """Post the receive of what `producer` makes on `peer`, for a later pass of this rank."""

    producer: Pass
    consumer: Pass
    peer: int

    def __str__(self) -> str:
        return f'receive(for {self.consumer} from rank {self.peer})'


class Hand(NamedTuple):
    """Keep what `producer`, which has just ended, made for `consumer` of this same rank."""

    producer: Pass
    consumer: Pass

    def __str__(self) -> str:
        return f'hand(to {self.consumer})'


class Begin(NamedTuple):
    """Begin to copy out what `leaving` moves; at that pass itself its memory is given back."""

    leaving: Pass

    def __str__(self) -> str:
        return f'begin({self.leaving})'


Instruction = Pass | Send | Receive | Hand | Begin
Program = tuple[Instruction, ...]
