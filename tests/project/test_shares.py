"""Legs of CI: one runs each case, one a case of each test."""

import sys
from types import SimpleNamespace

import example
import forked
import models
import nvidia
import pytest
from grids import beside_another
from paths import ROOT

FILE = 'tests/megatron/test_post_validation.py'


def collected(*arguments: str) -> set[str]:
    command = [sys.executable, '-m', 'pytest', '--collect-only', '-q', FILE, *arguments]
    done = forked.run(command, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-2000:]
    return {line for line in done.stdout.splitlines() if '::' in line}


class Item(SimpleNamespace):
    __hash__ = object.__hash__


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
