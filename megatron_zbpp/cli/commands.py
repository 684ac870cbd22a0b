"""What each subcommand of `zbpp` does: from parsed arguments to what it prints or writes."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_zbpp.analysis.checker import ScheduleError, check
from megatron_zbpp.analysis.critical import critical_path
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.cli import inputs
from megatron_zbpp.cli.inputs import Case
from megatron_zbpp.cli.progress import progress
from megatron_zbpp.ir import Schedule, formats
from megatron_zbpp.ir.grid import grid
from megatron_zbpp.ir.timeline import Timeline
from megatron_zbpp.planner.cache import default_folder, planned
from megatron_zbpp.planner.frontier import frontier
from megatron_zbpp.planner.plans import Candidate, Plan, PlanningInterrupted
from megatron_zbpp.render.html import html
from megatron_zbpp.render.perfetto import perfetto
from megatron_zbpp.render.png import timeline_png
from megatron_zbpp.render.scene import number
from megatron_zbpp.render.svg import svg
from megatron_zbpp.render.text import timeline_text
from megatron_zbpp.schedules import FAMILIES

_IDLE = 'idle, all ranks'
_MEANING = 'bubble: idle share of the busiest rank; idle: of the time of all ranks, what is lost'


def list_families(args: Namespace) -> None:
    """Every family that the registry knows."""
    keys = ('name', 'aliases', 'summary', 'bubble', 'memory', 'source')
    if args.json:
        entries = [{key: getattr(family, key) for key in keys} for family in FAMILIES]
        for entry in entries:
            entry |= {key: str(entry[key]) for key in ('bubble', 'memory')}
        return _print_json({'schedules': entries})
    for family in FAMILIES:
        aliases = f'  (also {", ".join(family.aliases)})' if family.aliases else ''
        print(f'{family.name}{aliases}\n    {family.summary}')
        print(f'    bubble {family.bubble}; peak memory {family.memory}\n    {family.source}')


def show(args: Namespace) -> None:
    """Print a schedule: to scale, or with `--order` its orders as they stand, unchecked."""
    width = shutil.get_terminal_size((120, 24)).columns if args.width is None else args.width
    if args.order:
        schedule = formats.load(args.file) if args.file else inputs.load_case(args).schedule
        drawing = grid(schedule, width=width or sys.maxsize, height=sys.maxsize)
        return _print_json({'order': drawing.splitlines()}) if args.json else print(drawing)
    case = inputs.load_case(args)
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
    case = inputs.load_case(args)
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
    _print_summary(_facts(case, timeline))
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
    schedule = formats.load(args.file)
    check(schedule, memory_limit=args.memory_limit)
    if args.json:
        return _print_json({'valid': True, **_shape(schedule)})
    print(f'valid: {_headline(schedule)}')


def compare(args: Namespace) -> None:
    """Print a table, and draw a picture, of the named schedules or of all that can be built."""
    picture = _suffix(args.output) if args.output else None
    found, skipped = inputs.load_cases(args)
    ran = ((name, case.timeline) for name, case in found.items())
    timelines = dict(sorted(ran, key=lambda item: item[1].makespan))
    if picture:
        _draw(args.output, picture, found, timelines)
    facts = [_facts(found[name], timeline) for name, timeline in timelines.items()]
    if args.json:
        left_out = [{'name': name, 'reason': reason} for name, reason in skipped.items()]
        return _print_json({'schedules': facts, 'skipped': left_out, 'picture': args.output})
    heads = (
        'schedule',
        'makespan',
        'its bubble',
        'window',
        'its bubble',
        _IDLE,
        'peak activations',
    )
    _print_table(heads, map(_row, facts))
    print(_MEANING)
    for name, reason in skipped.items():
        print(f'without {name}: {reason}')
    if args.output:
        print(f'wrote {args.output}')


def plan_schedule(args: Namespace) -> int:
    """Return the best schedule that the planner finds, its lower bound, the best named one."""
    if args.frontier:
        _plan_frontier(args)
        return 0
    picture = _planned_output(args)
    status = 0
    try:
        with progress('planning', '%', 100) as done:
            found, cached = planned(
                *_plan_inputs(args),
                memory_limit=args.memory_limit,
                seconds=args.seconds,
                objective=args.objective,
                seed=args.seed,
                progress=done,
            )
    except PlanningInterrupted as interruption:
        print('zbpp: interrupted: this is the best plan by then', file=sys.stderr)
        found, cached, status = interruption.best, False, 128 + signal.SIGINT
    facts = _plan_facts(found, cached)
    if args.output and picture is None:
        _write(args.output, json.dumps(facts, indent=1))
    elif args.output:
        case = Case(found.schedule, found.costs)
        _draw(args.output, picture, {'plan': case}, {'plan': case.timeline})
    if args.json:
        _print_json(facts)
        return status
    print(_headline(found.schedule))
    _print_summary(facts)
    print(f'lower bound of the {found.objective} {number(found.lower_bound)}, gap {found.gap:.2%}')
    if found.best_named:
        name, value = found.best_named
        print(f'best named schedule: {name}, {found.objective} {number(value)}')
    else:
        print('no named schedule fits the memory limit')
    chunks = found.schedule.num_stages // found.schedule.num_ranks
    print(f'needs {found.schedule.num_stages} layers or more: {chunks} chunks on each rank (--vpp)')
    if cached:
        print('planned before with the same inputs; --no-cache plans anew')
    if args.output:
        print(f'wrote {args.output}')
    return status


def _planned_output(args: Namespace) -> str | None:
    """Return the picture that --output asks for; None: a plan."""
    if not args.output or args.output.endswith('.json'):
        return None
    if Path(args.output).suffix[1:].lower() not in ('html', 'svg', 'png'):
        raise ValueError(f'-o {args.output}: name .json for the plan, or .html, .svg or .png')
    return _suffix(args.output)


def _plan_frontier(args: Namespace) -> None:
    """Plan under each of several memory limits."""
    if args.memory_limit is not None:
        raise ValueError('--frontier has the memory limits: leave --memory-limit out')
    if args.output and not args.output.endswith(('.png', '.svg')):
        raise ValueError(f'--output {args.output}: let its name end in .png or .svg')
    if args.output and not Path(args.output).absolute().parent.is_dir():
        raise ValueError(f'--output {args.output}: there is no folder {Path(args.output).parent}')
    with progress('planning', '%', 100) as done:
        points = frontier(
            *_plan_inputs(args),
            args.frontier,
            seconds=args.seconds,
            objective=args.objective,
            seed=args.seed,
            progress=done,
        )
    if args.output:
        _draw_frontier(
            args, [(at, _bubble(args, Case(each.schedule, each.costs))) for at, each, _ in points]
        )
    if args.json:
        found = [{'memory_limit': at, **_plan_facts(*point)} for at, *point in points]
        return _print_json({'frontier': found})
    heads = ('limit', 'makespan', 'its bubble', 'window', 'its bubble', _IDLE, 'gap', 'best named')
    _print_table(heads, [_frontier_row(limit, found) for limit, found, _ in points])
    print(_MEANING)


def _draw_frontier(args: Namespace, planned: list[tuple[float, float]]) -> None:
    """Bubble against memory: of the plans, and of every named schedule that can be had."""
    from megatron_zbpp.render.png import frontier_png

    named = {}
    for case in inputs.named_cases(args):
        most = max(peak(case.schedule, case.costs))
        named[case.schedule.name] = most, _bubble(args, case)
    title = f'p = {args.pp}, m = {args.microbatches}, simulated'
    frontier_png(planned, named, args.output, title, f'bubble of the {args.objective}')


def _bubble(args: Namespace, case: Case) -> float:
    timeline = case.timeline
    return timeline.bubble_window if args.objective == 'window' else timeline.bubble_makespan


def _plan_inputs(args: Namespace) -> tuple[Path | None, list[Candidate], int]:
    """Folder of the cache, placements with costs, m."""
    folder = None if args.no_cache else Path(args.cache) if args.cache else default_folder()
    return folder, inputs.candidates(args), args.microbatches


def _plan_facts(found: Plan, cached: bool) -> dict:
    case = Case(found.schedule, found.costs)
    name, value = found.best_named or (None, None)
    return {
        **_facts(case, case.timeline),
        'objective': found.objective,
        'lower_bound': found.lower_bound,
        'gap': found.gap,
        'best_named': {'name': name, found.objective: value} if name else None,
        'repeats': found.repeats,
        'cached': cached,
        'schedule': json.loads(found.schedule.to_json()),
    }


def _frontier_row(limit: float, found: Plan) -> tuple[str, ...]:
    facts = _facts(case := Case(found.schedule, found.costs), case.timeline)
    name, value = found.best_named or ('none fits', None)
    best = name if value is None else f'{name} {number(value)}'
    return (number(limit), *_row(facts)[1:6], f'{found.gap:.2%}', best)


def convert(args: Namespace) -> None:
    """Write a schedule in another format."""
    case = inputs.load_case(args)
    if args.to == 'json':
        _write(args.output, case.schedule.to_json())
    elif args.to == 'torch-csv':
        _write(args.output, formats.to_torch_csv(case.schedule, args.dialect))
    else:
        name = case.schedule.name
        _draw(args.output, args.to, {name: case}, {name: case.timeline})
    if args.json:
        return _print_json({'written': args.output, 'to': args.to, **_shape(case.schedule)})
    print(f'wrote {args.output}')


def doctor(args: Namespace) -> int:
    """Return what is installed, whether our patches fit it, and what a launch line would run."""
    from megatron_zbpp.mcore.command_line.doctor import examine, words  # takes torch and Megatron

    report = examine(args.line, args.gpus)
    _print_json(report.to_dict()) if args.json else print(words(report))
    return 0 if report.fine else 1


def refuse(error: ScheduleError, as_json: bool) -> int:
    """One line on stderr; the drawing, which takes several, on stdout."""
    what, _, drawing = str(error).partition('\n')
    if as_json:
        _print_json({'valid': False, 'error': what, 'grid': drawing.splitlines()})
    else:
        print(drawing)
    print(f'zbpp: {what}', file=sys.stderr)
    return 2


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
        'idle_all_ranks': timeline.idle_all_ranks,
        'peak_activations': peak(case.schedule, case.costs),
    }


def _row(facts: dict) -> tuple[str, ...]:
    return (
        facts['name'],
        number(facts['makespan']),
        f'{facts["bubble_rate_makespan"]:.2%}',
        number(facts['window']),
        f'{facts["bubble_rate_window"]:.2%}',
        f'{facts["idle_all_ranks"]:.2%}',
        number(max(facts['peak_activations'])),
    )


def _headline(schedule: Schedule) -> str:
    shape = _shape(schedule)
    return (
        f'{shape["name"]}: {shape["ranks"]} ranks, {shape["stages"]} stages '
        f'({shape["placement"]}), {shape["microbatches"]} microbatches, {shape["passes"]} passes'
    )


def _print_summary(facts: dict) -> None:
    print(f'makespan {number(facts["makespan"])}, bubble {facts["bubble_rate_makespan"]:.2%}')
    print(f'window   {number(facts["window"])}, bubble {facts["bubble_rate_window"]:.2%}')
    print(f'idle, all ranks {facts["idle_all_ranks"]:.2%} ({_MEANING})')
    print(f'peak activations {number(max(facts["peak_activations"]))}')


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
    """Return the format that a picture's path asks for."""
    suffix = Path(path).suffix[1:].lower()
    if suffix not in ('html', 'svg', 'png'):
        raise ValueError(f'-o {path}: name a .html, .svg or .png file')
    return suffix


def _draw(path: str, to: str, shown: dict[str, Case], timelines: dict[str, Timeline]) -> None:
    """Write the picture of `timelines` in format `to`."""
    if to == 'png':
        return timeline_png(timelines, path)
    draw: Callable[..., str] = {'html': html, 'svg': svg, 'perfetto': perfetto}[to]
    _write(path, draw(timelines, {name: case.costs for name, case in shown.items()}))


def _write(path: str, text: str) -> None:
    Path(path).write_text(text, encoding='utf-8')
