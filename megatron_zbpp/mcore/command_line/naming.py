"""Errors name what the user has given: our flags in place of arguments of `enable`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields

from megatron_zbpp.mcore.command_line.flags import PipelineScheduleConfig
from megatron_zbpp.mcore.command_line.messages import flag
from megatron_zbpp.mcore.settings import Settings


@contextmanager
def renaming(rename: Callable[[str], str]) -> Iterator[None]:
    """Raise errors of what is refused with their messages renamed.

    Args:
        rename: returns a message in the user's names.
    """
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        renamed = rename(str(error))
        if renamed == str(error):
            raise
        kind = ValueError if isinstance(error, ValueError) else NotImplementedError
        raise kind(renamed) from error


def flags_by_argument() -> dict[str, str]:
    """Return our flags by the arguments of `enable` that they set."""
    ours = [field.name for field in fields(PipelineScheduleConfig)]
    return {
        argument.name: flag(name)
        for argument in fields(Settings)
        for name in ours
        if name.endswith(f'_{argument.name}')
    }


def by_flags(message: str) -> str:
    """Return a message with flags in place of arguments.

    >>> by_flags('watchdog_timeout is -1: give a number from 0 up')
    '--pipeline-watchdog-timeout is -1: give a number from 0 up'
    """
    for argument, own in flags_by_argument().items():
        place = rf'\b{argument}\b' if '_' in argument else rf'^{argument}(?= is|: | of )'
        message = re.sub(place, own, message)
    return message
