"""What each subcommand of `zbpp` does: from parsed arguments to what it prints or writes."""

from __future__ import annotations

import json
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

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

_MOST_PASSES = 10_000_000


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


def list_families(args: Namespace) -> None:
    """Every family that the registry knows."""
    keys = ('name', 'aliases', 'summary', 'bubble', 'memory', 'source')
    if args.json:
        entries = [{key: getattr(family, key) for key in keys} for family in FAMILIES]
        return _print_json({'schedules': entries})
    for family in FAMILIES:
        aliases = f'  (also {", ".join(family.aliases)})' if family.aliases else ''
        print(f'{family.name}{aliases}\n    {family.summary}')
        print(f'    bubble {family.bubble}; peak memory {family.memory}\n    {family.source}')


def show(args: Namespace) -> None:
    """A schedule as text: to scale, or with `--order` its orders as they stand, unchecked."""
    width = shutil.get_terminal_size((120, 24)).columns if args.width is None else args.width
    if args.order:
        schedule = exchange.load(args.file) if args.file else _case(args).schedule
        drawing = grid(schedule, width=width or sys.maxsize, height=sys.maxsize)
        return _print_json({'order': drawing.splitlines()}) if args.json else print(drawing)
    case = _case(args)
    timeline = case.timeline
    if args.json:
        spans = [
            [[str(p), *span] for p, span in zip(*rank, strict=True)]
            for rank in zip(case.schedule.passes, timeline.spans, strict=True)
        ]
        return _print_json({'schedule': json.loads(case.schedule.to_json()), 'timeline': spans})
    print(_headline(case.schedule))
    print(timeline_text(timeline, width, colours=sys.stdout.isatty()))


def simulate_case(args: Namespace) -> None:
    """Makespan, window, bubbles, peak memory, critical path of one schedule."""
    case = _case(args)
    timeline = case.timeline
    path = critical_path(timeline, case.costs)
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


def check_file(args: Namespace) -> None:
    """Proves that a file's schedule can run, or raises ScheduleError."""
    schedule = exchange.load(args.file)
    check(schedule, memory_limit=args.memory_limit)
    if args.json:
        return _print_json({'valid': True, **_shape(schedule)})
    print(f'valid: {_headline(schedule)}')


def compare(args: Namespace) -> None:
    """A table, and a picture, of the named schedules or of all that can be built."""
    picture = _suffix(args.output) if args.output else None
    cases, skipped = _cases(args)
    ran = ((name, case.timeline) for name, case in cases.items())
    timelines = dict(sorted(ran, key=lambda item: item[1].makespan))
    if picture:
        _draw(args.output, picture, cases, timelines)
    facts = [_facts(cases[name], timeline) for name, timeline in timelines.items()]
    if args.json:
        left_out = [{'name': name, 'reason': reason} for name, reason in skipped.items()]
        return _print_json({'schedules': facts, 'skipped': left_out, 'picture': args.output})
    heads = ('schedule', 'makespan', 'its bubble', 'window', 'its bubble', 'peak activations')
    _print_table(heads, map(_row, facts))
    for name, reason in skipped.items():
        print(f'without {name}: {reason}')
    if args.output:
        print(f'wrote {args.output}')


def convert(args: Namespace) -> None:
    """Writes a schedule in another format."""
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


def refuse(error: ScheduleError, as_json: bool) -> int:
    """One line on stderr; the drawing, which takes several, on stdout."""
    what, _, drawing = str(error).partition('\n')
    if as_json:
        _print_json({'valid': False, 'error': what, 'grid': drawing.splitlines()})
    else:
        print(drawing)
    print(f'zbpp: {what}', file=sys.stderr)
    return 2


# From arguments to values


def _case(args: Namespace, name: str | None = None) -> Case:
    """The schedule that the arguments ask for (or that of family `name`), checked, with costs."""
    name = name or args.schedule
    case = _generated(args, name) if name else _from_file(args)
    check(case.schedule, memory_limit=args.memory_limit, costs=case.costs)
    return case


def _cases(args: Namespace) -> tuple[dict[str, Case], dict[str, str]]:
    """The cases to compare, and for each family that has none the reason why.

    Raises:
        ValueError: nothing is left to compare, or a schedule asked for by name cannot be had.
    """
    cases, skipped = {}, {}
    for name in tqdm(args.schedules or names(), desc='schedules', leave=False, disable=None):
        try:
            cases[name] = _case(args, name)
        except ValueError as error:
            if args.schedules:
                raise
            skipped[name] = str(error).partition('\n')[0]
    if not cases:
        raise ValueError(f'no schedule fits: {next(iter(skipped.values()))}')
    return cases, skipped


def _generated(args: Namespace, name: str) -> Case:
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


def _from_file(args: Namespace) -> Case:
    schedule = exchange.load(args.file)
    held = {
        '--pp': (args.pp, schedule.num_ranks),
        '--microbatches': (args.microbatches, schedule.num_microbatches),
        '--vpp': (args.vpp, schedule.placement.num_chunks),
    }
    for flag, (asked, found) in held.items():
        if asked not in (None, found):
            raise ValueError(f'{flag} {asked}, but {args.file} has {found}: leave {flag} out')
    return Case(schedule, _costs(args, schedule.placement))


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


def _costs(args: Namespace, placement: Placement) -> Costs:
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
