"""The order of a schedule as text: a row for each rank, a cell for each pass.

>>> from megatron_zbpp.ir import Pass, Placement, Schedule
>>> orders = [[Pass('F', 0, 0), Pass('B', 0, 0)], [Pass('F', 1, 0), Pass('B', 1, 0)]]
>>> print(grid(Schedule.of('torn', Placement.loop(2), 1, orders), [(1, 0)]))
rank 0   0F0  0B0
rank 1  [1F0] 1B0
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron_zbpp.ir import Schedule

_EMPTY = '___'  # a marked place past the end of a rank's order


def grid(
    schedule: Schedule, cells: Iterable[tuple[int, int]] = (), width: int = 100, height: int = 40
) -> str:
    """Draw `schedule`, cut to `width` characters and `height` ranks around what is marked.

    Args:
        schedule: any schedule, also a malformed one.
        cells: (rank, index in its order) of the cells to put in brackets, one a rank. An index past
            the end marks an empty place: there a pass is missing. A rank without a marked cell is
            cut around the first one's index.
        width: most characters in a line, as far as one cell fits.
        height: most ranks shown.
    """
    marked = dict(cells)
    rank, index = next(iter(marked.items()), (0, 0))
    rows = [_names(list(map(str, order)), marked.get(r)) for r, order in enumerate(schedule.passes)]
    cell = max((len(name) for row in rows for name in row), default=0) + 2
    label = len(f'rank {len(rows) - 1}') + 1
    fitting = max(1, (width - label - 2) // cell)
    first, last = _around(rank, len(rows), max(1, height))
    above = [f'({first} more above)'] if first else []
    below = [f'({len(rows) - last} more below)'] if last < len(rows) else []
    lines = (
        f'rank {r}'.ljust(label) + _line(rows[r], cell, fitting, marked.get(r), index)
        for r in range(first, last)
    )
    return '\n'.join([*above, *lines, *below])


def _names(names: list[str], mark: int | None) -> list[str]:
    """Return `names`, long enough to hold the marked place."""
    return names + [_EMPTY] * (mark + 1 - len(names)) if mark is not None else names


def _line(names: list[str], cell: int, fitting: int, mark: int | None, index: int) -> str:
    """Return the `fitting` cells of a row around its mark, or else around `index`."""
    first, last = _around(index if mark is None else mark, len(names), fitting)
    shown = (
        (f'[{name}]' if i == mark else f' {name} ').ljust(cell)
        for i, name in enumerate(names[first:last], first)
    )
    before, after = '…' if first else ' ', '…' if last < len(names) else ''
    return (before + ''.join(shown)).rstrip() + after


def _around(center: int, count: int, most: int) -> tuple[int, int]:
    """Return the half-open range of at most `most` of `count` places, `center` near its middle."""
    first = max(0, min(center - most // 2, count - most))
    return first, min(count, first + most)


_RANKS = 13  # that the grid shows at most


class ScheduleError(ValueError):
    """A schedule that must not run: what is wrong, where, the cure, and the grid."""

    def __init__(
        self, what: str, schedule: Schedule, cells: Iterable[tuple[int, int]] = ()
    ) -> None:
        """Make the message.

        Args:
            what: what is wrong, where, and the cure: one line.
            schedule: the culprit.
            cells: (rank, index in its order) of the offending cells; an index past the end is
                where a pass is missing.
        """
        super().__init__(f'{what}\n{grid(schedule, cells, height=_RANKS)}')
        self.what = what
