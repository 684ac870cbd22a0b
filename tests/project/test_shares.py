"""Legs of CI: one runs each case, one a case of each test; or each takes a share of the cases."""

from __future__ import annotations

import argparse
import subprocess
import sys
from types import SimpleNamespace

import example
import models
import nvidia
import pytest
from grids import Share, beside_another
from paths import ROOT

FILE = 'tests/megatron/test_bpipe.py'


def collected(*arguments: str) -> set[str]:
    command = [sys.executable, '-m', 'pytest', '--collect-only', '-q', FILE, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:]
    return {line for line in done.stdout.splitlines() if '::' in line}


def test_shares_make_the_whole():
    """Tests of a single case are in each; of others no case is in two."""
    whole, first, second = collected(), collected('--share=1/3'), collected('--share', '2-3/3')
    assert first | second == whole
    of_each = {name.partition('[')[0] for name in whole}
    assert {name.partition('[')[0] for name in first} == of_each
    twice = {name.partition('[')[0] for name in first & second}
    several = {name for name in of_each if sum(each.startswith(f'{name}[') for each in whole) > 1}
    assert len(first) < 0.6 * len(whole) < len(second) < 0.9 * len(whole)
    assert not twice & several


class Item(SimpleNamespace):
    __hash__ = object.__hash__


@pytest.mark.parametrize('fixture', ['te_ranks', 'recorded_ranks'])
def test_releases_count_by_themselves(fixture):
    """One leg has the cases of one release, the other those of another: no case is in neither."""
    items = [
        Item(
            nodeid=f'test_it[{te}-{case}]',
            callspec=SimpleNamespace(params={fixture: te, 'case': case}),
            get_closest_marker=lambda name: name == 'shared',
        )
        for te in ('2.8.0', '2.20.2')
        for case in range(4)
    ]
    oldest = {item.callspec.params['case'] for item in taken('2-3/3', items[:4], items)}
    newest = {item.callspec.params['case'] for item in taken('1/3', items[4:], items)}
    assert sorted([*oldest, *newest]) == [0, 1, 2, 3]


def case(test, name, *marks, skipped=False):
    """An item with `marks`, as pytest collects it."""
    found = {each: (SimpleNamespace(args=()),) for each in marks}
    found['skipif'] = (SimpleNamespace(args=(skipped,)),)
    return Item(
        nodeid=f'{test}[{name}]' if name else test,
        get_closest_marker=lambda mark: next(iter(found.get(mark, ())), None),
        iter_markers=lambda mark: iter(found.get(mark, ())),
    )


def test_one_case_of_each_test():
    """The first that runs here: it is not lost where a mark skips those before it."""
    items = [
        case('a', 'dense-zb-v'),
        case('a', 'experts-zb-v'),
        case('b', 'needs a release', skipped=True),
        case('b', 'any release'),
        case('b', 'any other'),
        case('c', ''),
        case('differs', '1', 'each_release'),
        case('differs', '2', 'each_release'),
        case('takes long', '1', 'one_release'),
        case('takes long, too', '', 'one_release'),
    ]
    left_out = beside_another(items)
    kept = [item.nodeid for item in items if item not in left_out]
    shown = ['a[dense-zb-v]', 'b[needs a release]', 'b[any release]', 'c']
    assert kept == [*shown, 'differs[1]', 'differs[2]']


def test_one_case_is_asked_for():
    """Where tests are collected: each function that runs here has one case."""
    whole, one = collected(), collected('--one-case')
    names = [name.partition('[')[0] for name in one]
    assert one < whole and sorted(set(names)) == sorted(names)
    assert {*names} == {name.partition('[')[0] for name in whole}


def taken(share, of_release, items):
    left_out = {item.nodeid for item in Share.parse(share).left_out(items)}
    return [item for item in of_release if item.nodeid not in left_out]


@pytest.mark.parametrize(
    'text', ['', '2', '0/2', '3/2', '1/0', 'a/b', '1/2/3', '-1/2', '3-2/3', '2-4/3', '1-/3']
)
def test_no_share(text):
    with pytest.raises(argparse.ArgumentTypeError, match='give K/N, such as 1/3 or 2-3/3'):
        Share.parse(text)


def test_flags_of_all_runs(monkeypatch, tmp_path):
    """Of NVIDIA's loop and of the example; those of Megatron's own schedules stay as they are."""
    words = []

    def stopped(function, argv, *rest):
        words.append(argv)
        raise InterruptedError

    monkeypatch.setenv('MEGATRON_ZBPP_STOCK', 'off')
    monkeypatch.setattr(nvidia, 'ALSO', ['--pipeline-prewarm'])
    ranks = SimpleNamespace(run=stopped)
    for flags in ([], ['--pipeline-schedule', 'zb-v'], ['--pipeline-schedule-file', 'plan.json']):
        with pytest.raises(InterruptedError):
            nvidia.run(ranks, *flags)
    for schedule in ('megatron', 'zb-v'):
        with pytest.raises(InterruptedError):
            example.run(ranks, '--pipeline-schedule', schedule)
        words.append(models.Job().argv(schedule, False, tmp_path))
    ours = [False, True, True, False, False, True, True]
    assert ['--pipeline-prewarm' in argv for argv in words] == ours
