"""Commands about schedules as they are: list, show, simulate, check, convert, gaps and freezing."""

from __future__ import annotations

import json
import shutil
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from megatron_zbpp.analysis.checker import ScheduleError, check
from megatron_zbpp.analysis.critical import Gap, critical_path, gaps
from megatron_zbpp.analysis.memory import live, peak
from megatron_zbpp.cli import values
from megatron_zbpp.cli.advising import rates_of
from megatron_zbpp.cli.arguments import case_request
from megatron_zbpp.cli.printing import (
    PICTURES,
    draw,
    gained,
    headline,
    idle_text,
    legend,
    now,
    peak_head,
    peak_text,
    print_asynchronous,
    print_headline,
    print_json,
    print_reversed,
    print_summary,
    print_table,
    print_wrapped,
    progress,
    takes_colours,
    with_layers,
    write,
)
from megatron_zbpp.ir import Schedule, W, formats
from megatron_zbpp.ir.graph import HOST
from megatron_zbpp.ir.grid import grid
from megatron_zbpp.partitioning.freeze_plans import FREEZE_STEPS, UNIT, FreezePlan, Freezing, freeze
from megatron_zbpp.planner.cases import Case, CaseRequest
from megatron_zbpp.planner.figures import facts, shape
from megatron_zbpp.render.planner_page import Sizes, planner_page
from megatron_zbpp.render.scene import number
from megatron_zbpp.render.text import time_shown, timeline_text
from megatron_zbpp.schedules import own_families
from megatron_zbpp.schedules.registry import RECOMMENDED

_MOST_PAGE_RANKS = 64  # of a page: more are narrower than their labels


def list_families(args: Namespace) -> None:
    """Print families, with their gains at the sizes of `args`: for people, the recommended ones."""
    keys = ('name', 'aliases', 'summary', 'bubble', 'memory', 'source', 'when', 'tier')
    every = own_families(every=True)
    few = not (args.all or args.json or args.table)
    listed = [family for family in every if not few or family.tier == RECOMMENDED]
    asked = CaseRequest(num_ranks=args.pp, num_microbatches=args.microbatches)
    with progress('schedules', 'it', len(listed)) as done:
        _, found, skipped = asked.cases([family.name for family in listed], done)
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
    print_wrapped(f'gain: time saved against {args.against}; {asked.heading()}')


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
        schedule = formats.load(args.file) if args.file else case_request(args).case().schedule
        drawing = grid(schedule, width=width or sys.maxsize, height=sys.maxsize)
        return print_json({'order': drawing.splitlines()}) if args.json else print(drawing)
    case = case_request(args).case()
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
    case = case_request(args).case()
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


def convert(args: Namespace) -> None:
    """Write a schedule in another format."""
    to = _format(args.output, args.to)
    if args.title is not None and to not in PICTURES:
        raise ValueError(f'--title {args.title!r} heads a picture, which {to} is not: leave it out')
    asked = case_request(args)
    case = asked.case()
    if to == 'json':
        write(args.output, _kept(args.file, case))
    elif to == 'torch-csv':
        write(args.output, formats.to_torch_csv(case.schedule, args.dialect))
    else:
        name = case.schedule.name
        draw(args.output, to, args.title, {name: case}, asked.heading(case))
    if args.json:
        return print_json({'written': args.output, 'to': to, **shape(case.schedule)})
    print(f'wrote {args.output}')


def _kept(file: str | None, case: Case) -> str:
    """Return the schedule as JSON; of a plan with all that its file has."""
    fields = formats.load_plan(file).fields if file else {}
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
        report = examine(args.line, args.gpus, now, rates_of(vars(args)))
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


def add_bubbles(command: ArgumentParser) -> None:
    """Add what `zbpp bubbles` takes beside a schedule and costs."""
    command.add_argument(
        '--least', type=values.amount, default=0.0, metavar='T', help='only gaps longer than that'
    )


def add_freeze(command: ArgumentParser) -> None:
    """Add what `zbpp freeze` takes beside a schedule and costs."""
    command.add_argument(
        '--most',
        type=values.share,
        default=0.9,
        metavar='R',
        help="share of a stage's weight gradients that may be left out, 0 to 1; default 0.9",
    )
    command.add_argument(
        '--warm-up',
        type=values.count,
        default=UNIT,
        metavar='N',
        help='steps before monitoring: a run has none frozen; default 100',
    )
    command.add_argument(
        '--unit',
        type=values.count,
        default=UNIT,
        metavar='N',
        help='steps of monitoring, and half of those in which shares grow; default 100',
    )
    command.add_argument(
        '-o', '--output', type=values.path, metavar='FILE', help='the plan, for --pipeline-freeze'
    )


def bubbles(args: Namespace) -> None:
    """Print the gaps of each rank."""
    case = case_request(args).case()
    found = gaps(case.timeline, args.least)
    if args.json:
        return print_json({'gaps': [_fields(gap) for gap in found]})
    print(headline(case.schedule))
    rows = [
        (
            gap.rank,
            gap.where,
            number(gap.start),
            number(gap.length),
            gap.before or '-',
            gap.after or '-',
        )
        for gap in found
    ]
    print_table(('rank', 'where', 'start', 'length', 'after pass', 'before pass'), rows)
    print(f'{len(found)} gaps, {number(sum(gap.length for gap in found))} in all')


def _fields(gap: Gap) -> dict:
    named = {'before': gap.before and str(gap.before), 'after': gap.after and str(gap.after)}
    return {**gap._asdict(), **named, 'where': gap.where}


def freeze_schedule(args: Namespace) -> None:
    """Print how much of which weight gradients to leave out."""
    case = case_request(args).case()
    if args.output:
        _require_weight_passes(case.schedule)
    with progress('freezing', 'step', FREEZE_STEPS) as done:
        found = freeze(case.schedule, case.costs, args.most, done)
    stages = [found.stage(stage) for stage in range(case.schedule.num_stages)]
    if args.output:
        write(args.output, FreezePlan.of(case.schedule, found, args.warm_up, args.unit).to_json())
    if args.json:
        ratios = {str(p): ratio for p, ratio in found.ratios.items()}
        return print_json(
            {
                'makespan': found.makespan,
                'without_freezing': found.without,
                'mean': found.mean,
                'stages': stages,
                'ratios': ratios,
            }
        )
    print(headline(case.schedule))
    _print(found, stages)
    if args.output:
        print(f'wrote {args.output}')


def _require_weight_passes(schedule: Schedule) -> None:
    if not any(p.kind == W for order in schedule.passes for p in order):
        raise ValueError(
            f'{schedule.name} has no W passes, of which a training leaves gradients out: take a '
            'schedule that has, such as zb-h1, or leave -o out and read the estimate'
        )


def _print(found: Freezing, stages: list[float]) -> None:
    gain = 1 - found.makespan / found.without if found.without else 0.0
    print(
        f'makespan {number(found.makespan)}, without freezing {number(found.without)}: '
        f'{gain:.1%} less, for {found.mean:.1%} of all weight gradients'
    )
    print_table(('stage', 'left out'), [(at, f'{ratio:.1%}') for at, ratio in enumerate(stages)])
    print('a prediction; and another training, as it does not learn what is left out')


def add_page(parser: ArgumentParser) -> None:
    """Add the sizes of the page, and where to write it."""
    usual = Sizes()
    for name, field, metavar, read, text in (
        ('--pp', 'ranks', 'P,...', _ranks, 'ranks to choose from'),
        ('--microbatches', 'microbatches', 'M,...', values.counts, 'microbatches to choose from'),
        ('--vpp', 'chunks', 'V,...', values.counts, 'chunks per rank, where a schedule takes any'),
    ):
        default = getattr(usual, field)
        parser.add_argument(
            name,
            dest=field,
            type=read,
            default=default,
            metavar=metavar,
            help=f'{text}; default {",".join(map(str, default))}',
        )
    parser.add_argument(
        '-o',
        '--output',
        type=_page,
        required=True,
        metavar='FILE',
        help='where to write the page: .html',
    )


def write_page(args: Namespace) -> None:
    """Write the page, with the schedules of all sizes that are asked for."""
    sizes = Sizes(args.ranks, args.microbatches, args.chunks)
    if not Path(args.output).parent.is_dir():
        raise ValueError(f'{args.output} is in no folder that is there: give another path')
    with progress('orders', 'it', 100) as done:
        page = planner_page(sizes, done)
    write(args.output, page)
    size = len(page.encode())
    if args.json:
        return print_json({'written': args.output, 'bytes': size, **sizes._asdict()})
    print(f'wrote {args.output}, {size} bytes: open it in a browser')


def _ranks(text: str) -> list[int]:
    found = values.counts(text)
    values.require(text, max(found) <= _MOST_PAGE_RANKS, f'give at most {_MOST_PAGE_RANKS} ranks')
    return found


def _page(text: str) -> str:
    right = values.path(text).lower().endswith('.html')
    values.require(text, right, 'give the path of a page, which ends in .html')
    return text
