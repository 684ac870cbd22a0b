"""Options of commands: tables of them, parsers of their values, and those that several share.

An error of a value names the cure.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from math import isfinite, nan
from typing import Any, TypeVar

from megatron_zbpp.analysis.gain import RIVAL
from megatron_zbpp.ir import files, strict_json
from megatron_zbpp.mcore.settings import meaning
from megatron_zbpp.partitioning.layers import Devices, Layers
from megatron_zbpp.partitioning.space import LayerCosts
from megatron_zbpp.planner import cost_sources
from megatron_zbpp.planner.cases import IN_FILE, CaseRequest
from megatron_zbpp.planner.limits import Bytes
from megatron_zbpp.schedules import find
from megatron_zbpp.techniques.composition import OUTPUT, SHARED_LAYERS
from megatron_zbpp.techniques.slices.graph import AUTO, Slices, ToFind, number_of, slices_of
from megatron_zbpp.techniques.vocabulary.graph import USUAL_SHARE

MOST_RANKS = 4096  # of a pipeline: drawn or simulated within seconds
_MOST = 1e30  # of any number: sums and products of such are numbers, too
_MOST_COUNTED = 10**12  # of microbatches, tokens, words, steps
_MOST_LAYERS = 10_000  # of a model: each has its costs
_WEEK = 7 * 24 * 3600  # in seconds
_BYTES = re.compile(r'([0-9.]+(?:e[0-9]+)?) ?(B|[kKMGT]B|[KMGT]iB)', re.ASCII)
_T = TypeVar('_T')
_KIND = re.compile(r'(?P<kind>\w+)(?P<many>[!*+]?)( as (?P<dest>\w+))?( = (?P<default>.+))?')


def add_options(parser: Any, *tables: str, **kinds: Callable[[str], Any] | Sequence[str]) -> None:
    """Add the options of tables to a parser.

    A row has three columns, two spaces or more apart: names and metavar; kind; help, which goes on
    in lines that are indented. In brackets stands a name that an option had earlier, which says so.
    The kind is a function of this module, or `text`, or `switch`, followed by `!` for an option
    that is needed, by `*` or `+` for several values, then by ` as DEST` and ` = DEFAULT`. `kinds`
    are further functions that read a value, or its choices, by name.
    """
    rows = (re.split(r'\n(?=\S)', textwrap.dedent(table).strip()) for table in tables)
    for row in chain.from_iterable(rows):
        names, kind, text = re.split(r'\s{2,}', row, maxsplit=2)
        words, found = names.split(), _KIND.fullmatch(kind)
        assert found is not None, f'{kind!r} of {names} is no kind'
        flags = [word for word in words if word[0] == '-' and word != '--'] or words[:1]
        old = [word[1:-1] for word in words if word[0] == '(']
        keywords: dict[str, Any] = {'help': ' '.join(text.split())}
        keywords |= {'dest': found['dest']} if found['dest'] else {}
        keywords |= {'required': True} if found['many'] == '!' else {}
        keywords |= {'nargs': found['many']} if found['many'] in ('*', '+') else {}
        keywords |= {'default': found['default']} if found['default'] else {}
        if found['kind'] == 'switch':
            parser.add_argument(*flags, action='store_true', **keywords)
            continue
        read = kinds.get(found['kind']) or globals().get(found['kind'])
        if isinstance(read, Sequence):
            keywords['choices'] = read
        elif found['kind'] != 'text':
            assert read is not None, f'{found["kind"]} is no function that reads a value'
            keywords['type'] = read
        if rest := words[len(flags) + len(old) :]:
            keywords['metavar'] = ' '.join(rest)
        if not old:
            parser.add_argument(*flags, **keywords)
            continue
        keywords['action'] = _renamed(flags[0], old[0])
        dest = keywords.setdefault('dest', flags[0][2:].replace('-', '_'))
        parser.add_argument(*flags, **keywords)
        parser.add_argument(*old, **{**keywords, 'dest': dest, 'help': argparse.SUPPRESS})


def _renamed(name: str, old: str) -> type[argparse.Action]:
    """Return an action that notes that `old`, which has a second meaning elsewhere, is `name`."""

    class Renamed(argparse.Action):
        def __call__(
            self, _: object, namespace: Any, value: Any, written: str | None = None
        ) -> None:
            setattr(namespace, self.dest, value)
            if written == old:
                print(f'zbpp: note: {old} is named {name} here: write that', file=sys.stderr)

    return Renamed


def require(text: str, ok: bool, cure: str) -> None:
    """Raise unless the text makes sense."""
    if not ok:
        raise argparse.ArgumentTypeError(f'{text!r} is not possible: {cure}')


def count(text: str) -> int:
    """Return a whole number from 1 up."""
    fits = text.isascii() and text.isdecimal() and int(text) > 0
    require(text, fits, 'give a whole number from 1 up')
    require(text, int(text) <= _MOST_COUNTED, f'give at most {_MOST_COUNTED}')
    return int(text)


def whole(text: str) -> int:
    """Return a whole number from 0 up."""
    require(text, text.isascii() and text.isdecimal(), 'give a whole number from 0 up')
    return int(text)


def amount(text: str) -> float:
    """Return a number from 0 up."""
    value = _float(text)
    require(text, isfinite(value) and value >= 0, 'give a number from 0 up')
    require(text, value <= _MOST, f'give a number up to {_MOST:g}')
    return value


def checked(
    read: Callable[[str], _T], fits: Callable[[_T], bool], cure: str
) -> Callable[[str], _T]:
    """Return a function that reads a value as `read` does, and refuses one that does not fit."""
    return lambda text: require(text, fits(value := read(text)), cure) or value  # no error: None


path = checked(str, lambda text: bool(text.strip()) and '\0' not in text, 'give the path of a file')
layers = checked(count, lambda n: n <= _MOST_LAYERS, f'give at most {_MOST_LAYERS} layers')
ranks = checked(count, lambda n: n <= MOST_RANKS, f'give at most {MOST_RANKS} ranks')
positive = checked(amount, lambda value: value > 0, 'give a number above 0')
seconds = checked(positive, lambda s: s <= _WEEK, f'give at most {_WEEK} seconds, a week')
_ratio = checked(
    amount, lambda ratio: 0 < ratio <= 2, 'give a share above 0, up to 2; 1 hides nothing'
)
names = checked(  # several words
    lambda text: text.split(','),
    lambda found: all(map(str.strip, found)),
    'give names, divided by commas',
)


def shares(text: str) -> cost_sources.Overlap:
    """Return the share of all pairs, or that of some kinds: FB=0.9,FF=0.8,FW=0.95."""
    parts = (part.partition('=') for part in text.split(',') if '=' in text)
    given = {name: share for name, _, share in parts}
    known = given.keys() <= {'FB', 'FF', 'FW'}
    require(text, known, 'give one share, or those of kinds of pairs: FB=0.9,FF=0.8,FW=0.95')
    if not given:
        return cost_sources.Overlap(_ratio(text), {})
    return cost_sources.Overlap.of({name: _ratio(share) for name, share in given.items()})


def family(text: str) -> str:
    """Return the name of a family of schedules."""
    try:
        return find(text).name
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def share(text: str) -> float:
    """Return a number from 0 to 1."""
    value = _float(text)
    require(text, 0 <= value <= 1, 'give a number from 0 to 1')
    return value


def _float(text: str) -> float:
    try:
        return float(text) if text.isascii() else nan
    except ValueError:
        return nan


def memory(text: str) -> float:
    """Return a number from 0 up, or so many `Bytes`: 60GiB, 80GB."""
    told = _BYTES.fullmatch(text)
    if told is not None:
        base = 1024 if 'i' in told[2] else 1000
        return Bytes(amount(told[1]) * base ** 'BKMGT'.index(told[2][0].upper()))
    try:
        return amount(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f'{error}, or bytes such as 60GiB') from error


def several(read: Callable[[str], _T]) -> Callable[[str], list[_T]]:
    """Return a function that reads several values, divided by commas."""
    return lambda text: [read(part) for part in text.split(',')]


counts, amounts, memories = several(count), several(amount), several(memory)

_FLAGS = {'num_ranks': '--pp', 'num_microbatches': '--microbatches', 'num_chunks': '--vpp'}
_FLAGS['costs'] = '--times'

AGAINST = f"""
    --against NAME  family = {RIVAL}  the schedule that a gain is measured against, such as the one
        that you run: interleaved is that of several chunks in Megatron; default 1f1b
"""
COPY_RATIO = """
    --copy-ratio K  amount  time of a copy out and back, over that of F, B and W of what is copied;
        default 1
"""
TITLE = '--title TEXT  text  of the picture'


def flag(name: str) -> str:
    """Return the option for an argument of `megatron_zbpp.plan` and its like."""
    return _FLAGS.get(name) or '--' + name.replace('_', '-')


def case_request(options: Mapping[str, Any], **others: Any) -> CaseRequest:
    """Return the schedule that a command's options ask for; `others` come first."""
    return CaseRequest.of({**options, **others}, flag)


def add_case(parser: ArgumentParser) -> None:
    """Add the schedule, by its name and shape or from a file, and its costs."""
    source = parser.add_mutually_exclusive_group(required=True)
    add_options(
        source,
        """
        --schedule NAME  text  see zbpp list
        --file FILE  path  our JSON, a plan, or the CSV of torch
        """,
    )
    add_shape(parser)
    add_costs(parser)


def add_shape(parser: ArgumentParser) -> None:
    """Add p, m, n and v of one schedule."""
    add_options(
        parser,
        """
        --pp P  ranks as num_ranks  ranks
        --microbatches M  count as num_microbatches  microbatches
        """,
    )
    add_slices(parser)
    add_options(parser, f'--vpp V  count as num_chunks  {meaning("num_chunks")}')


def add_slices(parser: ArgumentParser, auto: bool = False) -> None:
    """Add number and sizes of slices, and the times of attention."""
    proposed = f', or {AUTO}: as many balanced ones as pay' if auto else ''
    add_options(
        parser,
        f"""
        --slices N|SIZE,...|balanced:N{'|auto' * auto}  slices  parts of each sequence: how many
            equal ones, tokens of each, or how many that take equal times{proposed}; default 1, of
            seq1f1b and its kin 4
        --seq-length TOKENS  count  of a sequence, for slices whose sizes are to be found
        --attention SHARE|TOKENS=F,...  attention  share of attention in F of a whole sequence, or F
            as measured at two lengths or more: the later slices take longer; default 0
        """,
        slices=lambda text: _slices(text, auto),
        attention=_attention,
    )
    if not auto:
        add_options(
            parser,
            """
            --context-exchange TIME  amount  ranks even out the attention of equal slices
                (SlimPipe): time that a pass waits for each block of a slice by a slice that moves;
                simulated, does not train
            """,
        )


def _slices(text: str, auto: bool) -> Slices:
    require(text, text.isascii(), 'give a number such as 4')
    try:
        found = slices_of(text)
    except ValueError as error:
        raise ArgumentTypeError(f'{text!r} is not possible: {error}') from error
    if not number_of(found):
        cure = 'give auto, and --least-slice TOKENS' if auto else 'give how many, or balanced:N'
        require(text, auto and found == ToFind(), cure)
    return found


def _attention(text: str) -> float | dict[int, float]:
    if '=' not in text:
        return share(text)
    pairs = [part.partition('=') for part in text.split(',')]
    return {count(tokens): amount(time) for tokens, _, time in pairs}


def add_vocabulary(parser: ArgumentParser, share: Callable[[str], object] | None = None) -> None:
    """Add the output layer on all ranks."""
    where = f'; auto: where it pays, with {USUAL_SHARE} or times of FILE for no SHARE'
    choice = f'|auto|auto:SHARE|auto:{IN_FILE}' if share else ''
    add_options(
        parser,
        f"""
        --vocab-parallel SHARE|{IN_FILE}{choice}  share  the output layer on all ranks, as passes S
            and T: forward of a shard over that of a full rank, or {IN_FILE} if that of --times has
            times of S and T{where if share else ''}; default: it is part of the last stage
        --vocab-layers  layers = {OUTPUT}  layers on all ranks with --vocab-parallel; input: the
            word embedding, as passes D, I and J; default output
        """,
        share=share or shard,
        layers=SHARED_LAYERS,
    )


def shard(text: str) -> float | str:
    """Return the share of a shard, or where its times are."""
    try:
        return text if text == IN_FILE else amount(text)
    except ArgumentTypeError as error:
        raise ArgumentTypeError(f'{error}, or {IN_FILE}') from error


def add_costs(parser: ArgumentParser, layers: bool = True) -> None:
    """Add times, also by a file of `layers`, and further costs of a schedule."""
    parser.set_defaults(costs=cost_sources.NO_TIMES)
    source = parser.add_mutually_exclusive_group()
    if layers:
        add_options(
            source,
            """
            --layers-file FILE  layers as costs  of a model, as for zbpp partition, in place of
                --times: each placement gets its even split
            """,
            layers=lambda text: LayerCosts(
                _read(text, load_layers, 'a file of layers, as zbpp profile -o writes'), text
            ),
        )
    add_options(
        source,
        """
        --times F,B,W|FILE  times as costs  times of a full rank, or a JSON file of costs: F, B and
            W by stage, and at will activation, retained, parameters, comm, message, edges, hops,
            speeds, together, pairs, times, amounts, parts, collectives; default 1,1,1
        """,
        times=_times,
    )
    add_options(
        parser,
        f"""
        --comm C  amount  time of a message; default 0, or as in FILE
        --together SHARE  shares  time of a forward and a backward that run as one (dualpipe-v has
            such pairs), over that of both; or of each kind of pair, which stp has:
            FB=0.9,FF=0.8,FW=0.95; default: they run apart, or as in FILE
        --memory-limit A  memory  {meaning('memory_limit')}, or in units of FILE, whose parameters
            count; or in bytes, such as 60GiB, where FILE has activation and parameters in bytes
        """,
    )


def add_search(
    command: ArgumentParser, objectives: Sequence[str], seconds: float, more: str = ''
) -> None:
    """Add objective, time limit and output file of a search."""
    asynchronous = ', period for asynchronous training' if 'period' in objectives else ''
    add_options(
        command,
        f"""
        --objective  objectives = makespan  window where ranks do not wait for each other between
            iterations{asynchronous}; default makespan
        --seconds N  seconds = {seconds}  at most; default {seconds:g}
        --seed N  whole = 0  another one searches elsewhere; default 0
        -o --output FILE  path  the plan (.json, for --pipeline-schedule-file) or its picture
            (.html, .svg, .png, .pdf){more}
        {TITLE}
        """,
        objectives=objectives,
    )


def _times(text: str) -> cost_sources.CostSource:
    if ',' in text:
        parts = [amount(part) for part in text.split(',')]
        require(text, len(parts) == 3, 'give three times, F,B,W')
        require(text, any(parts), 'give a time above 0')
        return cost_sources.Times(*parts)
    return _read(text, cost_sources.StageCosts.read, cost_sources.TIMES_FILE)


def _read(text: str, read: Callable[[str], _T], wanted: str) -> _T:
    try:
        return read(path(text))
    except OSError as error:
        raise ArgumentTypeError(f'{text!r}: {error.strerror}') from error
    except ValueError as error:
        raise ArgumentTypeError(f'{error}: give {wanted}') from error


def load_layers(path: str) -> Layers:
    """Return the layers in a file."""
    return _read_part(path, Layers.from_json, 'layers')


def load_devices(path: str | None, ranks: int | None) -> Devices:
    """Return the devices in a file, or so many equal ones."""
    if path is None:
        if ranks is None:
            raise ValueError('--pp or --devices: say how many ranks there are')
        return Devices.alike(ranks)
    devices = _read_part(path, Devices.from_json, 'devices')
    if ranks not in (None, len(devices)):
        raise ValueError(f'--pp {ranks}, but {path} has {len(devices)} devices: leave --pp out')
    return devices


def _read_part(path: str, reader: Callable[[str], _T], name: str) -> _T:
    def parse(text: str) -> _T:
        data = strict_json.loads(text)
        fields = data if strict_json.is_object(data) else {}
        kept = fields.get(name) if 'schedule' in fields else None
        try:
            return reader(text if kept is None else json.dumps(kept))
        except ValueError as error:
            other = '' if name in fields else strict_json.other_kind(data, '', ': ')
            raise ValueError(f'{error}{other}') from error

    return files.read(path, parse, f'a file of {name}, as JSON or YAML')
