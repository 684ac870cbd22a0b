"""Commands on schedules and jobs: list, show, simulate, check, convert, page and others."""

from __future__ import annotations

import json
import shutil
import sys
from argparse import ArgumentParser
from pathlib import Path

from megatron_zbpp.analysis.checker import ScheduleError, check
from megatron_zbpp.analysis.gain import Gap, critical_path, gaps
from megatron_zbpp.analysis.memory import live, peak
from megatron_zbpp.cli import arguments, printing
from megatron_zbpp.cli.advising import rates_of
from megatron_zbpp.cli.arguments import add_options
from megatron_zbpp.cli.printing import print_json, print_table, print_wrapped
from megatron_zbpp.ir import W, formats
from megatron_zbpp.ir.formats import BYTES
from megatron_zbpp.ir.graph import HOST
from megatron_zbpp.ir.schedule import grid
from megatron_zbpp.mcore.settings import meaning
from megatron_zbpp.partitioning.freeze_plans import FREEZE_STEPS, UNIT, FreezePlan, freeze
from megatron_zbpp.planner.cases import Case, CaseRequest
from megatron_zbpp.planner.figures import facts, shape
from megatron_zbpp.render.drawing import time_shown, timeline_text
from megatron_zbpp.render.planner_page import Sizes, planner_page
from megatron_zbpp.render.scene import number
from megatron_zbpp.schedules import own_families
from megatron_zbpp.schedules.registry import RECOMMENDED
from megatron_zbpp.techniques import ASKED, find

_MOST_PAGE_RANKS = 64  # of a page: more are narrower than their labels
# Formats that `convert` writes, and how names of their files end; of one end the first is meant.
FORMATS = {
    'json': '.json',
    'torch-csv': '.csv',
    **{name: f'.{name}' for name in printing.PICTURES},
    'perfetto': '.json',
}

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
        return print_json({'schedules': entries, **sizes})
    shown = {name: '-' if gain is None else f'{gain:.1%}' for name, gain in gains.items()}
    sizes = f'p = {pp}, m = {microbatches}'
    if table:
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
    print_wrapped(f'gain: time saved against {against}; {asked.heading()}')


SHOW = """
    --order  switch  orders only, also of an invalid file
    --width  whole  columns; 0: all it takes. Default: the terminal
"""  # beside a schedule and costs


def show(request: CaseRequest, order: bool, width: int | None, against: str, as_json: bool) -> None:
    """Print a schedule: to scale, or with `--order` its orders as they stand, unchecked."""
    width = shutil.get_terminal_size((120, 24)).columns if width is None else width
    if order:
        schedule = formats.load(request.file) if request.file else request.case().schedule
        drawing = grid(schedule, width=width or sys.maxsize, height=sys.maxsize)
        return print_json({'order': drawing.splitlines()}) if as_json else print(drawing)
    case = request.case()
    timeline = case.timeline
    if as_json:
        spans = [
            [[str(p), *span] for p, span in zip(*rank, strict=True)]
            for rank in zip(case.schedule.passes, timeline.spans, strict=True)
        ]
        return print_json({'schedule': json.loads(case.schedule.to_json()), 'timeline': spans})
    printing.print_headline(case.schedule)
    print(timeline_text(timeline, width, colours=printing.takes_colours(sys.stdout)))
    shown = time_shown(timeline, width)
    if shown < timeline.makespan:
        units = f'{number(shown, 3)} of {number(timeline.makespan)}'
        print(f'… {units} time units shown: --width 0 shows all')
    print_wrapped(printing.legend(timeline, width))
    printing.print_reversed(case.schedule.placement)
    found = facts(case, timeline, against)
    gained = '' if 'period' in found else printing.gained(found)
    most = printing.peak_text(found, case.units)
    print(f'makespan {number(timeline.makespan)}{gained}, {most}')
    print(printing.idle_text(found['idle_all_ranks'], found['idle_parts']))
    if 'period' in found:
        printing.print_asynchronous(found)


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
        return print_json({**found, 'critical_path': steps})
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
    print_table(heads, rows)
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
        return print_json({'valid': True, **shape(schedule)})
    print(f'valid: {printing.headline(schedule)}')


def add_convert(parser: ArgumentParser) -> None:
    """Add the arguments of `zbpp convert` beside a schedule and costs."""
    arguments.add_vocabulary(parser)
    add_options(
        parser,
        f"""
        --to  formats  format; default: as the name of the file ends
        -o --output FILE  path!  where to
        {arguments.TITLE}
        --dialect  dialects = new  of torch-csv: new (since 2.6) has I and B where old has B and BW;
            default new
        """,
        formats=[*FORMATS],
        dialects=formats.DIALECTS,
    )


def convert(
    request: CaseRequest,
    output: str,
    to: str | None,
    title: str | None,
    dialect: str,
    as_json: bool,
) -> None:
    """Write a schedule in another format."""
    suffix = Path(output).suffix.lower()
    said = next((name for name, ends in FORMATS.items() if ends == suffix), None)
    to = to or said
    if to is None:
        known = ', '.join(dict.fromkeys(FORMATS.values()))
        raise ValueError(f'{output} does not say its format: end it in {known}, or give --to')
    if said is not None and FORMATS[to] != suffix:
        raise ValueError(
            f'{output} is no name for --to {to}: end it in {FORMATS[to]}, or drop --to'
        )
    if title is not None and to not in printing.PICTURES:
        raise ValueError(f'--title {title!r} heads a picture, which {to} is not: leave it out')
    case = request.case()
    if to == 'json':
        printing.write(output, _kept(request.file, case))
    elif to == 'torch-csv':
        printing.write(output, formats.to_torch_csv(case.schedule, dialect))
    else:
        name = case.schedule.name
        printing.draw(output, to, title, {name: case}, request.heading(case))
    if as_json:
        return print_json({'written': output, 'to': to, **shape(case.schedule)})
    print(f'wrote {output}')


def _kept(file: str | None, case: Case) -> str:
    """Return the schedule as JSON; of a plan with all that its file has."""
    fields = formats.load_plan(file).fields if file else {}
    if 'costs' not in fields:
        return case.schedule.to_json()
    now = formats.memory_of_plan(case.costs, case.units)
    return json.dumps({**fields, 'schedule': json.loads(case.schedule.to_json()), **now}, indent=1)


def add_page(parser: ArgumentParser) -> None:
    """Add the sizes of the page, and where to write it."""
    p, m, v = (','.join(map(str, each)) for each in Sizes())
    add_options(
        parser,
        f"""
        --pp P,...  page_ranks as ranks = {p}  ranks to choose from; default {p}
        --microbatches M,...  counts = {m}  microbatches to choose from; default {m}
        --vpp V,...  counts as chunks = {v}  chunks per rank, where a schedule takes any; default
            {v}
        -o --output FILE  page!  where to write the page: .html
        """,
        page_ranks=arguments.checked(
            arguments.counts,
            lambda counts: max(counts) <= _MOST_PAGE_RANKS,
            f'give at most {_MOST_PAGE_RANKS} ranks',
        ),
        page=arguments.checked(
            arguments.path,
            lambda path: path.lower().endswith('.html'),
            'give the path of a page, which ends in .html',
        ),
    )


def write_page(
    ranks: list[int], microbatches: list[int], chunks: list[int], output: str, as_json: bool
) -> None:
    """Write the page, with the schedules of all sizes that are asked for."""
    sizes = Sizes(ranks, microbatches, chunks)
    if not Path(output).parent.is_dir():
        raise ValueError(f'{output} is in no folder that is there: give another path')
    with printing.progress('orders', 'it', 100) as done:
        page = planner_page(sizes, done)
    printing.write(output, page)
    size = len(page.encode())
    if as_json:
        return print_json({'written': output, 'bytes': size, **sizes._asdict()})
    print(f'wrote {output}, {size} bytes: open it in a browser')


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
    print_json(report.to_dict()) if as_json else print(text_of(report, verbose))
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
        return print_json({'gaps': [_fields(gap) for gap in found]})
    print(printing.headline(case.schedule))
    rows = [
        (g.rank, g.where, number(g.start), number(g.length), g.before or '-', g.after or '-')
        for g in found
    ]
    print_table(('rank', 'where', 'start', 'length', 'after pass', 'before pass'), rows)
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
        return print_json(
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
    print_table(('stage', 'left out'), [(at, f'{ratio:.1%}') for at, ratio in enumerate(stages)])
    print('a prediction; and another training, as it does not learn what is left out')
    if output:
        print(f'wrote {output}')
