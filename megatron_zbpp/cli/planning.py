"""`zbpp plan`: one plan, or one for each of several memory limits."""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.cli import arguments, inputs, shard_planning, slicing, values
from megatron_zbpp.cli.candidates import (
    candidates,
    named_cases,
    with_selective,
)
from megatron_zbpp.cli.inputs import PLACEMENTS, Case, units_of
from megatron_zbpp.cli.layer_costs import LayerCosts
from megatron_zbpp.cli.printing import (
    draw,
    facts,
    headline,
    picture_format,
    print_json,
    print_summary,
    print_wrapped,
    row,
    write,
)
from megatron_zbpp.cli.progress import progress
from megatron_zbpp.cli.searching import add_search, searched, tell_cut_short, tell_wide_gap
from megatron_zbpp.cli.tables import print_table
from megatron_zbpp.ir.costs_file import SELECTIVE
from megatron_zbpp.ir.formats import Units, memory_of_plan
from megatron_zbpp.ir.timeline import MEANING
from megatron_zbpp.planner.budget import Budget, OnTime
from megatron_zbpp.planner.cache import default_folder, planned
from megatron_zbpp.planner.frontier import FrontierInterrupted, frontier
from megatron_zbpp.planner.plans import Candidate, Plan, PlanningInterrupted, is_small
from megatron_zbpp.planner.problem import OBJECTIVES
from megatron_zbpp.planner.slice_counts import Count, fewest, slice_counts
from megatron_zbpp.render.scene import number
from megatron_zbpp.techniques import NAMES, find
from megatron_zbpp.techniques.composition import SLICED
from megatron_zbpp.techniques.slices.sizes import sizes_of

_SLICES = 0.5  # share of the time in which --slices auto finds how many, the rest plans their order


def plan_schedule(args: Namespace) -> int:
    """Return 0, or 130 where Ctrl-C ended the search; prints and writes the best plan."""
    inputs.require_share(args)
    if args.vocab_parallel is not None:
        picture = _planned_output(args)
        case, made, status = shard_planning.plan_in_shards(args)
        _write_plan(args, picture, case.schedule.name, case, made)
        if args.output and not args.json:
            print(f'wrote {args.output}')
        return status
    if args.frontier:
        return _plan_frontier(args)
    picture = _planned_output(args)
    begun, finds = time.monotonic(), slicing.number(args) == 0
    with progress('slices', '%', 100) as done:
        counts = _propose_slices(args, Budget(args.seconds * _SLICES, done).on_time)
    (found, cached), status = searched(
        'planning',
        'this is the best plan',
        lambda done: planned(
            *_plan_inputs(args),
            memory_limit=args.memory_limit,
            seconds=args.seconds * (1 - finds * _SLICES),
            objective=args.objective,
            seed=args.seed,
            actions=_of_stages(args),
            graph=slicing.graph(args, candidates(args)[0][1]),
            progress=done,
        ),
        lambda e: (e.best, False) if isinstance(e, PlanningInterrupted) else None,
    )
    if not (cached or found.repeats or is_small(args.pp * args.microbatches * 3)):
        tell_cut_short(args, begun)
    tell_wide_gap(args, found.gap, sum(map(len, found.schedule.passes)))
    made = _plan_facts(args, found, cached, counts)
    _write_plan(
        args, picture, found.as_good_as or 'planned', Case(found.schedule, found.costs), made
    )
    print_json(made) if args.json else _print_plan(found, made)
    if counts and not args.json:
        _print_counts(found, counts, made['slice_sizes'])
    if args.output and not args.json:
        print(f'wrote {args.output}')
    return status


def _write_plan(args: Namespace, picture: str | None, name: str, case: Case, made: dict) -> None:
    """Write the file that is asked for: a picture in that format, or else the plan."""
    if picture is not None:
        draw(args, picture, {name: case}, {name: case.timeline}, inputs.heading(args))
    elif args.output:
        write(args.output, json.dumps(made, indent=1))


def _print_plan(found: Plan, made: dict) -> None:
    """Print how good a plan is, and the chunks, slices and techniques that it needs."""
    print(headline(found.schedule))
    print_summary(made, Units(**made['units']))
    print(f'lower bound of the {found.objective} {number(found.lower_bound)}, gap {found.gap:.2%}')
    if found.best_named is None:
        print('no named schedule fits the memory limit')
    elif found.as_good_as:
        print(f'no better than a named schedule: {found.as_good_as} has the same {found.objective}')
    else:
        name, value = found.best_named
        print(f'best named schedule: {name}, {found.objective} {number(value)}')
    chunks = found.schedule.num_stages // found.schedule.num_ranks
    each = f'{chunks} chunks' if chunks > 1 else '1 chunk'
    print(f'needs {found.schedule.num_stages} layers or more: {each} on each rank (--vpp)')
    if 'layout' in made:
        print(f'layout {made["layout"]}')
    if made['slice_sizes']:
        print(f'slices of {", ".join(map(str, made["slice_sizes"]))} tokens')
    for technique in found.schedule.graph.techniques:
        if technique.name == SLICED:
            continue
        stages, *where = map(str, technique.arguments)
        print(f'{technique.name}{" to the " if where else ""}{"".join(where)}: stages {stages}')
    if made[SELECTIVE]:
        print("Megatron's selective recomputation: give the job --recompute-granularity selective")
    if made['cached']:
        print('planned before with the same inputs; --no-cache plans anew')


def _planned_output(args: Namespace) -> str | None:
    """Return the picture that --output asks for; None: a plan."""
    return picture_format(args.output, args.title, 'the plan')


def _plan_frontier(args: Namespace) -> int:
    """Plan under each of several memory limits; return as `plan_schedule` does."""
    if slicing.number(args) == 0:
        raise ValueError('--slices auto is for one memory limit: give --memory-limit, or a number')
    if args.memory_limit is not None:
        raise ValueError('--frontier has the memory limits: leave --memory-limit out')
    if args.output and not args.output.endswith(('.png', '.svg', '.pdf')):
        raise ValueError(f'--output {args.output}: let its name end in .png, .svg or .pdf')
    if args.title is not None and not args.output:
        raise ValueError(f'--title {args.title!r} heads a picture: name one by -o')
    if args.output and not Path(args.output).absolute().parent.is_dir():
        raise ValueError(f'--output {args.output}: there is no folder {Path(args.output).parent}')
    points, status = searched(
        'planning',
        'these are the best plans',
        lambda done: frontier(
            *_plan_inputs(args),
            args.frontier,
            seconds=args.seconds,
            objective=args.objective,
            seed=args.seed,
            actions=_of_stages(args),
            graph=slicing.graph(args, candidates(args)[0][1]),
            progress=done,
        ),
        lambda e: e.found if isinstance(e, FrontierInterrupted) else None,
    )
    if args.output:
        _draw_frontier(args, [(limit, found) for limit, found, _ in points])
    if args.json:
        made = [
            {'memory_limit': at, **_plan_facts(args, found, cached)} for at, found, cached in points
        ]
        print_json({'frontier': made})
        return status
    rows = [_frontier_row(args, limit, found) for limit, found, _ in points]
    share = 'bubble' if args.objective == 'window' else 'gain'
    print_table(('limit', args.objective, share, 'idle', 'gap', 'best named'), rows)
    print_wrapped(f'gain: time saved against {args.against}; {MEANING}')
    if args.output:
        print(f'wrote {args.output}')
    return status


def _draw_frontier(args: Namespace, points: list[tuple[float, Plan]]) -> None:
    """Draw idle share against memory: of the plans, and of every named schedule that exists."""
    from megatron_zbpp.render.frontier import frontier_png

    named, plans = {}, {}
    for label, case in named_cases(args):
        named[label] = max(peak(case.schedule, case.costs)), _idle(args, case)
    for limit, found in points:
        place = limit, _idle(args, Case(found.schedule, found.costs))
        plans[place] = found.as_good_as or ''
    heading = '\n'.join(filter(None, [args.title, inputs.heading(args)]))
    share = 'bubble' if args.objective == 'window' else 'idle GPU time'
    frontier_png(plans, named, args.output, heading, share)


def _idle(args: Namespace, case: Case) -> float:
    return case.timeline.bubble if args.objective == 'window' else case.timeline.idle_all_ranks


def _plan_inputs(args: Namespace) -> tuple[Path | None, list[Candidate], int]:
    """Return the folder of the cache, placements with costs, and m."""
    folder = None if args.no_cache else Path(args.cache) if args.cache else default_folder()
    return folder, candidates(args), args.microbatches


def _of_stages(args: Namespace) -> tuple[str, ...]:
    return tuple(name for name in args.actions if name != SELECTIVE)


def _propose_slices(args: Namespace, on_time: OnTime) -> list[Count]:
    if slicing.number(args) != 0:
        return []
    propose = partial(
        slice_counts,
        candidates(args),
        args.microbatches,
        slicing.length(args, '--slices auto'),
        slicing.attention(args),
        least=args.least_slice,
        objective=args.objective,
        on_time=on_time,
    )
    try:
        found = list(propose(memory_limit=args.memory_limit))
    except ValueError:
        if not args.actions:
            raise
        found = []
    if not found and args.actions:  # which bring down what is above the limit
        found = list(propose())
    best = fewest(found)
    args.slices = best.sizes if best.slices > 1 else 1
    return found


def _print_counts(found: Plan, counts: list[Count], sizes: tuple[int, ...]) -> None:
    rows = [(each.slices, each.sizes[-1], each.name, number(each.value)) for each in counts]
    print_table(('slices', 'shortest, tokens', 'best named', found.objective), rows)
    whole = next((each.value for each in counts if each.slices == 1), None)
    if not sizes:
        print('whole sequences: more slices gain less than 1 %')
    elif whole is None:
        print('in slices, as no schedule of whole sequences fits the memory limit')
    else:
        print(f'in slices: {1 - found.value / whole:.1%} less than the best of whole sequences')


def _selective(args: Namespace, found: Plan) -> bool:
    if SELECTIVE not in args.actions:
        return False
    return found.costs != with_selective(args, found.schedule.placement, selective=False)


def _plan_facts(args: Namespace, found: Plan, cached: bool, counts: Sequence[Count] = ()) -> dict:
    case = Case(found.schedule, found.costs)
    name, value = found.best_named or (None, None)
    return {
        **facts(case, case.timeline, args.against),
        'objective': found.objective,
        'lower_bound': found.lower_bound,
        'gap': found.gap,
        'best_named': {'name': name, found.objective: value} if name else None,
        'repeats': found.repeats,
        'cached': cached,
        SELECTIVE: _selective(args, found),
        'slice_sizes': sizes_of(found.schedule.graph),
        'slice_counts': [each._asdict() for each in counts],
        'schedule': json.loads(found.schedule.to_json()),
        **memory_of_plan(found.costs, units_of(args)),
        **_layout(args, found),
    }


def _layout(args: Namespace, found: Plan) -> dict[str, str]:
    """Return the stages of --layers-file, by which the job is to place them."""
    if not isinstance(args.times, LayerCosts):
        return {}
    return {'layout': args.times.layout(found.schedule.placement)}


def _frontier_row(args: Namespace, limit: float, found: Plan) -> tuple[str, ...]:
    case = Case(found.schedule, found.costs)
    _, makespan, gain, idle, *window, _ = row(facts(case, case.timeline, args.against))
    name, value = found.best_named or ('none fits', None)
    best = name if value is None else f'{name} {number(value)}'
    best += ', as good' if found.as_good_as else ''
    own = window if found.objective == 'window' else (makespan, gain)
    return (number(limit), *own, idle, f'{found.gap:.2%}', best)


def add_planning(parser: ArgumentParser) -> None:
    """Add what `plan` takes."""
    arguments.add_shape(parser, required=True, chunks=values.counts)
    arguments.add_costs(parser)
    arguments.add_vocabulary(parser, shard_planning.share_or_auto)
    arguments.add_against(parser)
    arguments.add_renamed(
        parser,
        '--placements',
        '--placement',
        'placement',
        type=_placements,
        default=list(PLACEMENTS),
        metavar='NAME,...',
        help='that may be used, all of one way: loop, v, wave; default all',
    )
    more = '; with --frontier a picture of it beside the named schedules (.png, .svg, .pdf)'
    add_search(parser, OBJECTIVES, 20.0, more)
    parser.add_argument(
        '--frontier',
        type=values.memories,
        metavar='A,...',
        help='plan under each of these memory limits: less bubble for more memory',
    )
    parser.add_argument(
        '--actions',
        type=_actions,
        default=(),
        metavar='NAME,...',
        help='what may be done with activations between F and B: '
        + ', '.join(f'{name} ({find(name).words})' for name in NAMES)
        + f", {SELECTIVE} (Megatron's recomputation, of the whole model); default: they are kept",
    )
    parser.add_argument(
        '--least-slice',
        type=values.count,
        default=4096,
        metavar='TOKENS',
        help='of --slices auto: tokens of a slice, as a mean of all; default 4096',
    )
    arguments.add_copy_ratio(parser)
    arguments.add_renamed(
        parser,
        '--num-layers',
        '--layers',
        'layers',
        type=values.count,
        metavar='N',
        help='of the model: no more stages than that',
    )
    caching = parser.add_mutually_exclusive_group()
    caching.add_argument(
        '--cache',
        type=values.path,
        metavar='FOLDER',
        help='of plans; default ~/.cache/megatron_zbpp/plans',
    )
    caching.add_argument('--no-cache', action='store_true', help='plan anew and keep nothing')


def _actions(text: str) -> tuple[str, ...]:
    for name in text.split(','):
        known = (*NAMES, SELECTIVE)
        values.require(name, name in known, f'choose of {", ".join(known)}')
    return tuple(sorted(set(text.split(','))))


def _placements(text: str) -> list[str]:
    for name in text.split(','):
        values.require(name, name in PLACEMENTS, f'choose of {", ".join(PLACEMENTS)}')
    return text.split(',')
