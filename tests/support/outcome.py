"""What a program said and how it ended, where its exit and its output are what is tested."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """How it ended.

    Attributes:
        code: its exit code; None where it went on.
        said: on standard error.
        result: where it went on.
    """

    code: int | None
    said: str
    result: object = None


def outcome(function: Callable, *args: object) -> Outcome:
    """Of `function(*args)`; warnings are left out."""
    errors = io.StringIO()
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(errors),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter('ignore')
        try:
            result = function(*args)
        except SystemExit as left:
            return Outcome(left.code, errors.getvalue())
    return Outcome(None, errors.getvalue(), result)


def of_all(found: list[Outcome]) -> Outcome:
    """Rank 0's outcome, which is that of all: they end alike, and one speaks."""
    first, *others = found
    for other in others:
        assert (other.code, other.result, other.said) == (first.code, first.result, '')
    return first


def refusal(found: Outcome, script: str = 'script.py') -> str:
    """The one line that is said of what cannot work."""
    assert found.code == 2, found
    assert found.said.startswith(f'{script}: error: ') and found.said.count('\n') == 1, found.said
    return found.said
