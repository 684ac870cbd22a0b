"""Grids of cases: each run takes some that cover every row, `--full` takes them all.

Where several releases are tested side by side, one of them runs every case, and the others one case
of each test (`--one-case`). Or each takes a share of the cases (`--share`).
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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


class Share(NamedTuple):
    """What a run takes of the cases of shared tests: parts `first` to `last` of `parts`."""

    first: int
    last: int
    parts: int

    @classmethod
    def parse(cls, text: str) -> Share:
        """Return what `1/3` or `2-3/3` says."""
        found = re.fullmatch(r'([1-9]\d*)(?:-(\d+))?/(\d+)', text)
        first, last, parts = (
            map(int, (found[1], found[2] or found[1], found[3])) if found else (0,) * 3
        )
        if not 1 <= first <= last <= parts:
            raise argparse.ArgumentTypeError(
                f'{text!r} is no share: give K/N, such as 1/3 or 2-3/3'
            )
        return cls(first, last, parts)

    def left_out(self, items: Sequence[pytest.Item]) -> set[pytest.Item]:
        """Return the cases that other parts take: of each shared test that has several.

        Releases of Transformer Engine count by themselves, since a run may take some of them only.
        """
        cases: dict[tuple[str, object], list[pytest.Item]] = defaultdict(list)
        for item in items:
            if item.get_closest_marker('shared'):
                given = getattr(item, 'callspec', None)
                params = given.params if given else {}
                te = params.get('te_ranks', params.get('recorded_ranks'))
                cases[item.nodeid.partition('[')[0], te].append(item)
        return {
            item
            for found in cases.values()
            if len(found) > 1
            for place, item in enumerate(found)
            if not self.first <= place % self.parts + 1 <= self.last
        }


def beside_another(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Return the cases that a run can spare where one with another release has them all.

    It keeps of each test the first case that no mark skips here, whatever the parameters; all cases
    of tests that are marked `each_release`, and none of those that are marked `one_release`.
    """
    left_out, kept = set(), set()
    for item in items:
        test = item.nodeid.partition('[')[0]
        if item.get_closest_marker('each_release'):
            continue
        if item.get_closest_marker('one_release') or test in kept:
            left_out.add(item)
        elif not _skipped_by_mark(item):
            kept.add(test)
    return left_out


def _skipped_by_mark(item: pytest.Item) -> bool:
    return any(any(mark.args) for mark in item.iter_markers('skipif'))
