"""How this room speaks of flags, and to the user."""

from __future__ import annotations

import os
import sys


def flag(name: str) -> str:
    """Return the flag that sets the argument of that name."""
    return '--' + name.replace('_', '-')


def say(message: str) -> None:
    """Tells the user once, not on every rank."""
    if int(os.environ.get('RANK', 0)) == 0:
        print(f'megatron_zbpp: {message}', file=sys.stderr, flush=True)
