"""Commands that tell of schedules and jobs: list, simulate, check, bubbles, freeze and doctor."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from typing import Any

from megatron_zbpp.analysis.checker import ScheduleError, check
from megatron_zbpp.analysis.memory import live, peak
from megatron_zbpp.analysis.waits import Gap, critical_path, gaps
from megatron_zbpp.cli import arguments, values
from megatron_zbpp.cli.advising import add_rates, rates_of
from megatron_zbpp.cli.arguments import case_request
from megatron_zbpp.cli.printing import (
    headline,
    now,
    peak_head,
    print_headline,
    print_json,
    print_reversed,
    print_summary,
    print_table,
    print_wrapped,
    progress,
    with_layers,
    write,
)
from megatron_zbpp.ir import Schedule, W, formats
from megatron_zbpp.ir.graph import HOST
from megatron_zbpp.mcore.settings import meaning
from megatron_zbpp.partitioning.freeze_plans import FREEZE_STEPS, UNIT, FreezePlan, Freezing, freeze
from megatron_zbpp.planner.cases import CaseRequest
from megatron_zbpp.planner.figures import facts, shape
from megatron_zbpp.render.scene import number
from megatron_zbpp.schedules import own_families
from megatron_zbpp.schedules.registry import RECOMMENDED
from megatron_zbpp.techniques import ASKED, find


def add_list(parser: ArgumentParser) -> None:
    """Add sizes that gains are simulated at, by the costs that `compare` takes by default."""
    sizes: tuple[tuple[str, Any, int, str], ...] = (
        ('--pp', values.ranks, 4, 'ranks'),
        ('--microbatches', values.count, 8, 'microbatches'),
    )
    for name, kind, size, what in sizes:
        text = f'{what} that gains are simulated with; default {size}'
        parser.add_argument(name, type=kind, default=size, metavar=name[2].upper(), help=text)
    parser.add_argument(
        '--all', action='store_true', help='every schedule, as --json and --table have'
    )
    arguments.add_against(parser)


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


def add_simulate(parser: ArgumentParser) -> None:
    """Add what `zbpp simulate` takes beside a schedule and costs."""
    arguments.add_against(parser)
    for name in ASKED:
        free = find(name).free
        more = free and f'; {free}: as many as --copy-ratio lets hide behind the passes'
        parser.add_argument(f'--{name}', metavar='CHUNKS', help=meaning(name) + more)
    arguments.add_copy_ratio(parser)
    arguments.add_vocabulary(parser)


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


def add_check(parser: ArgumentParser) -> None:
    """Add what `zbpp check` takes."""
    parser.add_argument(
        'file', type=values.path, metavar='FILE', help='our JSON, a plan, or the CSV of torch'
    )
    parser.add_argument('--slices', type=values.count, metavar='N', help='of each sequence')
    parser.add_argument(
        '--memory-limit', type=values.amount, metavar='A', help=meaning('memory_limit')
    )


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


def add_doctor(parser: ArgumentParser) -> None:
    """Add what `zbpp doctor` takes."""
    parser.add_argument('--gpus', type=values.count, metavar='N', help='of the job')
    add_rates(parser)
    parser.add_argument('--verbose', action='store_true', help='name each patch, each version')
    parser.add_argument('line', nargs='*', metavar='-- LAUNCH LINE', help='of pretrain_gpt.py')


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
