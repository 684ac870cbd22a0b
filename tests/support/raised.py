"""The statements of the package that refuse something, and which of them a call has reached."""

import ast
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from paths import ROOT

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
