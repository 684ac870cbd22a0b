"""Records of an iteration while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_zbpp.ir import Pass


@dataclass
class Record:
    """The passes of one rank in one iteration, with their times.

    Attributes:
        passes: in order.
        marks: (start, end) of each, for `Clock.seconds`.
        live: activations held after each: of how many stages, microbatches and slices.
        joined: places of passes that ran as one with the next; the time of both is noted at the
            first.
    """

    passes: list[Pass] = field(default_factory=list)
    marks: list[tuple[object, object]] = field(default_factory=list)
    live: list[int] = field(default_factory=list)
    joined: list[int] = field(default_factory=list)
