"""What a program said and how it ended, where its exit and its output are what is tested."""

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Outcome:
    code: int | None  # None where it went on
    said: str  # on standard error
    result: object = None  # where it went on


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


def error_of(function: Callable, *args: Any, **named: Any) -> str | None:
    """Of the error that a function ends with; None: it ends without."""
    try:
        function(*args, **named)
    except (Exception, SystemExit) as error:
        return str(error)
    return None


@contextlib.contextmanager
def logged(name: str, words: str) -> Iterator[list[tuple[str, Any]]]:
    """Messages of a logger, and of those below it, that have these words; and their arguments."""
    found: list[tuple[str, Any]] = []
    handler, logger = logging.Handler(), logging.getLogger(name)
    handler.addFilter(lambda record: words in record.getMessage())
    handler.emit = lambda record: found.append((record.getMessage(), record.args))
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


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
