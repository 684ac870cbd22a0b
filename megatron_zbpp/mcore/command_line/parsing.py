"""Parses the flags of a job by argparse, which ends at its first error, and finds all of them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from megatron_zbpp.mcore.command_line import flags, plan_layout
from megatron_zbpp.mcore.command_line.naming import by_flags, renaming
from megatron_zbpp.mcore.problems import Checks


class Parsed(NamedTuple):
    """Parsed flags.

    Attributes:
        args: of those that are right.
        unknown: words that the parser does not know.
        checks: with an error for each that is wrong.
    """

    args: argparse.Namespace
    unknown: list[str]
    checks: Checks


def parse(
    parser: argparse.ArgumentParser,
    parse_known_args: Callable[..., tuple[argparse.Namespace, list[str]]],
    words: Sequence[str],
    namespace: argparse.Namespace | None = None,
    where: str = '',
) -> Parsed:
    """Return the flags in `words`: one that is wrong is taken out of them, and told.

    Where some are, the values of our own flags are checked, too: nothing else can be said then.

    Args:
        parser: knows the flags, without abbreviations.
        parse_known_args: its method.
        words: flags and their values.
        namespace: that is filled; None: a new one.
        where: what an error of argparse begins with.
    """
    parser.exit_on_error = False
    checks, left = Checks(), list(words)
    while True:
        try:
            args, unknown = parse_known_args(left, namespace)
            break
        except argparse.ArgumentError as error:
            with checks.one():
                raise ValueError(f'{where}{error}') from error
            names = [name[2:] for name in (error.argument_name or '').split('/')]
            shorter = list(without(left, names, ()))
            if len(shorter) == len(left):
                checks.require_all()
            left = shorter
    if checks.failed and flags.of_schedule(words) == flags.of_schedule(left):
        with checks.one():
            _require_ours(args)
    return Parsed(args, unknown, checks)


@renaming(by_flags)
def _require_ours(args: argparse.Namespace) -> None:
    given = flags.read(args)
    if given is not None:
        plan_layout.require_values(given)


def without(words: Iterable[str], valued: Iterable[str], switches: Iterable[str]) -> Iterator[str]:
    """Yield words without these flags, and without the values behind the first kind."""
    valued, switches = {f'--{name}' for name in valued}, set(switches)
    dropping = False
    for word in words:
        if word.startswith('--'):
            name = word.partition('=')[0]
            dropping = name in valued
            if dropping or name in switches:
                continue
        elif dropping:
            continue
        yield word
