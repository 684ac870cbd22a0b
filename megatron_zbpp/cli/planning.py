"""`zbpp plan`: one plan, or one for each of several memory limits."""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.cli import arguments, printing
from megatron_zbpp.cli.arguments import add_options, case_request
from megatron_zbpp.cli.printing import print_json, print_table, print_wrapped
from megatron_zbpp.ir.costs_file import SELECTIVE
from megatron_zbpp.ir.timeline import MEANING
from megatron_zbpp.mcore.settings import meaning
from megatron_zbpp.planner.cache import default_folder
from megatron_zbpp.planner.cases import IN_FILE, Case, Undecided
from megatron_zbpp.planner.plan_requests import PLACEMENTS, PlanAnswer, PlanRequest
from megatron_zbpp.planner.problem import OBJECTIVES
from megatron_zbpp.planner.shard_plans import ShardAnswer, ShardSearch
from megatron_zbpp.render.scene import number
from megatron_zbpp.techniques import NAMES, find
from megatron_zbpp.techniques.composition import SLICED
from megatron_zbpp.techniques.slices.graph import AUTO, LEAST
from megatron_zbpp.techniques.vocabulary.graph import USUAL_SHARE

_WIDE = 0.1  # gap to the lower bound above which a longer search is proposed


def plan_schedule(
    as_json: bool,
    output: str | None,
    title: str | None,
    against: str,
    frontier: list[float] | None,
    **options: Any,
) -> int:
    """Return 0, or 130 where Ctrl-C ended the search; prints and writes the best plan."""
    folder = Path(options['cache']) if options['cache'] else default_folder()
    case = case_request(options, num_chunks=None, limits=tuple(frontier or ()))
    asked = PlanRequest.of(case, {**options, 'folder': None if options['no_cache'] else folder})
    asked.case.require_share()
    shards = asked.case.vocab_parallel is not None
    if frontier and not shards:
        return _plan_frontier(asked, frontier, output, title, as_json, against)
    picture = printing.picture_format(output, title, 'the plan')
    begun, search = time.monotonic(), asked
    if shards:
        search = ShardSearch(asked)
        with printing.progress('named schedules', '%', 100) as done:
            search.find_ways(done)
    elif asked.case.cut.number == 0:
        with printing.progress('slices', '%', 100) as done:
            search = asked.in_slices(done)
    found, status = printing.searched('planning', 'this is the best plan', search.plan)
    assert isinstance(found, PlanAnswer)
    if found.cut_short:
        printing.say(
            f'the clock ended planning after {time.monotonic() - begun:.0f} s: not all schedules '
            f'of {asked.num_ranks} ranks and {asked.num_microbatches} microbatches were tried; '
            'give more --seconds, or fewer --microbatches'
        )
    if asked.actions and found.gap > _WIDE:
        printing.say(
            f'gap {found.gap:.0%}: a search of {asked.seconds:g} s tries few actions for '
            f'{sum(map(len, found.schedule.passes))} passes; give more --seconds, a larger '
            '--memory-limit, or fewer --microbatches'
        )
    made = found.facts(against)
    name, heading = found.as_good_as or 'planned', asked.case.heading()
    if isinstance(found, ShardAnswer):
        name, heading = found.schedule.name, found.request.heading()
    if output and picture is not None:
        printing.draw(output, picture, title, {name: Case(found.schedule, found.costs)}, heading)
    elif output:
        printing.write(output, json.dumps(made, indent=1))
    if as_json:
        print_json(made)
        return status
    print(printing.headline(found.schedule))
    printing.print_summary(made, found.units)
    print(f'lower bound of the {found.objective} {number(found.lower_bound)}, gap {found.gap:.2%}')
    if isinstance(found, ShardAnswer):
        _print_shards(found, made, asked.case.vocab_parallel == Undecided())
    else:
        _print_plan(found, made)
    if output:
        print(f'wrote {output}')
    return status


def _print_plan(found: PlanAnswer, made: dict) -> None:
    """Print the best named schedule, and the chunks, slices and techniques that a plan needs."""
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
    if not found.counts:
        return
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
    """Print the ways beside a plan with shards; `usual`: nobody named a share."""
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
    points, status = printing.searched(
        'planning', 'these are the best plans', lambda done: asked.frontier(limits, done)
    )
    if output:
        _draw_frontier(asked, points, output, title)
    if as_json:
        made = [{'memory_limit': at, **found.facts(against)} for at, found in points]
        print_json({'frontier': made})
        return status
    rows: list[tuple[str, ...]] = []
    for limit, found in points:
        _, makespan, gain, idle, *window, _ = printing.row(found.facts(against))
        name, value = found.best_named or ('none fits', None)
        best = name if value is None else f'{name} {number(value)}'
        best += ', as good' if found.as_good_as else ''
        own = window if found.objective == 'window' else (makespan, gain)
        rows.append((number(limit), *own, idle, f'{found.gap:.2%}', best))
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
    from megatron_zbpp.render.png import frontier_png

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


def add_planning(parser: ArgumentParser) -> None:
    """Add the arguments of `zbpp plan`."""
    add_options(
        parser,
        """
        --pp P  ranks! as num_ranks  ranks
        --microbatches M  count! as num_microbatches  microbatches
        """,
    )
    arguments.add_slices(parser, auto=True)
    chunks = f'{meaning("num_chunks")}; default 1,2,4'
    add_options(parser, f'--vpp V,...  counts as num_chunks  {chunks}')
    arguments.add_costs(parser)
    arguments.add_vocabulary(parser, _share_or_auto)
    add_options(
        parser,
        arguments.AGAINST,
        f"""
        --placements (--placement) NAME,...  placements = {','.join(PLACEMENTS)}  that may be used,
            all of one way: loop, v, wave; default all
        """,
        placements=_some(*PLACEMENTS),
    )
    more = '; with --frontier a picture of it beside the named schedules (.png, .svg, .pdf)'
    arguments.add_search(parser, OBJECTIVES, 20.0, more)
    actions = ', '.join(f'{name} ({find(name).words})' for name in NAMES)
    parser.set_defaults(actions=())
    add_options(
        parser,
        f"""
        --frontier A,...  memories  plan under each of these memory limits: less bubble for more
            memory
        --actions NAME,...  actions  what may be done with activations between F and B: {actions},
            {SELECTIVE} (Megatron's recomputation, of the whole model); default: they are kept
        --least-slice TOKENS  count = {LEAST}  of --slices auto: tokens of a slice, as a mean of
            all; default {LEAST}
        """,
        arguments.COPY_RATIO,
        '--num-layers (--layers) N  count  of the model: no more stages than that',
        actions=lambda text: tuple(sorted({*_some(*NAMES, SELECTIVE)(text)})),
    )
    add_options(
        parser.add_mutually_exclusive_group(),
        """
        --cache FOLDER  path  of plans; default ~/.cache/megatron_zbpp/plans
        --no-cache  switch  plan anew and keep nothing
        """,
    )


def _some(*known: str) -> Callable[[str], list[str]]:
    cure = f'choose of {", ".join(known)}'
    return arguments.several(arguments.checked(str, known.__contains__, cure))


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
