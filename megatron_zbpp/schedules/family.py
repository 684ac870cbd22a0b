"""What the registry knows of a schedule family."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from megatron_zbpp.ir import Schedule

ONE = range(1, 2)
TWO = range(2, 3)
ANY = range(1, sys.maxsize)
EVEN = range(2, sys.maxsize, 2)


@dataclass(frozen=True)
class Family:
    """A schedule family: how to generate it, and what a table says of it.

    Attributes:
        name: the canonical name; case, `-` and `_` do not matter in a look-up.
        generate: `generate(num_ranks, num_microbatches, **options)` returns the Schedule.
        summary: one line.
        bubble: idle time of the worst rank within its window, as text. F, B, W are times of one
            microbatch on one full rank, p ranks, m microbatches, v chunks.
        memory: peak on the worst rank, in activations of one microbatch on a full rank, as text.
        source: the paper, and where in it.
        aliases: other names, of torch, Megatron, the research fork and others.
        chunks: the numbers of chunks per rank that the family can take.
        default_chunks: the number of chunks where the caller names none.
        options: which of `num_chunks`, `costs`, `memory_limit` the generator takes.
        min_ranks: fewest ranks that it can take.
    """

    name: str
    generate: Callable[..., Schedule]
    summary: str
    bubble: str
    memory: str
    source: str
    aliases: tuple[str, ...] = ()
    chunks: range = ONE
    default_chunks: int = 1
    options: tuple[str, ...] = ()
    min_ranks: int = 1
