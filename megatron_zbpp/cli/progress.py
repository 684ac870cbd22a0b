"""Progress of a long command, on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def now(text: str) -> None:
    """Show on stderr what a command is doing, in place of what it did before; empty: nothing."""
    if sys.stderr.isatty():
        print(f'\r\x1b[K{text}', end='', file=sys.stderr, flush=True)


@contextmanager
def progress(text: str, unit: str, total: int) -> Iterator[Callable[[float], None]]:
    """Show a bar on stderr while the block runs, if that is a terminal.

    Yields:
        What is told the share that is done, from 0 to 1.
    """
    if not sys.stderr.isatty():
        yield lambda share: None
        return
    from tqdm import tqdm

    with tqdm(desc=text, unit=unit, total=total, leave=False) as bar:

        def show(share: float) -> None:
            bar.update(round(total * share) - bar.n)

        yield show
