"""Subcommands of `zbpp`: from parsed arguments to what is printed or written."""

from __future__ import annotations

import json
import shutil
import sys
from argparse import Namespace
from pathlib import Path

from megatron_zbpp.analysis.checker import ScheduleError, check
from megatron_zbpp.analysis.memory import live, peak
from megatron_zbpp.analysis.waits import critical_path
from megatron_zbpp.cli import inputs
from megatron_zbpp.cli.advising import rates_of
from megatron_zbpp.cli.comparing import compare_partitions
from megatron_zbpp.cli.printing import (
    PICTURES,
    draw,
    facts,
    gained,
    headline,
    idle_text,
    legend,
    peak_head,
    peak_text,
    picture_format,
    print_asynchronous,
    print_headline,
    print_json,
    print_reversed,
    print_summary,
    print_wrapped,
    rows,
    shape,
    takes_colours,
    with_layers,
    write,
)
from megatron_zbpp.cli.progress import now
from megatron_zbpp.cli.tables import print_table
from megatron_zbpp.ir import formats
from megatron_zbpp.ir.graph import HOST
from megatron_zbpp.ir.grid import grid
from megatron_zbpp.ir.timeline import MEANING
from megatron_zbpp.render.scene import number
from megatron_zbpp.render.text import time_shown, timeline_text
from megatron_zbpp.schedules import own_families
from megatron_zbpp.schedules.registry import RECOMMENDED
from megatron_zbpp.techniques.vocabulary.place import WHOLE, has_shards


def list_families(args: Namespace) -> None:
    """Print families, with their gains at the sizes of `args`: for people, the recommended ones."""
    keys = ('name', 'aliases', 'summary', 'bubble', 'memory', 'source', 'when', 'tier')
    every = own_families(every=True)
    few = not (args.all or args.json or args.table)
    listed = [family for family in every if not few or family.tier == RECOMMENDED]
    args.schedules = [family.name for family in listed]
    found, skipped = inputs.load_cases(args)
    known = {name: facts(each, each.timeline, args.against) for name, each in found.items()}
    gains = {name: each['gain'] for name, each in known.items()}
    # of an asynchronous schedule, they depend on its sizes
    copies = {f.name: None if f.asynchronous else f.num_routes for f in listed}
    copies |= {name: each['copies'] for name, each in known.items()}
    if args.json:
        entries = [{key: getattr(family, key) for key in keys} for family in listed]
        for entry, family in zip(entries, listed, strict=True):
            entry |= {key: str(entry[key]) for key in ('bubble', 'memory')}
            entry |= {'copies': copies[family.name], 'asynchronous': family.asynchronous}
            entry |= {'gain': gains.get(family.name), 'without': skipped.get(family.name)}
        sizes = {'ranks': args.pp, 'microbatches': args.microbatches, 'against': args.against}
        return print_json({'schedules': entries, **sizes})
    shown = {name: '-' if gain is None else f'{gain:.1%}' for name, gain in gains.items()}
    sizes = f'p = {args.pp}, m = {args.microbatches}'
    if args.table:
        heads = ('schedule', 'bubble', 'peak memory', f'gain, {sizes}')
        trains = {False: 'the same', True: 'another model'}
        return print_table(
            (*heads, 'copies of the weights', 'trains', 'source'),
            [
                (
                    *(f.name, f.bubble, f.memory, shown.get(f.name, '-')),
                    *(copies[f.name] or '-', trains[f.asynchronous], f.source),
                )
                for f in listed
            ],
        )
    for family in listed:
        aliases = f'  (also {", ".join(family.aliases)})' if family.aliases else ''
        print_wrapped(f'{family.name}{aliases}')
        print_wrapped(f'    {family.summary}')
        held = copies[family.name] or 1
        held = f'; {held} copies of the weights' if held > 1 else ''
        late = '; asynchronous: trains another model' if family.asynchronous else ''
        name = family.name
        gain = f'gain {shown[name]}' if name in shown else f'no gain: {skipped[name]}'
        print_wrapped(f'    bubble {family.bubble}; peak memory {family.memory}{held}{late}')
        print_wrapped(f'    {gain}; {family.source}')
    if few:
        print_wrapped(f'and {len(every) - len(listed)} more: zbpp list --all')
    print_wrapped(f'gain: time saved against {args.against}; {inputs.heading(args)}')


# Formats that `convert` writes, and how names of their files end; of one end the first is meant.
FORMATS = {
    'json': '.json',
    'torch-csv': '.csv',
    'html': '.html',
    'svg': '.svg',
    'png': '.png',
    'pdf': '.pdf',
    'perfetto': '.json',
}


def show(args: Namespace) -> None:
    """Print a schedule: to scale, or with `--order` its orders as they stand, unchecked."""
    width = shutil.get_terminal_size((120, 24)).columns if args.width is None else args.width
    if args.order:
        schedule = formats.load(args.file) if args.file else inputs.load_case(args).schedule
        drawing = grid(schedule, width=width or sys.maxsize, height=sys.maxsize)
        return print_json({'order': drawing.splitlines()}) if args.json else print(drawing)
    case = inputs.load_case(args)
    timeline = case.timeline
    if args.json:
        spans = [
            [[str(p), *span] for p, span in zip(*rank, strict=True)]
            for rank in zip(case.schedule.passes, timeline.spans, strict=True)
        ]
        return print_json({'schedule': json.loads(case.schedule.to_json()), 'timeline': spans})
    print_headline(case.schedule)
    print(timeline_text(timeline, width, colours=takes_colours(sys.stdout)))
    shown = time_shown(timeline, width)
    if shown < timeline.makespan:
        units = f'{number(shown, 3)} of {number(timeline.makespan)}'
        print(f'… {units} time units shown: --width 0 shows all')
    print_wrapped(legend(timeline, width))
    print_reversed(case.schedule.placement)
    found = facts(case, timeline, args.against)
    print(
        f'makespan {number(timeline.makespan)}{"" if "period" in found else gained(found)}, '
        f'{peak_text(found, case.units)}'
    )
    print(idle_text(found['idle_all_ranks'], found['idle_parts']))
    if 'period' in found:
        print_asynchronous(found)


def simulate_case(args: Namespace) -> None:
    """Print makespan, window, bubbles, peak memory and critical path of one schedule."""
    case = inputs.load_case(args)
    timeline = case.timeline
    path = critical_path(timeline, case.costs)
    found = facts(case, timeline, args.against)
    if args.json:
        steps = [
            {**step._asdict(), 'ran': str(step.ran), 'on': step.on and str(step.on)}
            for step in path
        ]
        return print_json({**found, 'critical_path': steps})
    peaks = peak(case.schedule, case.costs)
    busy = [timeline.busy(rank) for rank in range(case.schedule.num_ranks)]
    idle = [window - own for window, own in zip(timeline.windows, busy, strict=True)]
    print_headline(case.schedule)
    print_summary(found, case.units)
    waits = [step for step in path if step.waited == 'communication']
    print(f'critical path: {len(path)} passes, {len(waits)} messages, from {path[0].ran}', end=' ')
    print(f'to {path[-1].ran}\n')
    heads = ['rank', 'window', 'busy', 'idle in it', peak_head(case.units)]
    columns = [timeline.windows, busy, idle, [case.units.scaled(most) for most in peaks]]
    host = [max(held, default=0.0) for held in live(case.schedule, case.costs, HOST)]
    if any(host):
        heads.append('on the host')
        columns.append([case.units.scaled(most) for most in host])
    rows = [(rank, *map(number, cells)) for rank, cells in enumerate(zip(*columns, strict=True))]
    print_table(*with_layers(args.file, case.schedule, heads, rows))
    print_reversed(case.schedule.placement)


def check_file(args: Namespace) -> None:
    """Prove that a file's schedule can run, or raises ScheduleError."""
    plan = formats.load_plan(args.file)
    schedule = plan.schedule
    if args.slices not in (None, schedule.graph.num_slices):
        raise ValueError(
            f'--slices {args.slices}, but {args.file} has {schedule.graph.num_slices}: leave '
            '--slices out'
        )
    check(schedule, memory_limit=args.memory_limit, costs=schedule.costs)
    if args.json:
        return print_json({'valid': True, **shape(schedule)})
    print(f'valid: {headline(schedule)}')


def compare(args: Namespace) -> None:
    """Print a table, and draw a picture, of the named schedules or of all that can be built."""
    if args.layers:
        return compare_partitions(args)
    for flag, value in (
        ('devices', args.devices),
        ('latencies', args.latencies),
        ('csv', args.csv),
    ):
        if value is not None:
            raise ValueError(f"--{flag} goes with --layers-file: name the file of a model's layers")
    for flag, size in (('pp', args.pp), ('microbatches', args.microbatches)):
        if size is None and args.file is None:
            raise ValueError(f'--{flag} is missing: give a number from 1 up, or --file of a plan')
    picture = picture_format(args.output, args.title)
    found, skipped = inputs.load_cases(args)
    timelines = {name: case.timeline for name, case in found.items()}
    known = {
        name: facts(found[name], timeline, args.against) for name, timeline in timelines.items()
    }
    names = sorted(known, key=lambda name: known[name].get('period', known[name]['makespan']))
    if picture:
        shown = {name: timelines[name] for name in names}
        draw(args, picture, found, shown, inputs.heading(args))
    schedules = [known[name] for name in names]
    if args.json:
        left_out = [{'name': name, 'reason': reason} for name, reason in skipped.items()]
        return print_json({'schedules': schedules, 'skipped': left_out, 'picture': args.output})
    print_table(*rows(schedules, inputs.units_of(args)))
    if isinstance(args.times, inputs.PlanCosts):
        print_wrapped('other schedules: stages of the plan joined, or cut into equal parts')
    against = args.against + WHOLE * any(has_shards(case.schedule) for case in found.values())
    print_wrapped(f'gain: time saved against {against}; {MEANING}')
    if more := [f'{each["name"]} {each["copies"]}' for each in schedules if each['copies'] > 1]:
        print_wrapped(f'copies of the weights, of a stage at most: {", ".join(more)}')
    if late := [found['name'] for found in schedules if 'period' in found]:
        print_wrapped(
            f'asynchronous, train another model: {", ".join(late)}; period: time of a call of '
            f'{args.microbatches} microbatches once the pipeline is full, and bubble that of it'
        )
    for name, reason in skipped.items():
        print(f'without {name}: {reason}')
    if args.output:
        print(f'wrote {args.output}')


def convert(args: Namespace) -> None:
    """Write a schedule in another format."""
    to = _format(args.output, args.to)
    if args.title is not None and to not in PICTURES:
        raise ValueError(f'--title {args.title!r} heads a picture, which {to} is not: leave it out')
    case = inputs.load_case(args)
    if to == 'json':
        write(args.output, _kept(args, case))
    elif to == 'torch-csv':
        write(args.output, formats.to_torch_csv(case.schedule, args.dialect))
    else:
        name = case.schedule.name
        draw(args, to, {name: case}, {name: case.timeline}, inputs.heading(args, case))
    if args.json:
        return print_json({'written': args.output, 'to': to, **shape(case.schedule)})
    print(f'wrote {args.output}')


def _kept(args: Namespace, case: inputs.Case) -> str:
    """Return the schedule as JSON; of a plan with all that its file has."""
    fields = formats.load_plan(args.file).fields if args.file else {}
    if 'costs' not in fields:
        return case.schedule.to_json()
    now = formats.memory_of_plan(case.costs, case.units)
    return json.dumps({**fields, 'schedule': json.loads(case.schedule.to_json()), **now}, indent=1)


def _format(file: str, asked: str | None) -> str:
    suffix = Path(file).suffix.lower()
    said = next((name for name, ends in FORMATS.items() if ends == suffix), None)
    to = asked or said
    if to is None:
        known = ', '.join(dict.fromkeys(FORMATS.values()))
        raise ValueError(f'{file} does not say its format: end it in {known}, or give --to')
    if said is not None and FORMATS[to] != suffix:
        raise ValueError(f'{file} is no name for --to {to}: end it in {FORMATS[to]}, or drop --to')
    return to


def doctor(args: Namespace) -> int:
    """Return what is installed, whether our patches fit it, and what a launch line would run."""
    now('importing torch ...')
    from megatron_zbpp.mcore.command_line.doctor import examine, text_of

    try:
        report = examine(args.line, args.gpus, now, rates_of(args))
    finally:
        now('')
    print_json(report.to_dict()) if args.json else print(text_of(report, args.verbose))
    return 0 if report.fine else 1


def refuse(error: ScheduleError, as_json: bool) -> int:
    """Print one line on stderr; the drawing, which takes several, on stdout."""
    what, _, drawing = str(error).partition('\n')
    if as_json:
        print_json({'valid': False, 'error': what, 'grid': drawing.splitlines()})
    else:
        print(drawing)
    print(f'zbpp: {what}', file=sys.stderr)
    return 2
