"""The collector of reference cycles, held off while millions of values without any are made."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def held_off() -> Generator[None, None, None]:
    """Collect nothing within: each collection would look at all that has been made, in vain."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
