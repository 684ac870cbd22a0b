"""Slices of sequences on the command line: how many, how long, and what each takes."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from dataclasses import replace

from megatron_zbpp.cli import values
from megatron_zbpp.ir import Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.partitioning.fitting import fit_attention
from megatron_zbpp.techniques.composition import techniques_of
from megatron_zbpp.techniques.slices.balance import Attention, balanced, exchanged, in_parts
from megatron_zbpp.techniques.slices.graph import Slicing, exchanging_context, sized
from megatron_zbpp.techniques.slices.sizes import (
    AUTO,
    Slices,
    ToFind,
    number_of,
    sizes_of,
    slices_of,
)

Measured = dict[int, float]


def add_slices(parser: ArgumentParser, auto: bool = False) -> None:
    """Add n and sizes, and what attention takes."""
    proposed = f', or {AUTO}: as many balanced ones as pay' if auto else ''
    parser.add_argument(
        '--slices',
        type=lambda text: _slices(text, auto),
        metavar='N|SIZE,...|balanced:N' + '|auto' * auto,
        help='parts of each sequence: how many equal ones, tokens of each, or how many that take '
        f'equal times{proposed}; default 1, of seq1f1b and its kin 4',
    )
    parser.add_argument(
        '--seq-length',
        type=values.count,
        metavar='TOKENS',
        help='of a sequence, for slices whose sizes are to be found',
    )
    parser.add_argument(
        '--attention',
        type=_attention,
        metavar='SHARE|TOKENS=F,...',
        help='share of attention in F of a whole sequence, or F as measured at two lengths or '
        'more: the later slices take longer; default 0',
    )
    if not auto:
        _add_exchange(parser)


def _add_exchange(parser: ArgumentParser) -> None:
    """Add context exchange, which is simulated only."""
    parser.add_argument(
        '--context-exchange',
        type=values.amount,
        metavar='TIME',
        help='ranks even out the attention of equal slices (SlimPipe): time that a pass waits for '
        'each block of a slice by a slice that moves; simulated, does not train',
    )


def _slices(text: str, auto: bool) -> Slices:
    values.require(text, text.isascii(), 'give a number such as 4')
    try:
        found = slices_of(text)
    except ValueError as error:
        raise ArgumentTypeError(f'{text!r} is not possible: {error}') from error
    if not number_of(found):
        cure = 'give auto, and --least-slice TOKENS' if auto else 'give how many, or balanced:N'
        values.require(text, auto and found == ToFind(), cure)
    return found


def _attention(text: str) -> float | Measured:
    if '=' not in text:
        return values.share(text)
    pairs = [part.partition('=') for part in text.split(',')]
    return {values.count(tokens): values.amount(time) for tokens, _, time in pairs}


def number(args: Namespace) -> int | None:
    """Return n as it was asked for; None: it was not."""
    asked: Slices | None = getattr(args, 'slices', None)
    return None if asked is None else number_of(asked)


def attention(args: Namespace) -> Attention:
    """Return what F is made of.

    Raises:
        ValueError: it was measured, but it is not said how long sequences are.
    """
    told = getattr(args, 'attention', None)
    if not isinstance(told, dict):
        return Attention(told or 0.0)
    return fit_attention(told, length(args, '--attention by lengths'))


def length(args: Namespace, what: str) -> int:
    """Return the tokens of a sequence.

    Raises:
        ValueError: they are not given, and `what` needs them.
    """
    if args.seq_length is None:
        raise ValueError(f'{what} needs --seq-length: give the tokens of a sequence')
    return args.seq_length


def sizes(args: Namespace, costs: Costs) -> tuple[int, ...]:
    """Return the tokens of each slice; none: slices are equal.

    Raises:
        ValueError: those asked for are not of such a sequence.
    """
    asked: Slices | None = getattr(args, 'slices', None)
    if isinstance(asked, ToFind):
        tokens = length(args, f'--slices {asked}')
        return balanced(asked.number, tokens, attention(args), costs)
    if not isinstance(asked, tuple):
        return ()
    if args.seq_length not in (None, sum(asked)):
        raise ValueError(
            f'--slices of {sum(asked)} tokens in all, but --seq-length is '
            f'{args.seq_length}: give sizes that sum to it'
        )
    return asked


def costs_in_slices(args: Namespace, costs: Costs, slices: int, own: tuple[int, ...]) -> Costs:
    """Return costs that say what each of `slices` slices takes, `own` tokens long or equal."""
    if slices == 1:
        return costs
    return in_parts(costs, own or (1,) * slices, attention(args))


def in_their_sizes(args: Namespace, schedule: Schedule, costs: Costs) -> tuple[Schedule, Costs]:
    """Return a schedule of slices that says how long they are, with the costs of each."""
    own, slices = sizes(args, costs), schedule.graph.num_slices
    if own and slices > 1:
        schedule = replace(schedule, graph=sized(schedule.graph, own))
    own, wire = sizes_of(schedule.graph), getattr(args, 'context_exchange', None)
    if wire is not None:
        if own or slices == 1:
            raise ValueError(
                f'--context-exchange {wire:g} needs slices of one size: give --slices N, or leave '
                'it out'
            )
        if exchanging_context.__name__ not in techniques_of(schedule):
            schedule = replace(schedule, graph=exchanging_context(schedule.graph))
        return schedule, exchanged(costs, schedule.placement, slices, attention(args), wire)
    return schedule, costs_in_slices(args, costs, slices, own)


def graph(args: Namespace, costs: Costs) -> Slicing | None:
    """Return what makes the graph that is planned; None: it is of whole sequences."""
    slices = number(args) or 1
    return Slicing(slices, sizes(args, costs)) if slices > 1 else None
