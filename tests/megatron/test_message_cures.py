"""The cure that a message of the flags or of `enable` names, applied to what raised it. Each
statement that raises before a training starts is in a table of `tests/support/cures`, or in a list
there with the reason."""

import ast
import contextlib
import io
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

import pytest
from cures import ELSEWHERE, ROWS, UNTRIED, Row
from cures.files import write_files
from nvidia import _find_megatron
from paths import ROOT

from megatron_zbpp.mcore.settings import Settings
from megatron_zbpp.schedules import registry

PACKAGE = ROOT / 'megatron_zbpp'
Place = tuple[str, int]
"""A file, from the package down, and a line."""


class Statement(NamedTuple):
    """A `raise`; rows of the table of rules are tried by `test_refusals.py`."""

    file: str  # from the package down
    function: str  # with its class
    lines: range  # from the first to the last
    text: str  # its source, without line ends

    def is_called(self, name: str) -> bool:
        """Whether it is meant by `file function`, or `file function: words of it`."""
        where, _, words = name.partition(': ')
        return where == f'{self.file} {self.function}' and words in self.text

    def holds(self, place: Place) -> bool:
        return place[0] == self.file and place[1] in self.lines


def statements(*names: str) -> Iterator[Statement]:
    """Of files, and of all files in folders of the package."""
    for name in names:
        path = PACKAGE / name
        for file in sorted(path.rglob('*.py')) if path.is_dir() else [path]:
            yield from _within(ast.parse(file.read_text()), str(file.relative_to(PACKAGE)), '')


def _within(node: ast.AST, file: str, function: str) -> Iterator[Statement]:
    for child in ast.iter_child_nodes(node):
        inner = function
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            inner = f'{function}.{child.name}'.lstrip('.')
        elif isinstance(child, ast.Raise) and child.exc is not None:
            lines = range(child.lineno, (child.end_lineno or 0) + 1)
            yield Statement(file, function, lines, ast.unparse(child))
        yield from _within(child, file, inner)


def places(error: BaseException) -> Iterator[Place]:
    """Where an error was raised, and the errors that it was raised from."""
    inside = [
        (str(Path(frame.filename).relative_to(PACKAGE)), frame.lineno or 0)
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_relative_to(PACKAGE)
    ]
    yield from inside[-1:]
    if error.__cause__ is not None:
        yield from places(error.__cause__)


# what is looked through for messages
ROOMS = (
    '__init__.py',
    'bridge.py',
    'launch',
    'mcore',
    'guests',
    'emulation',
    'partitioning/freeze_plans.py',
    'schedules/__init__.py',
    'schedules/registry.py',
    'techniques/__init__.py',
    'techniques/composition.py',
    'ir/placement.py',
)


@dataclass(frozen=True)
class Tried:
    """What became of a row."""

    said: str | None  # None: nothing was refused
    places: tuple[Place, ...]  # that raised
    cured: tuple[str | None, ...]  # said with each cure; None: nothing


def try_rows(folder: str) -> dict[str, Tried]:
    """On a rank, in an empty folder that is on Python's path."""
    _find_megatron()  # before anything imports another one
    before = os.getcwd()
    os.chdir(folder)
    sys.path.insert(0, folder)
    try:
        write_files()
        return {name: tried(row) for name, row in ROWS.items()}
    finally:
        os.chdir(before)
        sys.path.remove(folder)
        for known in (registry._FAMILIES, registry._NAMES):  # for other tests on this rank
            for name in [name for name in known if name.startswith('own_')]:
                del known[name]


def tried(row: Row) -> Tried:
    said, error = words(row.given)
    raising = () if error is None else tuple(places(error))
    return Tried(said, raising, tuple(words(cure)[0] for cure in row.cures))


def words(ask: Callable) -> tuple[str | None, Exception | None]:
    """What is said when something is asked for, and the error."""
    with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter('ignore')
        try:
            ask()
        except Exception as error:
            return f'{error}', error
    return None, None


@pytest.fixture(scope='module')
def found(ranks, tmp_path_factory) -> dict[str, Tried]:
    return ranks(1).run(try_rows, str(tmp_path_factory.mktemp('cures')))[0]


@pytest.mark.parametrize('name', ROWS)
def test_each_cure(found, name):
    """What is given is refused in these words, and what is named instead goes on."""
    row, was = ROWS[name], found[name]
    assert row.cures
    assert was.cured == (None,) * len(row.cures)
    assert was.said is not None and row.said in was.said


def test_each_message_is_tried(found):
    """Or is in a list that says why not; and the lists have nothing that is tried."""
    raising = [place for was in found.values() for place in was.places]
    every = list(statements(*ROOMS))
    left = [each for each in every if not any(each.holds(place) for place in raising)]
    nowhere = [each for each in left if not any(map(each.is_called, ELSEWHERE))]
    assert len(every) > 130 and 10 * len(nowhere) < len(every)
    listed = (*ELSEWHERE, *UNTRIED)
    assert [each for each in left if not any(map(each.is_called, listed))] == []
    idle = [name for name in (*ELSEWHERE, *UNTRIED) if not any(s.is_called(name) for s in left)]
    assert idle == []


@pytest.mark.parametrize('test', sorted({*ELSEWHERE.values()}))
def test_cures_that_are_tried_elsewhere(test):
    file, _, name = test.partition('::')
    text = (ROOT / 'tests' / 'megatron' / file).read_text()
    assert f'\ndef {name}(' in text or f'\n{name} = ' in text


def test_users_are_told_their_own_names(found):
    """Of flags, not of arguments of `enable`; in a program of Bridge's, not of flags."""
    arguments = [field.name for field in fields(Settings) if '_' in field.name]
    for name, was in found.items():
        kind, said = name.partition(':')[0], was.said or ''
        if kind in ('flags', 'launch line'):
            assert not re.search(rf'\b({"|".join(arguments)})\b', said), said
        elif kind == 'recipe':
            assert '--' not in said.replace('zbpp plan --num-layers', ''), said
