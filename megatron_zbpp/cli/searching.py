"""Shared by the searches of `zbpp`: arguments, a progress bar, and an end by Ctrl-C."""

from __future__ import annotations

import signal
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from typing import TypeVar

from megatron_zbpp.cli import values
from megatron_zbpp.cli.arguments import add_title
from megatron_zbpp.cli.progress import progress

Found = TypeVar('Found')
_WIDE = 0.1  # gap to the lower bound above which a longer search is proposed


def add_search(
    command: ArgumentParser, objectives: Sequence[str], seconds: float, more: str = ''
) -> None:
    """Add what a search is for, how long it takes, and where its plan goes.

    Args:
        command: that searches.
        objectives: that it knows.
        seconds: by default.
        more: what else can be written.
    """
    asynchronous = ', period for asynchronous training' if 'period' in objectives else ''
    command.add_argument(
        '--objective',
        choices=objectives,
        default='makespan',
        help='window where ranks do not wait for each other between iterations'
        f'{asynchronous}; default makespan',
    )
    command.add_argument(
        '--seconds',
        type=values.seconds,
        default=seconds,
        metavar='N',
        help=f'at most; default {seconds:g}',
    )
    command.add_argument(
        '--seed',
        type=values.whole,
        default=0,
        metavar='N',
        help='another one searches elsewhere; default 0',
    )
    command.add_argument(
        '-o',
        '--output',
        type=values.path,
        metavar='FILE',
        help='the plan (.json, for --pipeline-schedule-file) or its picture (.html, .svg, .png, '
        f'.pdf){more}',
    )
    add_title(command)


def searched(
    doing: str,
    what: str,
    search: Callable[[Callable[[float], None]], Found],
    best: Callable[[KeyboardInterrupt], Found | None],
) -> tuple[Found, int]:
    """Return what a search finds, and the exit status: 0, or 130 where Ctrl-C ended it.

    Args:
        doing: for the bar.
        what: was found by then, for who ends it.
        search: is told whom to tell the share of its time that is spent.
        best: what an interruption has; None: nothing.

    Raises:
        KeyboardInterrupt: before anything was found.
    """
    try:
        with progress(doing, '%', 100) as done:
            return search(done), 0
    except KeyboardInterrupt as interruption:
        found = best(interruption)
        if found is None:
            raise
    print(f'zbpp: interrupted: {what} by then', file=sys.stderr)
    return found, 128 + signal.SIGINT


def tell_cut_short(args: Namespace, begun: float) -> None:
    """Print that the clock ended planning, which began at `begun`, and the cure."""
    print(
        f'zbpp: the clock ended planning after {time.monotonic() - begun:.0f} s: not all '
        f'schedules of {args.pp} ranks and {args.microbatches} microbatches were tried; give '
        'more --seconds, or fewer --microbatches',
        file=sys.stderr,
    )


def tell_wide_gap(args: Namespace, gap: float, num_passes: int) -> None:
    """Print that a search over actions was short, where its plan may be far from the best."""
    if args.actions and gap > _WIDE:
        print(
            f'zbpp: gap {gap:.0%}: a search of {args.seconds:g} s tries few actions for '
            f'{num_passes} passes; give more --seconds, a larger --memory-limit, or fewer '
            '--microbatches',
            file=sys.stderr,
        )
