"""Arguments that several commands share: which schedule, of which shape, at which costs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from megatron_zbpp.analysis.gain import RIVAL
from megatron_zbpp.cli import values
from megatron_zbpp.cli.inputs import IN_FILE, NO_TIMES, TIMES_FILE, StageCosts, Times
from megatron_zbpp.cli.layer_costs import LayerCosts, load_layers
from megatron_zbpp.cli.slicing import add_slices
from megatron_zbpp.mcore.settings import meaning
from megatron_zbpp.schedules import find
from megatron_zbpp.techniques.composition import OUTPUT, SHARED_LAYERS
from megatron_zbpp.techniques.vocabulary.graph import USUAL_SHARE


def add_renamed(
    parser: argparse.ArgumentParser, name: str, old: str, dest: str, **keywords: Any
) -> None:
    """Add the option `name`, and `old`, which had a second meaning elsewhere and says so."""

    class Renamed(argparse.Action):
        def __call__(
            self, _: object, namespace: argparse.Namespace, given: Any, written: str | None = None
        ) -> None:
            setattr(namespace, self.dest, given)
            if written == old:
                print(f'zbpp: note: {old} is named {name} here: write that', file=sys.stderr)

    parser.add_argument(name, dest=dest, action=Renamed, **keywords)
    parser.add_argument(old, dest=dest, action=Renamed, **{**keywords, 'help': argparse.SUPPRESS})


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add which schedule: a name and its shape, or a file."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument('--schedule', metavar='NAME', help='see zbpp list')
    source.add_argument(
        '--file', type=values.path, metavar='FILE', help='our JSON, a plan, or the CSV of torch'
    )
    add_shape(parser, required=False)


def add_shape(
    parser: argparse.ArgumentParser, required: bool, chunks: Callable[[str], object] | None = None
) -> None:
    """Add p, m, n and v."""
    parser.add_argument('--pp', type=values.ranks, metavar='P', required=required, help='ranks')
    parser.add_argument(
        '--microbatches', type=values.count, metavar='M', required=required, help='microbatches'
    )
    text = meaning('num_chunks')
    add_slices(parser, auto=chunks is not None)
    if chunks is None:
        parser.add_argument('--vpp', type=values.count, metavar='V', help=text)
    else:
        parser.add_argument('--vpp', type=chunks, metavar='V,...', help=f'{text}; default 1,2,4')


def add_vocabulary(
    parser: argparse.ArgumentParser, share: Callable[[str], object] | None = None
) -> None:
    """Add the output layer on all ranks.

    Args:
        parser: of a command.
        share: reads what is asked for, auto and auto:SHARE, too; None: no such choice is to be had.
    """
    where = f'; auto: where it pays, with {USUAL_SHARE} or times of FILE for no SHARE'
    choice = f'|auto|auto:SHARE|auto:{IN_FILE}' if share else ''
    parser.add_argument(
        '--vocab-parallel',
        type=share or shard,
        metavar=f'SHARE|{IN_FILE}{choice}',
        help='the output layer on all ranks, as passes S and T: forward of a shard over that of a '
        f'full rank, or {IN_FILE} if that of --times has times of S and T'
        f'{where if share else ""}; default: it is part of the last stage',
    )
    parser.add_argument(
        '--vocab-layers',
        choices=SHARED_LAYERS,
        default=OUTPUT,
        help='layers on all ranks with --vocab-parallel; input: the word embedding, as passes D, I '
        'and J; default output',
    )


def shard(text: str) -> float | str:
    """Return the share of a shard, or where its times are."""
    try:
        return text if text == IN_FILE else values.amount(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f'{error}, or {IN_FILE}') from error


def add_costs(parser: argparse.ArgumentParser, layers: bool = True) -> None:
    """Add times, those of a file of `layers`, too, and what else a schedule costs."""
    source = parser.add_mutually_exclusive_group()
    if layers:
        source.add_argument(
            '--layers-file',
            type=_layers,
            dest='times',
            default=NO_TIMES,
            metavar='FILE',
            help='of a model, as for zbpp partition, in place of --times: each placement gets its '
            'even split',
        )
    source.add_argument(
        '--times',
        type=_times,
        default=NO_TIMES,
        metavar='F,B,W|FILE',
        help='times of a full rank, or a JSON file of costs: F, B and W by stage, and at will '
        'activation, retained, parameters, comm, message, edges, hops, speeds, together, pairs, '
        'times, amounts, parts, collectives; default 1,1,1',
    )
    parser.add_argument(
        '--comm',
        type=values.amount,
        metavar='C',
        help='time of a message; default 0, or as in FILE',
    )
    parser.add_argument(
        '--together',
        type=values.shares,
        metavar='SHARE',
        help='time of a forward and a backward that run as one (dualpipe-v has such pairs), over '
        'that of both; or of each kind of pair, which stp has: FB=0.9,FF=0.8,FW=0.95; default: '
        'they run apart, or as in FILE',
    )
    parser.add_argument(
        '--memory-limit',
        type=values.memory,
        metavar='A',
        help=f'{meaning("memory_limit")}, or in units of FILE, whose parameters count; or in '
        'bytes, such as 60GiB, where FILE has activation and parameters in bytes',
    )


def add_against(parser: argparse.ArgumentParser) -> None:
    """Add the schedule that results are compared with."""
    parser.add_argument(
        '--against',
        type=_family,
        default=RIVAL,
        metavar='NAME',
        help='the schedule that a gain is measured against, such as the one that you run: '
        'interleaved is that of several chunks in Megatron; default 1f1b',
    )


def _family(text: str) -> str:
    try:
        return find(text).name
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_title(parser: argparse.ArgumentParser) -> None:
    """Add what heads a picture."""
    parser.add_argument('--title', metavar='TEXT', help='of the picture')


def add_copy_ratio(parser: argparse.ArgumentParser) -> None:
    """Add k, the ratio of copies to passes."""
    parser.add_argument(
        '--copy-ratio',
        type=values.amount,
        metavar='K',
        help='time of a copy out and back, over that of F, B and W of what is copied; default 1',
    )


_Read = TypeVar('_Read')


def _layers(text: str) -> LayerCosts:
    return LayerCosts(_read(text, load_layers, 'a file of layers, as zbpp profile -o writes'), text)


def _times(text: str) -> Times | StageCosts:
    if ',' in text:
        parts = [values.amount(part) for part in text.split(',')]
        values.require(text, len(parts) == 3, 'give three times, F,B,W')
        values.require(text, any(parts), 'give a time above 0')
        return Times(*parts)
    return _read(text, StageCosts.read, TIMES_FILE)


def _read(text: str, read: Callable[[str], _Read], wanted: str) -> _Read:
    try:
        return read(values.path(text))
    except OSError as error:
        raise argparse.ArgumentTypeError(f'{text!r}: {error.strerror}') from error
    except ValueError as error:
        raise argparse.ArgumentTypeError(f'{error}: give {wanted}') from error
