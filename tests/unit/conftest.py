"""Fixtures of the pure tier."""

import itertools
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_zbpp.cli import main
from megatron_zbpp.planner import limits, plans
from megatron_zbpp.planner.limits import Budget

INIT = Budget.__init__  # by which the clock counts


@pytest.fixture(autouse=True)
def busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps end every search, never the clock: a busy machine plans as an idle one does."""

    def patient(self: Budget, *args, **named) -> None:
        INIT(self, *args, **named)
        self._deadline += 600.0

    monkeypatch.setattr(Budget, '__init__', patient)


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return what makes each look at the clock take so many seconds; 500 passes are many."""
    monkeypatch.setattr(plans, '_SMALL', 500)
    monkeypatch.setattr(Budget, '__init__', INIT)

    def tick(seconds: float) -> None:
        clock = itertools.count()
        ticking = SimpleNamespace(monotonic=lambda: next(clock) * seconds)
        monkeypatch.setattr(limits, 'time', ticking)

    return tick


class Zbpp:
    """Runs the command; `err` is what it said on stderr."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys, self.err = capsys, ''

    def __call__(self, line: str, *more: object, code: int = 0) -> Any:
        """What is printed by the words of a line, and more; parsed with --json."""
        words = [*line.split(), *map(str, more)]
        self._capsys.readouterr()
        try:
            ended = main(words)
        except SystemExit as end:  # argparse's own way out
            ended = end.code
        out, self.err = self._capsys.readouterr()
        assert ended == code, (words, self.err)
        return json.loads(out) if out and '--json' in words else out

    def refused(self, line: str, *more: object) -> str:
        """The one line in which a command is refused."""
        assert self(line, *more, code=2) == '' and self.err.count('\n') == 1, self.err
        return self.err


@pytest.fixture
def zbpp(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> Zbpp:
    """Runs a line of `zbpp` in a folder of its own, where plans are kept, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    return Zbpp(capsys)
