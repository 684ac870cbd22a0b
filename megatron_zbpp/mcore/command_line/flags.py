"""Our flags: those that the fields of `Settings` describe."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_zbpp.ir import Schedule
from megatron_zbpp.mcore.command_line.aliases import add_aliases, announce, translate
from megatron_zbpp.mcore.command_line.messages import flag
from megatron_zbpp.mcore.options import Option
from megatron_zbpp.mcore.problems import Checks
from megatron_zbpp.mcore.settings import OPTIONS, Settings

FLAGS = [each for option in OPTIONS.values() for each in option.flags]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one group for our flags, and one for what other forks call them."""
    group = parser.add_argument_group(
        'pipeline schedule (megatron_zbpp)', "Without a schedule, everything is Megatron's own."
    )
    for each in FLAGS:
        if not each.unit:
            group.add_argument(each.name, action='store_true', help=each.text)
            continue
        default = each.shown_default and f' Default: {each.shown_default}.'
        group.add_argument(
            each.name,
            type=str if each.least is None else functools.partial(_number_or_text, each),
            default=each.flag_default,
            metavar=each.unit,
            help=each.text + default,
        )
    add_aliases(parser)


def _number_or_text(option: Option, text: str) -> float | str:
    """Return the number, of the type that the option takes; else the text, for it to refuse."""
    try:
        return int(text) if isinstance(option.least, int) else float(text)
    except ValueError:
        return text


def read(args: argparse.Namespace) -> Mapping[str, Any] | None:
    """Return the values of our flags, those of other forks translated with a word; None: none.

    Raises:
        ValueError: flags that contradict each other, or flags of a schedule without one.
    """
    values = {each.dest: getattr(args, each.dest) for each in FLAGS}
    translated = translate(args)
    for name, value in translated.items():
        if values[name] not in (None, value):
            raise ValueError(
                f'{flag(name)} {values[name]} and a flag that means {value}: give one of them'
            )
    announce(args, translated)
    values |= translated
    if values['pipeline_schedule'] is None and values['pipeline_schedule_file'] is None:
        idle = [
            each
            for each in FLAGS
            if values[each.dest] != (each.flag_default if each.unit else False)
        ]
        if idle:
            names = ', '.join(each.name for each in idle)
            are = 'are' if len(idle) > 1 else 'is'
            raise ValueError(f'{names} {are} about a --pipeline-schedule: give that, too')
        return None
    return values


def of_schedule(words: Sequence[str]) -> list[str]:
    """Return the flags that name a schedule, without their values."""
    names = (word.partition('=')[0] for word in words)
    return [name for name in names if name in ('--pipeline-schedule', '--pipeline-schedule-file')]


def _prewarm(given: Mapping[str, Any]) -> bool | None:
    on, off = given['pipeline_prewarm'], given['no_pipeline_prewarm']
    if on and off:
        raise ValueError('--pipeline-prewarm and --no-pipeline-prewarm: give one of them')
    return True if on else False if off else None


def settings_of(
    given: Mapping[str, Any], source: str | Schedule, num_chunks: int | None
) -> Settings:
    """Return the settings that all flags together ask for.

    Args:
        given: the values of our flags.
        source: a name, or a schedule.
        num_chunks: of a rank; None: the schedule's default.

    Raises:
        ValueError: a value that cannot work, with the cure.
        OSError: a file cannot be read.
    """
    checks, usable = Checks(), dict(given)
    for each in FLAGS:
        with checks.one():
            usable[each.dest] = each.flag_default  # for other checks, where this value is wrong
            each.require(given[each.dest], each.name)
            usable[each.dest] = given[each.dest]
    made = None
    with checks.one():
        made = _settings(usable, source, num_chunks)
    checks.require_all()
    assert made is not None
    return made


def _settings(given: Mapping[str, Any], source: str | Schedule, num_chunks: int | None) -> Settings:
    """Return the settings of values that their flags take; raises as `settings_of`."""
    early = given['enable_optimizer_post_validation']
    clean_steps = given['optimizer_post_validation_clean_steps']
    return Settings(
        source,
        num_chunks,
        post_validation=early and clean_steps,
        same_start=not given['no_pipeline_same_start'],
        prewarm=_prewarm(given),
        **{name: given[each.dest] for name, each in OPTIONS.items() if each.flag},
    )
