"""Grids of cases: each run takes some that cover every row, `--full` takes them all.

Where several releases are tested side by side, one of them runs every case, and the others one case
of each test (`--one-case`).
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    params = []
    for case, spared in covering(when, rows):
        words = [getattr(value, '__name__', str(value)) for value in case.values()]
        name, marks = '-'.join(words), [pytest.mark.full] * spared
        params.append(pytest.param(*case.values(), id=name, marks=marks))
    return pytest.mark.parametrize(','.join(rows), params)


def some(names: str, kept: Iterable[Any], *spared: Any) -> pytest.MarkDecorator:
    """Parametrizes a test with cases: each run takes those of `kept`, `--full` the others, too.

    What is among both is a case once. A case is a tuple where there are several names.
    """
    many, first = ',' in names, list(kept)
    cases = [*first, *(case for case in spared if case not in first)]
    marks = [[]] * len(first) + [[pytest.mark.full]] * (len(cases) - len(first))
    params = [
        pytest.param(*(case if many else (case,)), marks=own)
        for case, own in zip(cases, marks, strict=True)
    ]
    return pytest.mark.parametrize(names, params)


def covering(
    when: Callable[..., bool], rows: dict[str, tuple[Any, ...]]
) -> Iterator[tuple[dict[str, Any], bool]]:
    """Yield the cases of a grid, and whether a run can spare each."""
    # first the cases in which all rows advance together
    longest = max(map(len, rows.values()), default=0)
    first = [tuple(row[k % len(row)] for row in rows.values()) for k in range(longest)]
    unseen = {(name, repr(value)) for name, values in rows.items() for value in values}
    for values in dict.fromkeys([*first, *itertools.product(*rows.values())]):
        case = dict(zip(rows, values, strict=True))
        if when(**case):
            adds = unseen & {(name, repr(value)) for name, value in case.items()}
            unseen -= adds
            yield case, bool(case) and not adds


def beside_another(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Return the cases that a run can spare where one with another release has them all.

    It keeps of each test, and of each row of a table (`rows`), the first case that no mark skips
    here, whatever the parameters; all cases of tests that are marked `each_release`, and none of
    those that are marked `one_release`.
    """
    left_out, kept = set(), set()
    for item in items:
        params = item.callspec.params if hasattr(item, 'callspec') else {}
        test = item.nodeid.partition('[')[0], getattr(params.get('training'), 'row', '')
        if item.get_closest_marker('each_release'):
            continue
        if item.get_closest_marker('one_release') or test in kept:
            left_out.add(item)
        elif not any(any(mark.args) for mark in item.iter_markers('skipif')):
            kept.add(test)
    return left_out
