"""The `zbpp` command: parses, calls, prints. Everything it knows lives below it.

Bad input ends with one line on stderr and exit code 2; a schedule that is refused is also drawn on
stdout, with the offending cell marked.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import NamedTuple, NoReturn

from megatron_zbpp import exchange
from megatron_zbpp.grid import grid
from megatron_zbpp.ir import Placement, Schedule
from megatron_zbpp.planning.check import ScheduleError, check
from megatron_zbpp.planning.costs import Costs
from megatron_zbpp.planning.critical import critical_path
from megatron_zbpp.planning.memory import peak
from megatron_zbpp.planning.simulate import simulate
from megatron_zbpp.planning.timeline import Timeline
from megatron_zbpp.render.html import html
from megatron_zbpp.render.perfetto import perfetto
from megatron_zbpp.render.png import timeline_png
from megatron_zbpp.render.scene import number
from megatron_zbpp.render.svg import svg
from megatron_zbpp.render.text import timeline_text
from megatron_zbpp.schedules import FAMILIES, build, find, names

_FORMATS = ('json', 'torch-csv', 'html', 'svg', 'png', 'perfetto')
_MOST_PASSES = 10_000_000

_EXAMPLES = """examples:
  zbpp list                                              every schedule, its bubble and memory
  zbpp show --schedule zb-v --pp 4 --microbatches 8      draw it here
  zbpp simulate --schedule zb-1p --pp 8 --microbatches 24 --times 18.5,18.1,9.3 --comm 0.6
  zbpp compare --pp 8 --microbatches 24 --times 1,1.2,0.8 -o compare.html
  zbpp plan --pp 8 --microbatches 24 --times 1,1.2,0.8 --memory-limit 8 --json > plan.json
  zbpp check plan.json                                   ours, a plan's or torch's CSV
  zbpp convert --file plan.json --to torch-csv -o plan.csv

Times are of one full rank, in any unit: a chunk of v takes a v-th of each. Stages that differ go
into a file {"F": [...], "B": [...], "W": [...]}, one entry per stage in model order. Memory is in
activations of one microbatch on a full rank.
"""


class Times(NamedTuple):
    """`--times`: of one full rank, or of each stage in model order."""

    forward: float | tuple[float, ...]
    backward: float | tuple[float, ...]
    weight: float | tuple[float, ...]

    @property
    def num_stages(self) -> int | None:
        """Of how many stages; None if of one full rank."""
        return len(self.forward) if isinstance(self.forward, tuple) else None


class Case(NamedTuple):
    """A checked schedule, and what its passes cost."""

    schedule: Schedule
    costs: Costs

    @property
    def timeline(self) -> Timeline:
        return simulate(self.schedule, self.costs)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv`; returns its exit code."""
    warnings.showwarning = _note
    args = _parser().parse_args(argv)
    try:
        args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except ScheduleError as error:
        return _refuse(error, args.json)
    except OSError as error:
        print(f'zbpp: {error.filename}: {error.strerror}: give another path', file=sys.stderr)
        return 2
    except (ValueError, ImportError) as error:
        print(f'zbpp: {" ".join(str(error).split())}', file=sys.stderr)
        return 2
    return 0


def _refuse(error: ScheduleError, as_json: bool) -> int:
    """One line on stderr; the drawing, which takes several, on stdout."""
    what, _, drawing = str(error).partition('\n')
    if as_json:
        _print_json({'valid': False, 'error': what, 'grid': drawing.splitlines()})
    else:
        print(drawing)
    print(f'zbpp: {what}', file=sys.stderr)
    return 2


def _note(message: Warning | str, *_: object) -> None:
    print(f'zbpp: note: {message}', file=sys.stderr)


# Commands


def _list(args: argparse.Namespace) -> None:
    keys = ('name', 'aliases', 'summary', 'bubble', 'memory', 'source')
    if args.json:
        entries = [{key: getattr(family, key) for key in keys} for family in FAMILIES]
        return _print_json({'schedules': entries})
    for family in FAMILIES:
        aliases = f'  (also {", ".join(family.aliases)})' if family.aliases else ''
        print(f'{family.name}{aliases}\n    {family.summary}')
        print(f'    bubble {family.bubble}; peak memory {family.memory}\n    {family.source}')


def _show(args: argparse.Namespace) -> None:
    width = shutil.get_terminal_size((120, 24)).columns if args.width is None else args.width
    if args.order:
        schedule = _read(args) if args.file else _case(args).schedule
        drawing = grid(schedule, width=width or sys.maxsize, height=sys.maxsize)
        return _print_json({'order': drawing.splitlines()}) if args.json else print(drawing)
    schedule, timeline = (case := _case(args)).schedule, case.timeline
    if args.json:
        spans = [
            [[str(p), *span] for p, span in zip(*rank, strict=True)]
            for rank in zip(schedule.passes, timeline.spans, strict=True)
        ]
        return _print_json({'schedule': json.loads(schedule.to_json()), 'timeline': spans})
    print(_headline(schedule))
    print(timeline_text(timeline, width, colours=sys.stdout.isatty()))


def _simulate(args: argparse.Namespace) -> None:
    case = _case(args)
    timeline, path = case.timeline, critical_path(case.timeline, case.costs)
    if args.json:
        steps = [
            {**step._asdict(), 'ran': str(step.ran), 'on': step.on and str(step.on)}
            for step in path
        ]
        return _print_json({**_facts(case, timeline), 'critical_path': steps})
    peaks = peak(case.schedule, case.costs)
    print(_headline(case.schedule))
    print(f'makespan {number(timeline.makespan)}, bubble {timeline.bubble_makespan:.2%}')
    print(f'window   {number(max(timeline.windows))}, bubble {timeline.bubble_window:.2%}')
    waits = [step for step in path if step.waited == 'communication']
    print(f'critical path: {len(path)} passes, {len(waits)} messages, from {path[0].ran}', end=' ')
    print(f'to {path[-1].ran}\n')
    rows = [
        (rank, *map(number, (window, timeline.busy(rank), window - timeline.busy(rank), most)))
        for rank, (window, most) in enumerate(zip(timeline.windows, peaks, strict=True))
    ]
    _print_table(('rank', 'window', 'busy', 'idle in it', 'peak activations'), rows)


def _check(args: argparse.Namespace) -> None:
    schedule = _read(args)
    check(schedule, memory_limit=args.memory_limit)
    if args.json:
        return _print_json({'valid': True, **_shape(schedule)})
    print(f'valid: {_headline(schedule)}')


def _compare(args: argparse.Namespace) -> None:
    cases, skipped = {}, {}
    for name in args.schedules or names():
        try:
            cases[name] = _case(args, name)
        except ValueError as error:
            skipped[name] = str(error).partition('\n')[0]
    if args.schedules and skipped:
        raise ValueError(next(iter(skipped.values())))
    if not cases:
        raise ValueError(f'no schedule fits: {next(iter(skipped.values()))}')
    timelines = {name: case.timeline for name, case in cases.items()}
    if args.output:
        _draw(args.output, _suffix(args.output), cases, timelines)
    facts = [_facts(case, timelines[name]) for name, case in cases.items()]
    facts.sort(key=lambda fact: fact['makespan'])
    if args.json:
        left_out = [{'name': name, 'reason': reason} for name, reason in skipped.items()]
        return _print_json({'schedules': facts, 'skipped': left_out, 'picture': args.output})
    heads = ('schedule', 'makespan', 'bubble', 'window', 'bubble', 'peak activations')
    _print_table(heads, map(_row, facts))
    for name, reason in skipped.items():
        print(f'without {name}: {reason}')
    if args.output:
        print(f'wrote {args.output}')


def _convert(args: argparse.Namespace) -> None:
    case = _case(args)
    if args.to == 'json':
        _write(args.output, case.schedule.to_json())
    elif args.to == 'torch-csv':
        _write(args.output, exchange.to_torch_csv(case.schedule, args.dialect))
    else:
        name = case.schedule.name
        _draw(args.output, args.to, {name: case}, {name: case.timeline})
    if args.json:
        return _print_json({'written': args.output, 'to': args.to, **_shape(case.schedule)})
    print(f'wrote {args.output}')


# From arguments to values


def _case(args: argparse.Namespace, name: str | None = None) -> Case:
    """The schedule that the arguments ask for (or that of family `name`), checked, with costs."""
    name = name or args.schedule
    case = _generated(args, name) if name else _from_file(args)
    check(case.schedule, memory_limit=args.memory_limit, costs=case.costs)
    return case


def _generated(args: argparse.Namespace, name: str) -> Case:
    family, p, m = find(name), args.pp, args.microbatches
    if p is None or m is None:
        missing = '--pp' if p is None else '--microbatches'
        raise ValueError(f'--schedule {name} needs {missing}: give a number from 1 up')
    chunks = _chunks(args.times, p, args.vpp, family.default_chunks)
    _require_size(p * m * chunks)
    costs = _costs(args, Placement.loop(p, chunks))  # a stage's share does not depend on its place
    limit = args.memory_limit if 'memory_limit' in family.options else None
    schedule = build(name, p, m, num_chunks=chunks, costs=costs, memory_limit=limit)
    return Case(schedule, costs)


def _from_file(args: argparse.Namespace) -> Case:
    schedule = _read(args)
    held = {
        '--pp': (args.pp, schedule.num_ranks),
        '--microbatches': (args.microbatches, schedule.num_microbatches),
        '--vpp': (args.vpp, schedule.placement.num_chunks),
    }
    for flag, (asked, found) in held.items():
        if asked not in (None, found):
            raise ValueError(f'{flag} {asked}, but {args.file} has {found}: leave {flag} out')
    return Case(schedule, _costs(args, schedule.placement))


def _read(args: argparse.Namespace) -> Schedule:
    return exchange.load(args.file)


def _chunks(times: Times, p: int, asked: int | None, default: int) -> int:
    """v: what is asked for, or follows from the times of all stages, or else the default."""
    stages = times.num_stages
    if stages is None:
        return asked or default
    if stages % p or asked not in (None, stages // p):
        wanted = f'{p} ranks' + (f' of {asked} chunks' if asked else '')
        raise ValueError(
            f'--times has {stages} stages, which do not make {wanted}: give pp * vpp entries each'
        )
    return stages // p


def _costs(args: argparse.Namespace, placement: Placement) -> Costs:
    stages = args.times.num_stages
    if stages is None:
        return Costs.uniform(placement, *args.times, comm=args.comm)
    if stages != placement.num_stages:
        raise ValueError(
            f'--times has {stages} stages and the schedule {placement.num_stages}: '
            'give one entry per stage, in model order'
        )
    forward, backward, weight = args.times
    shares = Costs.uniform(placement, comm=args.comm)
    return replace(shares, forward=forward, backward=backward, weight=weight)


def _require_size(chunk_microbatches: int) -> None:
    if 3 * chunk_microbatches > _MOST_PASSES:
        raise ValueError(
            f'--pp times --vpp times --microbatches is {chunk_microbatches}: give less than '
            f'{_MOST_PASSES // 3} in all'
        )


# Printing and writing


def _shape(schedule: Schedule) -> dict:
    placement = schedule.placement
    return {
        'name': schedule.name,
        'ranks': schedule.num_ranks,
        'stages': schedule.num_stages,
        'microbatches': schedule.num_microbatches,
        'placement': placement.name,
        'passes': sum(map(len, schedule.passes)),
    }


def _facts(case: Case, timeline: Timeline) -> dict:
    return {
        **_shape(case.schedule),
        'makespan': timeline.makespan,
        'window': max(timeline.windows),
        'bubble_rate_makespan': timeline.bubble_makespan,
        'bubble_rate_window': timeline.bubble_window,
        'peak_activations': peak(case.schedule, case.costs),
    }


def _row(facts: dict) -> tuple[str, ...]:
    return (
        facts['name'],
        number(facts['makespan']),
        f'{facts["bubble_rate_makespan"]:.2%}',
        number(facts['window']),
        f'{facts["bubble_rate_window"]:.2%}',
        number(max(facts['peak_activations'])),
    )


def _headline(schedule: Schedule) -> str:
    shape = _shape(schedule)
    return (
        f'{shape["name"]}: {shape["ranks"]} ranks, {shape["stages"]} stages '
        f'({shape["placement"]}), {shape["microbatches"]} microbatches, {shape["passes"]} passes'
    )


def _print_json(value: dict) -> None:
    print(json.dumps(value))


def _print_table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Columns as wide as they need be: the first to the left, numbers to the right."""
    lines = [tuple(map(str, line)) for line in (heads, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *others in lines:
        cells = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        print('  '.join([first.ljust(widths[0]), *cells]))


def _suffix(path: str) -> str:
    """The format that a picture's path asks for."""
    suffix = Path(path).suffix[1:].lower()
    if suffix not in ('html', 'svg', 'png'):
        raise ValueError(f'-o {path}: name a .html, .svg or .png file')
    return suffix


def _draw(path: str, to: str, cases: dict[str, Case], timelines: dict[str, Timeline]) -> None:
    """Writes the picture of `timelines` in format `to`."""
    if to == 'png':
        return timeline_png(timelines, path)
    draw: Callable[..., str] = {'html': html, 'svg': svg, 'perfetto': perfetto}[to]
    _write(path, draw(timelines, {name: case.costs for name, case in cases.items()}))


def _write(path: str, text: str) -> None:
    Path(path).write_text(text, encoding='utf-8')


# Parsing


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f'{self.prog}: {message} (see {self.prog} --help)\n')


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog='zbpp',
        description='Pipeline schedules: list, draw, simulate, check, compare, plan, convert.',
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar='COMMAND')

    def command(name: str, run: Callable, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=f'{text}.')
        added.set_defaults(run=run)
        added.add_argument('--json', action='store_true', help='print one JSON object')
        return added

    command('list', _list, 'name every schedule, with its bubble and peak memory')

    show = command('show', _show, 'draw a schedule as text, to scale')
    _add_source(show)
    _add_costs(show)
    show.add_argument('--order', action='store_true', help='orders only, also of an invalid file')
    show.add_argument('--width', type=int, help='columns; 0: all it takes. Default: the terminal')

    simulated = command('simulate', _simulate, 'makespan, window, bubbles, peak memory')
    _add_source(simulated)
    _add_costs(simulated)

    checked = command('check', _check, 'prove that a file holds a schedule that can run')
    checked.add_argument('file', metavar='FILE', help='our JSON, a plan, or the CSV of torch')
    _add_memory_limit(checked)

    compared = command('compare', _compare, 'a table, and a picture, of many schedules')
    compared.add_argument(
        '--schedules', type=_names, metavar='NAME,...', help='default: all that can be built'
    )
    _add_shape(compared, required=True)
    _add_costs(compared)
    compared.add_argument('-o', '--output', metavar='FILE', help='picture: .html, .svg or .png')

    converted = command('convert', _convert, 'write a schedule in another format')
    _add_source(converted)
    _add_costs(converted)
    converted.add_argument('--to', choices=_FORMATS, required=True, help='format to write')
    converted.add_argument('-o', '--output', metavar='FILE', required=True, help='where to')
    converted.add_argument(
        '--dialect',
        choices=exchange.DIALECTS,
        default='new',
        help='of torch-csv: new (since 2.6) has I and B where old has B and BW; default new',
    )
    return parser


def _add_source(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument('--schedule', metavar='NAME', help='see zbpp list')
    source.add_argument('--file', metavar='FILE', help='our JSON, a plan, or the CSV of torch')
    _add_shape(parser, required=False)


def _add_shape(parser: argparse.ArgumentParser, required: bool) -> None:
    parser.add_argument('--pp', type=_count, metavar='P', required=required, help='ranks')
    parser.add_argument(
        '--microbatches', type=_count, metavar='M', required=required, help='microbatches'
    )
    parser.add_argument('--vpp', type=_count, metavar='V', help='chunks per rank')


def _add_costs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--times',
        type=_times,
        default=Times(1.0, 1.0, 1.0),
        metavar='F,B,W|FILE',
        help='times of a full rank, or a JSON file with those of each stage; default 1,1,1',
    )
    parser.add_argument(
        '--comm', type=_amount, default=0.0, metavar='C', help='time of a message; default 0'
    )
    _add_memory_limit(parser)


def _add_memory_limit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--memory-limit',
        type=_amount,
        metavar='A',
        help='most activations of a microbatch on a full rank that a rank may hold',
    )


def _argument(text: str, ok: bool, cure: str) -> None:
    if not ok:
        raise argparse.ArgumentTypeError(f'{text!r} is not possible: {cure}')


def _count(text: str) -> int:
    _argument(text, text.isdecimal() and int(text) > 0, 'give a whole number from 1 up')
    return int(text)


def _amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float('nan')
    _argument(text, isfinite(value) and value >= 0, 'give a number from 0 up')
    return value


def _names(text: str) -> list[str]:
    return text.split(',')


def _times(text: str) -> Times:
    if ',' in text:
        parts = [_amount(part) for part in text.split(',')]
        _argument(text, len(parts) == 3, 'give three times, F,B,W')
        return Times(*parts)
    return _read_times(text)


def _read_times(path: str) -> Times:
    """The times of all stages in the file at `path`."""
    cure = 'give F,B,W or a file {"F": [...], "B": [...], "W": [...]}, one entry per stage'
    try:
        data = json.loads(Path(path).read_text(encoding='utf-8'))
        times = Times(*(tuple(map(float, data[kind])) for kind in 'FBW'))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise argparse.ArgumentTypeError(f'{path!r} has no times ({error!r}): {cure}') from error
    values = [value for part in times for value in part]
    same = len(set(map(len, times))) == 1 and bool(values)
    _argument(path, same and all(isfinite(v) and v >= 0 for v in values), cure)
    return times


if __name__ == '__main__':
    sys.exit(main())
