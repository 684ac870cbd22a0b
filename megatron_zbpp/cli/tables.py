"""`--table FORMAT`: the tables of a command alone on stdout, in that format."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

from megatron_zbpp.ir.tables import FORMATS, Rows

_found: ContextVar[list[tuple[Sequence[str], Rows]] | None] = ContextVar('found', default=None)


def print_table(heads: Sequence[str], rows: Rows) -> None:
    """Print a table; with `--table` it is kept for that."""
    found = _found.get()
    if found is None:
        print(FORMATS['text'](heads, rows))
    else:
        found.append((heads, rows))


@contextlib.contextmanager
def alone(to: str | None) -> Iterator[None]:
    """Print the tables of what runs inside, and nothing else of it; None: all, as it is.

    Raises:
        ValueError: it has none.
    """
    if to is None:
        yield
        return
    found: list[tuple[Sequence[str], Rows]] = []
    token = _found.set(found)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        _found.reset(token)
    if not found:
        raise ValueError(f'--table {to}: with these options there is no table: leave it out')
    sys.stdout.write('\n\n'.join(FORMATS[to](heads, rows) for heads, rows in found) + '\n')
