"""Least squares without negative solutions: times of layers, parts of attention."""

from __future__ import annotations

from collections.abc import Sequence

_ROUNDS = 20_000


def non_negative(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Return the least squares solution of which nothing is below 0, by coordinates.

    >>> [round(x, 6) for x in non_negative([[1, 1], [0, 2], [1, 0]], [3, 4, 1])]
    [1.0, 2.0]

    Args:
        rows: an equation each.
        values: what each should come to.
    """
    count = len(rows[0])
    gram = [[sum(row[i] * row[j] for row in rows) for j in range(count)] for i in range(count)]
    wanted = [sum(row[i] * v for row, v in zip(rows, values, strict=True)) for i in range(count)]
    solved = [0.0] * count
    for _ in range(_ROUNDS):
        moved = 0.0
        for i in range(count):
            rest = wanted[i] - sum(gram[i][j] * solved[j] for j in range(count) if j != i)
            value = max(0.0, rest / gram[i][i]) if gram[i][i] else 0.0
            moved = max(moved, abs(value - solved[i]))
            solved[i] = value
        if moved <= 1e-13 * max(solved):
            break
    return solved
