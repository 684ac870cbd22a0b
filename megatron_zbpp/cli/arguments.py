"""Arguments that several commands share: which schedule, of which shape, at which costs."""

from __future__ import annotations

import argparse
import json
import sys
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from megatron_zbpp.analysis.gain import RIVAL
from megatron_zbpp.cli import values
from megatron_zbpp.ir import files, strict_json
from megatron_zbpp.mcore.settings import meaning
from megatron_zbpp.partitioning.devices import Devices
from megatron_zbpp.partitioning.layer_costs import LayerCosts
from megatron_zbpp.partitioning.layers import Layers
from megatron_zbpp.planner.cases import IN_FILE, CaseRequest
from megatron_zbpp.planner.cost_sources import NO_TIMES, TIMES_FILE, CostSource, StageCosts, Times
from megatron_zbpp.planner.sequence_slices import SliceRequest
from megatron_zbpp.schedules import find
from megatron_zbpp.techniques import ASKED
from megatron_zbpp.techniques.composition import OUTPUT, SHARED_LAYERS
from megatron_zbpp.techniques.slices.balance import Attention
from megatron_zbpp.techniques.slices.sizes import AUTO, Slices, ToFind, number_of, slices_of
from megatron_zbpp.techniques.vocabulary.graph import USUAL_SHARE

_FLAGS = {'num_ranks': '--pp', 'num_microbatches': '--microbatches', 'num_chunks': '--vpp'}
_FLAGS['costs'] = '--times'


def flag(name: str) -> str:
    """Return the option for an argument of `megatron_zbpp.plan` and its like."""
    return _FLAGS.get(name) or '--' + name.replace('_', '-')


def case_request(args: argparse.Namespace, **others: Any) -> CaseRequest:
    """Return the schedule that a command's options ask for; `others` come first."""
    given = {**vars(args), **others}
    attention = given.get('attention')
    cut = SliceRequest(
        given.get('slices'),
        given.get('seq_length'),
        attention if isinstance(attention, dict) else Attention(attention or 0.0),
        given.get('context_exchange'),
        flag,
    )
    own = {each.name: given[each.name] for each in fields(CaseRequest) if each.name in given}
    amounts = {name: given.get(name) for name in ASKED}
    return CaseRequest(**{**own, 'cut': cut, 'amounts': amounts, 'name': flag})


def add_renamed(parser: ArgumentParser, name: str, old: str, dest: str, **keywords: Any) -> None:
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


def add_source(parser: ArgumentParser) -> None:
    """Add which schedule: a name and its shape, or a file."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument('--schedule', metavar='NAME', help='see zbpp list')
    source.add_argument(
        '--file', type=values.path, metavar='FILE', help='our JSON, a plan, or the CSV of torch'
    )
    add_shape(parser, required=False)


def add_shape(
    parser: ArgumentParser, required: bool, chunks: Callable[[str], object] | None = None
) -> None:
    """Add p, m, n and v."""
    parser.add_argument(
        '--pp', type=values.ranks, dest='num_ranks', metavar='P', required=required, help='ranks'
    )
    parser.add_argument(
        '--microbatches',
        type=values.count,
        dest='num_microbatches',
        metavar='M',
        required=required,
        help='microbatches',
    )
    text = meaning('num_chunks')
    add_slices(parser, auto=chunks is not None)
    if chunks is None:
        parser.add_argument('--vpp', type=values.count, dest='num_chunks', metavar='V', help=text)
    else:
        parser.add_argument(
            '--vpp', type=chunks, dest='num_chunks', metavar='V,...', help=f'{text}; default 1,2,4'
        )


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
        parser.add_argument(
            '--context-exchange',
            type=values.amount,
            metavar='TIME',
            help='ranks even out the attention of equal slices (SlimPipe): time that a pass waits '
            'for each block of a slice by a slice that moves; simulated, does not train',
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


def _attention(text: str) -> float | dict[int, float]:
    if '=' not in text:
        return values.share(text)
    pairs = [part.partition('=') for part in text.split(',')]
    return {values.count(tokens): values.amount(time) for tokens, _, time in pairs}


def add_vocabulary(parser: ArgumentParser, share: Callable[[str], object] | None = None) -> None:
    """Add the output layer on all ranks."""
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
    except ArgumentTypeError as error:
        raise ArgumentTypeError(f'{error}, or {IN_FILE}') from error


def add_costs(parser: ArgumentParser, layers: bool = True) -> None:
    """Add times, those of a file of `layers`, too, and what else a schedule costs."""
    source = parser.add_mutually_exclusive_group()
    if layers:
        source.add_argument(
            '--layers-file',
            type=_layers,
            dest='costs',
            default=NO_TIMES,
            metavar='FILE',
            help='of a model, as for zbpp partition, in place of --times: each placement gets its '
            'even split',
        )
    source.add_argument(
        '--times',
        type=_times,
        dest='costs',
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


def add_against(parser: ArgumentParser) -> None:
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
        raise ArgumentTypeError(str(error)) from error


def add_title(parser: ArgumentParser) -> None:
    """Add what heads a picture."""
    parser.add_argument('--title', metavar='TEXT', help='of the picture')


def add_copy_ratio(parser: ArgumentParser) -> None:
    """Add k, the ratio of copies to passes."""
    parser.add_argument(
        '--copy-ratio',
        type=values.amount,
        metavar='K',
        help='time of a copy out and back, over that of F, B and W of what is copied; default 1',
    )


def add_search(
    command: ArgumentParser, objectives: Sequence[str], seconds: float, more: str = ''
) -> None:
    """Add what a search is for, how long it takes, and where its plan goes."""
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


_Read = TypeVar('_Read')


def _layers(text: str) -> LayerCosts:
    return LayerCosts(_read(text, load_layers, 'a file of layers, as zbpp profile -o writes'), text)


def _times(text: str) -> CostSource:
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
        raise ArgumentTypeError(f'{text!r}: {error.strerror}') from error
    except ValueError as error:
        raise ArgumentTypeError(f'{error}: give {wanted}') from error


def load_layers(path: str) -> Layers:
    """Return the layers in a file."""
    return _read_part(path, Layers.from_json, 'layers')


def load_devices(path: str | None, ranks: int | None) -> Devices:
    """Return the devices in a file, or so many that are alike."""
    if path is None:
        if ranks is None:
            raise ValueError('--pp or --devices: say how many ranks there are')
        return Devices.alike(ranks)
    devices = _read_part(path, Devices.from_json, 'devices')
    if ranks not in (None, len(devices)):
        raise ValueError(f'--pp {ranks}, but {path} has {len(devices)} devices: leave --pp out')
    return devices


def _read_part(path: str, reader: Callable, name: str):
    def parse(text: str):
        data = strict_json.loads(text)
        fields = data if strict_json.is_object(data) else {}
        kept = fields.get(name) if 'schedule' in fields else None
        try:
            return reader(text if kept is None else json.dumps(kept))
        except ValueError as error:
            other = '' if name in fields else strict_json.other_kind(data, '', ': ')
            raise ValueError(f'{error}{other}') from error

    return files.read(path, parse, f'a file of {name}, as JSON or YAML')
