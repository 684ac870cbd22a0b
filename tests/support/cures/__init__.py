"""Messages that refuse something, and the cures that they name: see `test_message_cures.py`.

`rows.txt` has the messages, `untried.txt` the statements that no row reaches, and why.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from pathlib import Path

from tables import blocks

FOLDER = Path(__file__).parent
_CALLED = {'flags': 'flags', 'launch line': 'line'}  # of a row's kind, where it has words alone


@dataclass(frozen=True)
class Ask:
    """A call of a function of `asking`, or the words of a command line."""

    kind: str
    text: str

    def __call__(self) -> None:
        asking = importlib.import_module('cures.asking')  # on a rank, which has found Megatron
        if re.match(r'[\w.]+\(', self.text):
            eval(self.text, vars(asking))
        else:
            vars(asking)[_CALLED[self.kind]](self.text)


@dataclass(frozen=True)
class Row:
    """A message: what raises it, words of it, and its cures, of which each one passes."""

    given: Ask
    said: str
    cures: tuple[Ask, ...]


def _row(kind: str, lines: list[str]) -> Row:
    (_, given), (_, said), *cures = (line.split(' ', 1) for line in lines)
    return Row(Ask(kind, given), said, tuple(Ask(kind, cure) for _, cure in cures))


ROWS = {name: _row(name.partition(':')[0], lines) for name, lines in blocks(FOLDER / 'rows.txt')}
_REASONS = {line: head for head, lines in blocks(FOLDER / 'untried.txt') for line in lines}
ELSEWHERE = {line: head for line, head in _REASONS.items() if '.py::' in head}
UNTRIED = {line: head for line, head in _REASONS.items() if '.py::' not in head}
