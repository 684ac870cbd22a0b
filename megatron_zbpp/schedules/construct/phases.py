"""One rank's order as a table of phases: how many times, which passes, by what name.

>>> from megatron_zbpp.schedules.construct.phases import phases
>>> one_f_one_b = [(1, 'F', 'warm-up'), (2, 'F BW', 'steady'), (1, 'BW', 'cool-down')]
>>> for label, passes in phases([2], 3, one_f_one_b):
...     print(f'{label:10}', *passes)
warm-up    2F0
steady     2F1 2BW0 2F2 2BW1
cool-down  2BW2
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from megatron_zbpp.ir import BW, B, F, Pass, Phase, W


def even_groups(num_microbatches: int, size: int) -> list[int]:
    """Return sizes of as many groups of `size` microbatches or more as there can be, most even.

    One group of all where there are fewer than `size`.
    """
    count = max(1, num_microbatches // size)
    smaller, larger = divmod(num_microbatches, count)
    return [smaller + 1] * larger + [smaller] * (count - larger)


def gis_h_group(num_ranks: int) -> int:
    """Return the microbatches of a group of GIS-H: the fewest that do not starve."""
    return (num_ranks + 1) // 2


def zeropp_unit(num_ranks: int, num_chunks: int) -> int:
    """Return the fewest microbatches of a unit: p, or as many as have the 2(p-1) Ws of rank 0."""
    return max(num_ranks, -(-2 * (num_ranks - 1) // num_chunks))


def chunk_by_chunk(kind: str, stages: Sequence[int], groups: Iterable[int]) -> list[Pass]:
    """Return, group by group of microbatches, all of one stage, then all of the next."""
    through = stages if kind == F else stages[::-1]
    passes: list[Pass] = []
    first = 0
    for size in groups:
        passes += [Pass(kind, stage, first + i) for stage in through for i in range(size)]
        first += size
    return passes


_NAME = re.compile(f'({F}|{B}|{W}|{BW})([0-9]*)')

Row = tuple[int, str, str]


def phases(
    stages: Sequence[int],
    num_microbatches: int,
    table: Iterable[Row],
    groups: Sequence[int] | None = None,
) -> list[Phase]:
    """Return the order of the rank that holds `stages`.

    Each row of the table is (times, passes, label): the passes that it names run one after another,
    so many times (none below 1). A pass whose kind has come to its end is left out, so that one
    table serves any number of microbatches. The names:

    - `F0`, `B0`, `BW0`: the next of chunk 0, in microbatch order. A microbatch has B or BW.
    - `W0`: that W of chunk 0 which has waited longest, where one waits.
    - `F`, `B`, `BW`, `W`: the same of the whole rank, chunk by chunk in groups of microbatches
      (`groups`: their sizes; by default one of all).

    ValueError: a name is none of these, or the table ends before the passes do.
    """
    rows = [(times, names.split(), label) for times, names, label in table]
    named = dict.fromkeys(name for _, names, _ in rows for name in names)
    line = _Line(stages, num_microbatches, groups or [num_microbatches], W in named)
    take = {name: line.taker(name) for name in named}
    found = [
        Phase(label, tuple(_run(times, [take[name] for name in names])))
        for times, names, label in rows
    ]
    for left in (*line.coming.values(), *line.waiting.values()):
        if (p := next(iter(left), None)) is not None:
            raise ValueError(f'the table of phases ends before {p}: raise the times of a row')
    return [phase for phase in found if phase.passes]


def first_microbatches(found: Iterable[Phase], num_microbatches: int) -> list[Phase]:
    """Return `found` without the passes of microbatches from `num_microbatches` on."""
    kept = (
        Phase(label, tuple(p for p in passes if p.microbatch < num_microbatches))
        for label, passes in found
    )
    return [phase for phase in kept if phase.passes]


Take = Callable[[], 'Pass | None']


def _run(times: int, takes: Sequence[Take]) -> Iterator[Pass]:
    for _ in range(times):
        row = [p for take in takes if (p := take()) is not None]
        if not row:
            return
        yield from row


class _Line:
    """The passes that are still to come on a rank."""

    def __init__(
        self, stages: Sequence[int], m: int, groups: Sequence[int], one_queue: bool
    ) -> None:
        self.stages, self.m, self.groups = stages, m, groups
        self.one_queue = one_queue
        # F, and backwards, that are to come, by chunk (None: by groups)
        self.coming: dict[tuple[str, int | None], Iterator[Pass]] = {}
        # Ws whose B has been, by chunk (None: of the whole rank)
        self.waiting: dict[int | None, deque[Pass]] = {}

    def taker(self, name: str) -> Take:
        """Return the function that gives the next pass of `name`."""
        match = _NAME.fullmatch(name)
        chunk = int(match[2]) if match and match[2] else None
        if match is None or (chunk is not None and chunk >= len(self.stages)):
            raise ValueError(
                f'{name!r} names no pass of a rank with {len(self.stages)} chunks: give F, B, W or '
                'BW, and behind it a chunk from 0 up where one is meant'
            )
        kind = match[1]
        if kind == W:
            return self._weights(chunk)
        coming = self._coming(F if kind == F else B, chunk)
        if kind == F:
            return lambda: next(coming, None)
        if kind == BW:
            return lambda: next((Pass(BW, p.stage, p.microbatch) for p in coming), None)
        return self._split(coming)

    def _coming(self, kind: str, chunk: int | None) -> Iterator[Pass]:
        if (kind, chunk) not in self.coming:
            stages, groups = self.stages, self.groups
            if chunk is not None:
                stages, groups = [self.stages[chunk]], [self.m]
            self.coming[kind, chunk] = iter(chunk_by_chunk(kind, stages, groups))
        return self.coming[kind, chunk]

    def _split(self, coming: Iterator[Pass]) -> Take:
        """Return the next B, whose W waits from then on."""
        queues = {
            stage: self._queue(None if self.one_queue else chunk)
            for chunk, stage in enumerate(self.stages)
        }

        def take() -> Pass | None:
            p = next(coming, None)
            if p is not None:
                queues[p.stage].append(Pass(W, p.stage, p.microbatch))
            return p

        return take

    def _weights(self, chunk: int | None) -> Take:
        if self.one_queue and chunk is not None:
            raise ValueError(f'W and W{chunk} in one table: name the chunk of every W, or of none')
        queue = self._queue(chunk)
        return lambda: queue.popleft() if queue else None

    def _queue(self, chunk: int | None) -> deque[Pass]:
        return self.waiting.setdefault(chunk, deque())


def one_forward_one_backward(
    stages: Sequence[int], groups: Sequence[int], ahead: int
) -> list[Phase]:
    """Return a rank's order of 1F1B: a warm-up, F and BW by turns, and the backwards left.

    >>> for label, passes in one_forward_one_backward([0, 2], groups=[2], ahead=1):
    ...     print(f'{label:10}', *passes)
    warm-up    0F0 0F1 2F0
    steady     2F1 2BW0
    cool-down  2BW1 0BW0 0BW1
    """
    warmup, count = _counts(stages, groups, ahead)
    table = [
        (warmup, 'F', 'warm-up'),
        (count - warmup, 'F BW', 'steady'),
        (warmup, 'BW', 'cool-down'),
    ]
    return phases(stages, sum(groups), table, groups)


def split_one_forward_one_backward(
    stages: Sequence[int], groups: Sequence[int], ahead: int, defer: int
) -> list[Phase]:
    """Return a rank's order of 1F1B with B and W, where W follows B once `defer` others wait.

        >>> for label, passes in split_one_forward_one_backward([0], [4], ahead=1, defer=1):
        ...     print(f'{label:10}', *passes)
        warm-up    0F0
        W deferred 0F1 0B0
        steady     0F2 0B1 0W0 0F3 0B2 0W1
        cool-down  0B3 0W2
        W left     0W3

    `groups` are sizes of those in which microbatches go chunk by chunk, the largest first; `ahead`
    are the forwards in the warm-up beyond those of all chunks but the last.
    """
    warmup, count = _counts(stages, groups, ahead)
    table = [
        (warmup, 'F', 'warm-up'),
        (defer, 'F B', 'W deferred'),
        (count - warmup - defer, 'F B W', 'steady'),
        (warmup, 'B W', 'cool-down'),
        (defer, 'W', 'W left'),
    ]
    return phases(stages, sum(groups), table, groups)


def _counts(stages: Sequence[int], groups: Sequence[int], ahead: int) -> tuple[int, int]:
    """Return forwards in the warm-up, and in all."""
    return (len(stages) - 1) * groups[0] + ahead, len(stages) * sum(groups)
