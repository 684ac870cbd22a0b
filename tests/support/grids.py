"""Grids of cases: each run takes some that cover every value, and of tables of trainings (`rows`)
one case of each row; `--full` takes them all.

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
    each = [item for item in items if not item.get_closest_marker('each_release')]
    once = {item for item in each if item.get_closest_marker('one_release')}
    others = [item for item in each if item not in once]
    return once | _later([((_test(item), _row(item)), item) for item in others])


def alike(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Return the trainings that a run can spare: of each row of a table all but the first."""
    rows = [each for each in items if _row(each)]
    return _later([((_test(each), _row(each), _param(each, 'te_ranks')), each) for each in rows])


def _later(items: Iterable[tuple[tuple[str, ...], pytest.Item]]) -> set[pytest.Item]:
    """Return all items but the first of each key that no mark skips here."""
    later, kept = set(), set()
    for key, item in items:
        if key in kept:
            later.add(item)
        elif not any(any(mark.args) for mark in item.iter_markers('skipif')):
            kept.add(key)
    return later


def _test(item: pytest.Item) -> str:
    return item.nodeid.partition('[')[0]


def _row(item: pytest.Item) -> str:
    return getattr(_param(item, 'training'), 'row', '')


def _param(item: pytest.Item, name: str) -> Any:
    given = getattr(item, 'callspec', None)
    return given and given.params.get(name)
