"""Errors name what the user has given: our flags in place of arguments of `enable`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron_zbpp.mcore.problems import Problems
from megatron_zbpp.mcore.settings import OPTIONS

# our flags by the arguments of `enable` that they set
FLAG_OF = {name: each.flags[0].name for name, each in OPTIONS.items() if each.flags}


@contextmanager
def renaming(rename: Callable[[str], str]) -> Iterator[None]:
    """Raise errors of what is refused with their messages renamed.

    Args:
        rename: returns a message in the user's names.
    """
    try:
        yield
    except Problems as error:
        raise Problems([*map(rename, error.lines)]) from error
    except (ValueError, NotImplementedError) as error:
        renamed = rename(str(error))
        if renamed == str(error):
            raise
        kind = ValueError if isinstance(error, ValueError) else NotImplementedError
        raise kind(renamed) from error


def by_flags(message: str) -> str:
    """Return a message with flags in place of arguments.

    >>> by_flags('watchdog_timeout is -1: give a number from 0 up')
    '--pipeline-watchdog-timeout is -1: give a number from 0 up'
    """
    for argument, own in FLAG_OF.items():
        place = rf'\b{argument}\b' if '_' in argument else rf'^{argument}(?= is|: | of )'
        message = re.sub(place, own, message)
    return message
