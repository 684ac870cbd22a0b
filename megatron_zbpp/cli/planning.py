"""`zbpp plan`: one plan, or one for each of several memory limits."""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from pathlib import Path

from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.cli import arguments, values
from megatron_zbpp.cli.arguments import case_request
from megatron_zbpp.cli.printing import (
    draw,
    headline,
    picture_format,
    print_json,
    print_summary,
    print_table,
    print_wrapped,
    progress,
    row,
    searched,
    write,
)
from megatron_zbpp.ir.costs_file import SELECTIVE
from megatron_zbpp.ir.timeline import MEANING
from megatron_zbpp.planner.cache import default_folder
from megatron_zbpp.planner.cases import IN_FILE, Case, Undecided
from megatron_zbpp.planner.plan_requests import (
    PLACEMENTS,
    AnswersInterrupted,
    PlanAnswer,
    PlanRequest,
)
from megatron_zbpp.planner.plans import PlanningInterrupted
from megatron_zbpp.planner.problem import OBJECTIVES
from megatron_zbpp.planner.shard_plans import ShardAnswer, ShardSearch
from megatron_zbpp.render.scene import number
from megatron_zbpp.techniques import NAMES, find
from megatron_zbpp.techniques.composition import SLICED
from megatron_zbpp.techniques.slices.sizes import AUTO
from megatron_zbpp.techniques.vocabulary.graph import USUAL_SHARE

_WIDE = 0.1  # gap to the lower bound above which a longer search is proposed


def plan_schedule(args: Namespace) -> int:
    """Return 0, or 130 where Ctrl-C ended the search; prints and writes the best plan."""
    folder = None if args.no_cache else Path(args.cache) if args.cache else default_folder()
    limits = tuple(args.frontier or ())
    asked = PlanRequest(
        case_request(args, num_chunks=None, limits=limits),
        args.num_ranks,
        args.num_microbatches,
        args.num_chunks,
        args.placement,
        args.actions,
        args.least_slice,
        args.layers,
        args.objective,
        args.seconds,
        args.seed,
        folder,
    )
    asked.case.require_share()
    shards = asked.case.vocab_parallel is not None
    if limits and not shards:
        return _plan_frontier(asked, limits, args.output, args.title, args.json, args.against)
    picture = picture_format(args.output, args.title, 'the plan')
    begun, search = time.monotonic(), asked
    if shards:
        search = ShardSearch(asked)
        with progress('named schedules', '%', 100) as done:
            search.find_ways(done)
    elif asked.case.cut.number == 0:
        with progress('slices', '%', 100) as done:
            search = asked.in_slices(done)
    found, status = searched(
        'planning',
        'this is the best plan',
        search.plan,
        _interrupted,
    )
    if found.cut_short:
        _say(
            f'the clock ended planning after {time.monotonic() - begun:.0f} s: not all schedules '
            f'of {args.num_ranks} ranks and {args.num_microbatches} microbatches were tried; give '
            'more --seconds, or fewer --microbatches'
        )
    if args.actions and found.gap > _WIDE:
        _say(
            f'gap {found.gap:.0%}: a search of {args.seconds:g} s tries few actions for '
            f'{sum(map(len, found.schedule.passes))} passes; give more --seconds, a larger '
            '--memory-limit, or fewer --microbatches'
        )
    made = found.facts(args.against)
    case = Case(found.schedule, found.costs)
    name, heading = found.as_good_as or 'planned', asked.case.heading()
    if isinstance(found, ShardAnswer):
        name, heading = found.schedule.name, found.request.heading()
    if picture is not None:
        draw(args.output, picture, args.title, {name: case}, heading)
    elif args.output:
        write(args.output, json.dumps(made, indent=1))
    if args.json:
        print_json(made)
        return status
    if isinstance(found, ShardAnswer):
        _print_shards(found, made, args.vocab_parallel == Undecided())
    else:
        _print_plan(found, made)
    if args.output:
        print(f'wrote {args.output}')
    return status


def _interrupted(end: KeyboardInterrupt) -> PlanAnswer | None:
    best = end.best if isinstance(end, PlanningInterrupted) else None
    return best if isinstance(best, PlanAnswer) else None


def _say(text: str) -> None:
    print(f'zbpp: {text}', file=sys.stderr)


def _print_summary(found: PlanAnswer, made: dict) -> None:
    print(headline(found.schedule))
    print_summary(made, found.units)
    print(f'lower bound of the {found.objective} {number(found.lower_bound)}, gap {found.gap:.2%}')


def _print_plan(found: PlanAnswer, made: dict) -> None:
    """Print how good a plan is, and the chunks, slices and techniques that it needs."""
    _print_summary(found, made)
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
    if found.layout is not None:
        print(f'layout {found.layout}')
    sizes = made['slice_sizes']
    if sizes:
        print(f'slices of {", ".join(map(str, sizes))} tokens')
    for technique in found.schedule.graph.techniques:
        if technique.name == SLICED:
            continue
        stages, *where = map(str, technique.arguments)
        print(f'{technique.name}{" to the " if where else ""}{"".join(where)}: stages {stages}')
    if found.selective:
        print("Megatron's selective recomputation: give the job --recompute-granularity selective")
    if found.cached:
        print('planned before with the same inputs; --no-cache plans anew')
    if found.counts:
        _print_counts(found, sizes)


def _print_counts(found: PlanAnswer, sizes: tuple[int, ...]) -> None:
    counts = found.counts
    rows = [(each.slices, each.sizes[-1], each.name, number(each.value)) for each in counts]
    print_table(('slices', 'shortest, tokens', 'best named', found.objective), rows)
    whole = next((each.value for each in counts if each.slices == 1), None)
    if not sizes:
        print('whole sequences: more slices gain less than 1 %')
    elif whole is None:
        print('in slices, as no schedule of whole sequences fits the memory limit')
    else:
        print(f'in slices: {1 - found.value / whole:.1%} less than the best of whole sequences')


def _print_shards(found: ShardAnswer, made: dict, usual: bool) -> None:
    """Print a plan with shards and the ways beside it; `usual`: nobody named a share."""
    _print_summary(found, made)
    print(f'best named schedule: {found.best.case.schedule.name}, {number(found.best.value)}')
    if made['slice_sizes']:
        print(f'slices of {", ".join(map(str, made["slice_sizes"]))} tokens')
    if len(found.ways) > 1:
        rows = [(w.slices, w.layer, w.case.schedule.name, number(w.value)) for w in found.ways]
        print_table(('slices', 'output layer', 'best named', found.objective), rows)
        print_wrapped(found.reason())
    if usual and found.share != IN_FILE:
        print_wrapped(
            f'share of a shard: {found.share:g}, the usual one; of a GPT it is words / (12 x '
            f'hidden size) / layers of a rank / ranks: give {AUTO}:SHARE'
        )


def _plan_frontier(
    asked: PlanRequest,
    limits: Sequence[float],
    output: str | None,
    title: str | None,
    as_json: bool,
    against: str,
) -> int:
    """Plan under each of several memory limits; return as `plan_schedule` does."""
    if output and not output.endswith(('.png', '.svg', '.pdf')):
        raise ValueError(f'--output {output}: let its name end in .png, .svg or .pdf')
    if title is not None and not output:
        raise ValueError(f'--title {title!r} heads a picture: name one by -o')
    if output and not Path(output).absolute().parent.is_dir():
        raise ValueError(f'--output {output}: there is no folder {Path(output).parent}')
    points, status = searched(
        'planning',
        'these are the best plans',
        lambda done: asked.frontier(limits, done),
        lambda e: e.answers if isinstance(e, AnswersInterrupted) else None,
    )
    if output:
        _draw_frontier(asked, points, output, title)
    if as_json:
        made = [{'memory_limit': at, **found.facts(against)} for at, found in points]
        print_json({'frontier': made})
        return status
    rows = [_frontier_row(limit, found, against) for limit, found in points]
    share = 'bubble' if asked.objective == 'window' else 'gain'
    print_table(('limit', asked.objective, share, 'idle', 'gap', 'best named'), rows)
    print_wrapped(f'gain: time saved against {against}; {MEANING}')
    if output:
        print(f'wrote {output}')
    return status


def _draw_frontier(
    asked: PlanRequest, points: Sequence[tuple[float, PlanAnswer]], output: str, title: str | None
) -> None:
    """Draw idle share against memory: of the plans, and of every named schedule that exists."""
    from megatron_zbpp.render.frontier import frontier_png

    in_windows = asked.objective == 'window'

    def idle(case: Case) -> float:
        return case.timeline.bubble if in_windows else case.timeline.idle_all_ranks

    named = {
        label: (max(peak(case.schedule, case.costs)), idle(case))
        for label, case in asked.named_cases()
    }
    plans = {
        (limit, idle(Case(found.schedule, found.costs))): found.as_good_as or ''
        for limit, found in points
    }
    heading = '\n'.join(filter(None, [title, asked.case.heading()]))
    frontier_png(plans, named, output, heading, 'bubble' if in_windows else 'idle GPU time')


def _frontier_row(limit: float, found: PlanAnswer, against: str) -> tuple[str, ...]:
    _, makespan, gain, idle, *window, _ = row(found.facts(against))
    name, value = found.best_named or ('none fits', None)
    best = name if value is None else f'{name} {number(value)}'
    best += ', as good' if found.as_good_as else ''
    own = window if found.objective == 'window' else (makespan, gain)
    return (number(limit), *own, idle, f'{found.gap:.2%}', best)


def add_planning(parser: ArgumentParser) -> None:
    """Add what `plan` takes."""
    arguments.add_shape(parser, required=True, chunks=values.counts)
    arguments.add_costs(parser)
    arguments.add_vocabulary(parser, _share_or_auto)
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
    arguments.add_search(parser, OBJECTIVES, 20.0, more)
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


def _share_or_auto(text: str) -> float | str | Undecided:
    """Return the share of a shard, or where its times are; undecided where that is asked for."""
    if text == AUTO:
        return Undecided()
    word, colon, told = text.partition(':')
    if not colon or word != AUTO:
        told = text
    try:
        share = arguments.shard(told)
    except ArgumentTypeError as error:
        raise ArgumentTypeError(f'{error}, {AUTO}, or {AUTO}:{USUAL_SHARE}') from error
    return share if told == text else Undecided(share)
