"""Grids of cases: each run takes some that cover every row, `--full` takes them all."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest


def grid(
    when: Callable[..., bool] = lambda **case: True, **rows: tuple[Any, ...]
) -> pytest.MarkDecorator:
    """Parametrizes a test with the product of `rows`; what a run can spare is marked `full`.

    Kept in each run are, greedily from the start, the cases that add a value of some row that no
    case before has: so each value meets the test.

    Args:
        when: which combinations there are.
        rows: values by name of the test's argument; some may be there twice, for the cases that
            are kept.
    """
    unseen = {(name, repr(value)) for name, values in rows.items() for value in values}
    params = []
    for values in _spread(rows):
        case = dict(zip(rows, values, strict=True))
        if not when(**case):
            continue
        adds = unseen & {(name, repr(value)) for name, value in case.items()}
        unseen -= adds
        name = '-'.join(map(str, values))
        params.append(pytest.param(*values, id=name, marks=() if adds else pytest.mark.full))
    return pytest.mark.parametrize(','.join(rows), params)


def _spread(rows: dict[str, tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The product of the rows, first those cases in which all rows advance together."""
    longest = max(map(len, rows.values()))
    diagonal = [tuple(row[k % len(row)] for row in rows.values()) for k in range(longest)]
    return [*dict.fromkeys([*diagonal, *itertools.product(*rows.values())])]
