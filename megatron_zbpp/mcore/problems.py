"""Independent checks, whose errors are raised together: a user reads all of them at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class Problems(ValueError):
    """Several errors of one request, in the order of the checks.

    Attributes:
        lines: what each says, with its cure.
    """

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__('\n'.join(lines))
        self.lines = tuple(lines)


class Checks:
    """Runs checks that do not depend on each other, each in `with checks.one():`."""

    def __init__(self) -> None:
        self._errors: list[Exception] = []

    @property
    def failed(self) -> bool:
        """True where one has failed by now."""
        return bool(self._errors)

    @contextmanager
    def one(self) -> Iterator[None]:
        """Keep what is raised in the block; a check that depends on another one is in its block."""
        try:
            yield
        except (OSError, ValueError, NotImplementedError) as error:
            self._errors.append(error)

    def require_all(self) -> None:
        """Raise one error for all checks that failed.

        Raises:
            Exception: the error of the one that has, or the `Problems` that several have.
        """
        lines = tuple(dict.fromkeys(line for error in self._errors for line in lines_of(error)))
        if len(lines) > 1:
            raise Problems(lines)
        if self._errors:
            raise self._errors[0]


def lines_of(error: Exception) -> tuple[str, ...]:
    """Return the text of an error, a line a problem, without the drawing of a schedule."""
    if isinstance(error, OSError) and error.filename is not None:
        return (f'{error.filename}: {error.strerror}',)
    return error.lines if isinstance(error, Problems) else (str(error).partition('\n')[0],)
