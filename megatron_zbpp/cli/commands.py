"""Commands on schedules and jobs: list, simulate, check, bubbles, freeze and doctor."""

from __future__ import annotations

import sys
from argparse import ArgumentParser

from megatron_zbpp.analysis.checker import ScheduleError, check
from megatron_zbpp.analysis.gain import Gap, critical_path, gaps
from megatron_zbpp.analysis.memory import live, peak
from megatron_zbpp.cli import arguments, printing
from megatron_zbpp.cli.advising import rates_of
from megatron_zbpp.cli.arguments import add_options
from megatron_zbpp.ir import W, formats
from megatron_zbpp.ir.formats import BYTES
from megatron_zbpp.ir.graph import HOST
from megatron_zbpp.mcore.settings import meaning
from megatron_zbpp.partitioning.freeze_plans import FREEZE_STEPS, UNIT, FreezePlan, freeze
from megatron_zbpp.planner.cases import CaseRequest
from megatron_zbpp.planner.figures import facts, shape
from megatron_zbpp.render.scene import number
from megatron_zbpp.schedules import own_families
from megatron_zbpp.schedules.registry import RECOMMENDED
from megatron_zbpp.techniques import ASKED, find

LIST = """
    --pp P  ranks = 4  ranks that gains are simulated with; default 4
    --microbatches M  count = 8  microbatches that gains are simulated with; default 8
    --all  switch as whole  every schedule, as --json and --table have
"""  # sizes that gains are simulated at


def list_families(
    pp: int, microbatches: int, whole: bool, against: str, as_json: bool, table: str | None
) -> None:
    """Print families, with their gains at these sizes: for people, the recommended ones."""
    keys = ('name', 'aliases', 'summary', 'bubble', 'memory', 'source', 'when', 'tier')
    every = own_families(every=True)
    few = not (whole or as_json or table)
    listed = [family for family in every if not few or family.tier == RECOMMENDED]
    asked = CaseRequest(num_ranks=pp, num_microbatches=microbatches)
    with printing.progress('schedules', 'it', len(listed)) as done:
        _, found, skipped = asked.cases([family.name for family in listed], done)
    known = {name: facts(each, each.timeline, against) for name, each in found.items()}
    gains = {name: each['gain'] for name, each in known.items()}
    # of an asynchronous schedule, they depend on its sizes
    copies = {f.name: None if f.asynchronous else f.num_routes for f in listed}
    copies |= {name: each['copies'] for name, each in known.items()}
    if as_json:
        entries = [{key: getattr(family, key) for key in keys} for family in listed]
        for entry, family in zip(entries, listed, strict=True):
            entry |= {key: str(entry[key]) for key in ('bubble', 'memory')}
            entry |= {'copies': copies[family.name], 'asynchronous': family.asynchronous}
            entry |= {'gain': gains.get(family.name), 'without': skipped.get(family.name)}
        sizes = {'ranks': pp, 'microbatches': microbatches, 'against': against}
        return printing.print_json({'schedules': entries, **sizes})
    shown = {name: '-' if gain is None else f'{gain:.1%}' for name, gain in gains.items()}
    sizes = f'p = {pp}, m = {microbatches}'
    if table:
        heads = ('schedule', 'bubble', 'peak memory', f'gain, {sizes}')
        trains = {False: 'the same', True: 'another model'}
        return printing.print_table(
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
        printing.print_wrapped(f'{family.name}{aliases}')
        printing.print_wrapped(f'    {family.summary}')
        held = copies[family.name] or 1
        held = f'; {held} copies of the weights' if held > 1 else ''
        late = '; asynchronous: trains another model' if family.asynchronous else ''
        name = family.name
        gain = f'gain {shown[name]}' if name in shown else f'no gain: {skipped[name]}'
        printing.print_wrapped(
            f'    bubble {family.bubble}; peak memory {family.memory}{held}{late}'
        )
        printing.print_wrapped(f'    {gain}; {family.source}')
    if few:
        printing.print_wrapped(f'and {len(every) - len(listed)} more: zbpp list --all')
    printing.print_wrapped(f'gain: time saved against {against}; {asked.heading()}')


def add_simulate(parser: ArgumentParser) -> None:
    """Add the arguments of `zbpp simulate` beside a schedule and costs."""
    add_options(parser, arguments.AGAINST)
    for name in ASKED:
        free = find(name).free
        more = free and f'; {free}: as many as --copy-ratio lets hide behind the passes'
        parser.add_argument(f'--{name}', metavar='CHUNKS', help=meaning(name) + more)
    add_options(parser, arguments.COPY_RATIO)
    arguments.add_vocabulary(parser)


def simulate_case(request: CaseRequest, against: str, as_json: bool) -> None:
    """Print makespan, window, bubbles, peak memory and critical path of one schedule."""
    case = request.case()
    timeline = case.timeline
    path = critical_path(timeline, case.costs)
    found = facts(case, timeline, against)
    if as_json:
        steps = [
            {**step._asdict(), 'ran': str(step.ran), 'on': step.on and str(step.on)}
            for step in path
        ]
        return printing.print_json({**found, 'critical_path': steps})
    peaks = peak(case.schedule, case.costs)
    busy = [timeline.busy(rank) for rank in range(case.schedule.num_ranks)]
    idle = [window - own for window, own in zip(timeline.windows, busy, strict=True)]
    printing.print_headline(case.schedule)
    printing.print_summary(found, case.units)
    waits = [step for step in path if step.waited == 'communication']
    print(f'critical path: {len(path)} passes, {len(waits)} messages, from {path[0].ran}', end=' ')
    print(f'to {path[-1].ran}\n')
    most = 'peak, GiB' if case.units.memory == BYTES else 'peak activations'
    columns = {'window': timeline.windows, 'busy': busy, 'idle in it': idle}
    columns[most] = list(map(case.units.scaled, peaks))
    host = [max(held, default=0.0) for held in live(case.schedule, case.costs, HOST)]
    columns |= {'on the host': list(map(case.units.scaled, host))} if any(host) else {}
    each = enumerate(zip(*columns.values(), strict=True))
    rows = [(rank, *map(number, cells)) for rank, cells in each]
    heads = ['rank', *columns]
    layout = formats.load_plan(request.file).layout if request.file else None
    if layout is not None:
        held, placement = layout.split('|'), case.schedule.placement
        heads.append('layers')
        rows = [(*row, ' '.join(held[s] for s in placement.stages(row[0]))) for row in rows]
    printing.print_table(heads, rows)
    printing.print_reversed(case.schedule.placement)


CHECK = f"""
    file FILE  path  our JSON, a plan, or the CSV of torch
    --slices N  count  of each sequence
    --memory-limit A  amount  {meaning('memory_limit')}
"""  # a file, and what is to be proven of it


def check_file(file: str, slices: int | None, memory_limit: float | None, as_json: bool) -> None:
    """Prove that a file's schedule can run, or raises ScheduleError."""
    schedule = formats.load_plan(file).schedule
    known = schedule.graph.num_slices
    if slices not in (None, known):
        raise ValueError(f'--slices {slices}, but {file} has {known}: leave --slices out')
    check(schedule, memory_limit=memory_limit, costs=schedule.costs)
    if as_json:
        return printing.print_json({'valid': True, **shape(schedule)})
    print(f'valid: {printing.headline(schedule)}')


GPUS = '--gpus N  count  of the job'
DOCTOR = """
    --verbose  switch  name each patch, each version
    line -- LAUNCH LINE  text*  of pretrain_gpt.py
"""


def doctor(
    line: list[str], gpus: int | None, verbose: bool, as_json: bool, **options: object
) -> int:
    """Print the installation, whether patches fit it, and what a launch line would run."""
    printing.now('importing torch ...')
    from megatron_zbpp.launch.doctor import examine, text_of

    try:
        report = examine(line, gpus, printing.now, rates_of(options))
    finally:
        printing.now('')
    printing.print_json(report.to_dict()) if as_json else print(text_of(report, verbose))
    return 0 if report.fine else 1


def refuse(error: ScheduleError, as_json: bool) -> int:
    """Print one line on stderr; the drawing, which takes several, on stdout."""
    what, _, drawing = str(error).partition('\n')
    if as_json:
        printing.print_json({'valid': False, 'error': what, 'grid': drawing.splitlines()})
    else:
        print(drawing)
    print(f'zbpp: {what}', file=sys.stderr)
    return 2


BUBBLES = '--least T  amount = 0  only gaps longer than that'


FREEZE = f"""
    --most R  share = 0.9  share of a stage's weight gradients that may be left out, 0 to 1;
        default 0.9
    --warm-up N  count = {UNIT}  steps before monitoring: a run has none frozen; default 100
    --unit N  count = {UNIT}  steps of monitoring, and half of those in which shares grow;
        default 100
    -o --output FILE  path  the plan, for --pipeline-freeze
"""  # beside a schedule and costs


def bubbles(request: CaseRequest, least: float, as_json: bool) -> None:
    """Print the gaps of each rank."""
    case = request.case()
    found = gaps(case.timeline, least)
    if as_json:
        return printing.print_json({'gaps': [_fields(gap) for gap in found]})
    print(printing.headline(case.schedule))
    rows = [
        (g.rank, g.where, number(g.start), number(g.length), g.before or '-', g.after or '-')
        for g in found
    ]
    printing.print_table(('rank', 'where', 'start', 'length', 'after pass', 'before pass'), rows)
    print(f'{len(found)} gaps, {number(sum(gap.length for gap in found))} in all')


def _fields(gap: Gap) -> dict:
    named = {'before': gap.before and str(gap.before), 'after': gap.after and str(gap.after)}
    return {**gap._asdict(), **named, 'where': gap.where}


def freeze_schedule(
    request: CaseRequest, most: float, warm_up: int, unit: int, output: str | None, as_json: bool
) -> None:
    """Print the share of each weight gradient to leave out."""
    case = request.case()
    schedule = case.schedule
    if output and not any(p.kind == W for order in schedule.passes for p in order):
        raise ValueError(
            f'{schedule.name} has no W passes, of which a training leaves gradients out: take a '
            'schedule that has, such as zb-h1, or leave -o out and read the estimate'
        )
    with printing.progress('freezing', 'step', FREEZE_STEPS) as done:
        found = freeze(schedule, case.costs, most, done)
    stages = [found.stage(stage) for stage in range(schedule.num_stages)]
    if output:
        printing.write(output, FreezePlan.of(schedule, found, warm_up, unit).to_json())
    if as_json:
        return printing.print_json(
            {
                'makespan': found.makespan,
                'without_freezing': found.without,
                'mean': found.mean,
                'stages': stages,
                'ratios': {str(p): ratio for p, ratio in found.ratios.items()},
            }
        )
    gain = 1 - found.makespan / found.without if found.without else 0.0
    print(printing.headline(schedule))
    print(
        f'makespan {number(found.makespan)}, without freezing {number(found.without)}: '
        f'{gain:.1%} less, for {found.mean:.1%} of all weight gradients'
    )
    printing.print_table(
        ('stage', 'left out'), [(at, f'{ratio:.1%}') for at, ratio in enumerate(stages)]
    )
    print('a prediction; and another training, as it does not learn what is left out')
    if output:
        print(f'wrote {output}')
