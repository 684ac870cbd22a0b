"""`zbpp bubbles` and `zbpp freeze`: what the time is good for in which ranks wait."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from megatron_zbpp.analysis.waits import Gap, gaps
from megatron_zbpp.cli import inputs, values
from megatron_zbpp.cli.printing import headline, print_json, write
from megatron_zbpp.cli.progress import progress
from megatron_zbpp.cli.tables import print_table
from megatron_zbpp.ir import Schedule, W
from megatron_zbpp.partitioning.freeze_plans import UNIT, FreezePlan
from megatron_zbpp.partitioning.freezing import FREEZE_STEPS, Freezing, freeze
from megatron_zbpp.render.scene import number


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
    case = inputs.load_case(args)
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
    case = inputs.load_case(args)
    if args.output:
        _require_weight_passes(case.schedule)
    with progress('freezing', 'step', FREEZE_STEPS) as done:
        found = freeze(case.schedule, case.costs, args.most, done)
    stages = [found.stage(stage) for stage in range(case.schedule.num_stages)]
    if args.output:
        write(
            args.output,
            FreezePlan.of(case.schedule, found, args.warm_up, args.unit).to_json(),
        )
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
