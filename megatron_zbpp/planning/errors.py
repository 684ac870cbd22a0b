"""What is wrong with a schedule, and where: one error type that shows the place in the grid."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_zbpp.ir import Schedule

_REACH = 6  # how many ranks and passes around a marked cell the grid shows


class ScheduleError(ValueError):
    """A schedule that must not run: what is wrong, where, the cure, and the grid."""

    def __init__(
        self, what: str, schedule: Schedule, cells: Iterable[tuple[int, int]] = ()
    ) -> None:
        """
        Args:
            what: what is wrong, where, and the cure: one line.
            schedule: the culprit.
            cells: (rank, index in its order) of the offending cells; an index past the end is
                where a pass is missing.
        """
        super().__init__(f'{what}\n{grid(schedule, cells)}')
        self.what = what


def grid(schedule: Schedule, cells: Iterable[tuple[int, int]] = ()) -> str:
    """Orders of the ranks, a row a rank, around the `cells`, which stand in brackets."""
    marked = dict(cells) or {0: None}
    return '\n'.join(
        f'rank {rank:<3} {_row(list(map(str, order)), marked.get(rank))}'
        for rank, order in enumerate(schedule.passes)
        if any(abs(rank - near) <= _REACH for near in marked)
    )


def _row(names: list[str], mark: int | None) -> str:
    """`names` in a line; far from the mark (or the start), dots stand for the others."""
    if mark is not None:
        names = [*names, '-'][: max(len(names), mark + 1)]
        names[mark] = f'[{names[mark]}]'
    first, last = max(0, (mark or 0) - _REACH), (mark or _REACH) + _REACH
    shown = names[first : last + 1]
    return ' '.join(['...'] * (first > 0) + shown + ['...'] * (last + 1 < len(names)))
