"""Plan whether the output layer is on all ranks or whole: `zbpp plan --vocab-parallel`."""

from __future__ import annotations

import json
import time
import warnings
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from math import inf
from typing import NamedTuple

from megatron_zbpp.cli import arguments, slicing
from megatron_zbpp.cli.candidates import allowed_chunks
from megatron_zbpp.cli.inputs import IN_FILE, Case, costs_of, load_case, units_of
from megatron_zbpp.cli.printing import (
    facts,
    headline,
    print_json,
    print_summary,
    print_wrapped,
)
from megatron_zbpp.cli.progress import progress
from megatron_zbpp.cli.searching import searched, tell_cut_short
from megatron_zbpp.cli.tables import print_table
from megatron_zbpp.ir import Placement
from megatron_zbpp.ir.formats import memory_of_plan
from megatron_zbpp.planner.budget import Budget, always
from megatron_zbpp.planner.plans import Plan, PlanningInterrupted, is_small, plan
from megatron_zbpp.planner.slice_counts import doubled
from megatron_zbpp.render.scene import number
from megatron_zbpp.schedules import find
from megatron_zbpp.schedules.registry import Sizes
from megatron_zbpp.techniques.composition import OUTPUT
from megatron_zbpp.techniques.slices.balance import balanced
from megatron_zbpp.techniques.slices.sizes import AUTO, sizes_of
from megatron_zbpp.techniques.vocabulary.graph import USUAL_SHARE, S, T
from megatron_zbpp.techniques.vocabulary.place import HOSTS, hosts_of

_HARDLY = 0.01  # of a value: for less neither slices nor shards are worth their passes
_WAYS = 0.5  # share of the time for named schedules, of which each way has an equal part
_TRIED = 5  # times that a pass of a named schedule is looked at, of one that a search replays
_ON_ALL, _WHOLE = 'on all ranks', 'whole'


class Undecided(NamedTuple):
    """`--vocab-parallel auto` or `auto:SHARE`: shards only if they pay.

    Attributes:
        share: forward of a shard over that of a rank's layers, or where its times are; None: there
            if the costs have them, else the usual one.
    """

    share: float | str | None

    def __str__(self) -> str:
        return AUTO if self.share is None else f'{AUTO}:{self.share}'


class Way(NamedTuple):
    """The best named schedule of some slices, and with shards or without.

    Attributes:
        slices: how many.
        layer: where the output layer is.
        value: makespan or window.
        case: the schedule.
        others: further schedules of the same.
    """

    slices: int
    layer: str
    value: float
    case: Case
    others: tuple[Case, ...]


def share_or_auto(text: str) -> float | str | Undecided:
    """Return the share of a shard, or where its times are; undecided where that is asked for."""
    if text == AUTO:
        return Undecided(None)
    word, colon, told = text.partition(':')
    if not colon or word != AUTO:
        told = text
    try:
        share = arguments.shard(told)
    except ArgumentTypeError as error:
        raise ArgumentTypeError(f'{error}, {AUTO}, or {AUTO}:{USUAL_SHARE}') from error
    return share if told == text else Undecided(share)


def plan_in_shards(args: Namespace) -> tuple[Case, dict, int]:
    """Return a plan, what is said of it, and the exit status; prints it.

    Raises:
        ValueError: nothing fits, or what else is asked for is planned without shards only.
    """
    for flag, value in (('--frontier', args.frontier), ('--actions', args.actions)):
        if value:
            raise ValueError(f'{flag} with --vocab-parallel is not planned yet: leave one out')
    begun, asked = time.monotonic(), args.vocab_parallel
    args.vocab_parallel = _with_share(args)
    with progress('named schedules', '%', 100) as done:
        budget = Budget(args.seconds * _WAYS, done)
        ways = _ways(args, budget)
    best = choose(ways)
    found, status = searched(
        'planning',
        'this is the best plan',
        lambda done: _searched(args, best, begun, done),
        lambda e: e.best if isinstance(e, PlanningInterrupted) else None,
    )
    repeats = found.repeats and not budget.overran
    if not (repeats or _is_small(args)):
        tell_cut_short(args, begun)
    case, share = Case(found.schedule, found.costs), _share(args)
    args.slices = found.schedule.graph.num_slices  # what it has come to, for headings
    args.vocab_parallel = share if best.layer == _ON_ALL else None
    made = {
        **facts(case, case.timeline, args.against),
        'objective': args.objective,
        'lower_bound': found.lower_bound,
        'gap': found.gap,
        'best_named': {'name': best.case.schedule.name, args.objective: best.value},
        'repeats': repeats,
        'share': share,
        'slice_sizes': sizes_of(found.schedule.graph),
        'ways': [
            {
                'slices': each.slices,
                'output_layer': each.layer,
                'name': each.case.schedule.name,
                args.objective: each.value,
            }
            for each in ways
        ],
        'schedule': json.loads(found.schedule.to_json()),
        **memory_of_plan(found.costs, units_of(args)),
    }
    print_json(made) if args.json else _print(args, found, made, ways, best)
    if asked == Undecided(None) and share != IN_FILE and not args.json:
        print_wrapped(
            f'share of a shard: {share:g}, the usual one; of a GPT it is words / (12 x hidden '
            f'size) / layers of a rank / ranks: give {AUTO}:SHARE'
        )
    return case, made, status


def _with_share(args: Namespace) -> float | str | Undecided:
    if args.vocab_parallel != Undecided(None):
        return args.vocab_parallel
    costs = costs_of(args, Placement.loop(args.pp, allowed_chunks(args)[0]))
    return Undecided(IN_FILE if {S, T} & costs.times.keys() else USUAL_SHARE)


def _share(args: Namespace) -> float | str:
    """Return the share of a shard, or where its times are."""
    return getattr(args.vocab_parallel, 'share', args.vocab_parallel)


def _ways(args: Namespace, budget: Budget) -> list[Way]:
    """Return the best named schedule of each number of slices, with shards and without."""
    found, why, asked = list[Way](), '', args.vocab_parallel
    kinds: dict[str, dict] = {_ON_ALL: {'vocab_parallel': _share(args)}}
    if isinstance(asked, Undecided):
        kinds[_WHOLE] = {
            'vocab_parallel': None,
            'vocab_layers': OUTPUT,
            'whole_layer': _share(args),
        }
    tries = list(product(_sizes(args), kinds.items()))
    for at, (sizes, (layer, more)) in enumerate(tries):
        turn = always if _is_small(args) else budget.turn(1 / (len(tries) - at))
        given = vars(args) | more | ({} if sizes is None else {'slices': sizes})
        cases, problem = _cases(Namespace(**given, on_time=turn), needed=not found)
        why = problem or why
        if cases:
            value = _length(args, cases[0])
            slices = cases[0].schedule.graph.num_slices
            found.append(Way(slices, layer, value, cases[0], tuple(cases[1:])))
    if not found:
        raise ValueError(f'none of {", ".join(HOSTS)}: {why or "--vpp: give 1 or 2"}')
    return found


def _cases(args: Namespace, needed: bool) -> tuple[list[Case], str]:
    """Return named schedules, the shortest first, and why the last one that is not cannot be."""
    cases, why = list[Case](), ''
    for name, chunks in sorted(hosts_of(allowed_chunks(args)), key=partial(_turn, args)):
        if (cases or not needed) and not args.on_time():
            break
        try:
            with warnings.catch_warnings():
                warnings.simplefilter('ignore')  # of what slices do not suit
                cases.append(load_case(Namespace(**vars(args) | {'vpp': chunks}), name))
        except ValueError as error:
            why = str(error).partition('\n')[0]
    return sorted(cases, key=partial(_length, args)), why


def _turn(args: Namespace, host: tuple[str, int]) -> float:
    """Return the sort key of hosts, where there may be no time for all: the smallest bubble."""
    name, chunks = host
    bubble = find(name).bubble
    if args.on_time is always:
        return 0.0
    return bubble(Sizes(args.pp, args.microbatches, chunks)) if bubble else inf


def _is_small(args: Namespace) -> bool:
    slices = slicing.number(args)
    if slices == 0:  # those that are tried
        slices = (args.seq_length or 1) // args.least_slice
    passes = args.pp * args.microbatches * max(allowed_chunks(args)) * 5
    return is_small(_TRIED * passes * max(1, slices or 1))


def _sizes(args: Namespace) -> Iterator[int | tuple[int, ...] | None]:
    if slicing.number(args) != 0:
        yield None
        return
    length = slicing.length(args, '--slices auto')
    first = costs_of(args, Placement.loop(args.pp, allowed_chunks(args)[0]))
    cut = partial(balanced, length=length, attention=slicing.attention(args), costs=first)
    units = args.microbatches * args.pp * max(allowed_chunks(args)) * 5
    for sizes in doubled(cut, length, args.least_slice, units):
        yield sizes if len(sizes) > 1 else 1


def choose(ways: list[Way]) -> Way:
    """Return the way with the fewest slices, whole if it may be, that is hardly longer than any."""
    shortest = min(each.value for each in ways)
    enough = [each for each in ways if each.value <= shortest * (1 + _HARDLY)]
    return min(enough, key=lambda each: (each.slices, each.layer == _ON_ALL, each.value))


def _length(args: Namespace, case: Case) -> float:
    timeline = case.timeline
    return max(timeline.windows) if args.objective == 'window' else timeline.makespan


def _searched(args: Namespace, best: Way, begun: float, progress: Callable[[float], None]) -> Plan:
    """Return the best order that a search finds on the placement of the best named schedule."""
    schedule, costs, _ = best.case
    same = [each.schedule for each in best.others if each.schedule.graph == schedule.graph]
    return plan(
        [(schedule.placement, costs)],
        args.microbatches,
        memory_limit=args.memory_limit,
        objective=args.objective,
        seconds=args.seconds,
        spent=0.0 if _is_small(args) else time.monotonic() - begun,
        seed=args.seed,
        starts=[schedule, *(each for each in same if each.placement == schedule.placement)],
        graph=(lambda _: schedule.graph) if schedule.graph.techniques else None,
        progress=progress,
    )


def _print(args: Namespace, found: Plan, made: dict, ways: list[Way], best: Way) -> None:
    print(headline(found.schedule))
    print_summary(made)
    print(f'lower bound of the {found.objective} {number(found.lower_bound)}, gap {found.gap:.2%}')
    print(f'best named schedule: {best.case.schedule.name}, {number(best.value)}')
    if made['slice_sizes']:
        print(f'slices of {", ".join(map(str, made["slice_sizes"]))} tokens')
    if len(ways) > 1:
        rows = [(w.slices, w.layer, w.case.schedule.name, number(w.value)) for w in ways]
        print_table(('slices', 'output layer', 'best named', found.objective), rows)
        print_wrapped(_why(ways, best, found.value))


def _why(ways: list[Way], best: Way, value: float) -> str:
    first = min(ways, key=lambda each: (each.slices, each.layer == _ON_ALL))
    if (best.slices, best.layer) == (first.slices, first.layer):
        said = f'output layer {best.layer}: slices or shards gain less than {_HARDLY:.0%}'
    else:
        cut = f'in {best.slices} slices, ' if best.slices > 1 else ''
        said = f'{cut}output layer {best.layer}: {1 - value / first.value:.1%} less than '
        said += f'{first.layer}' + (', and whole sequences' if first.slices == 1 else '')
    whole = next((each for each in ways if each.layer == _WHOLE), None)
    if whole is None:
        return said
    schedule, timeline = whole.case.schedule, whole.case.timeline
    busy = [timeline.busy(rank) for rank in range(schedule.num_ranks)]
    more = max(busy) * len(busy) / sum(busy)
    return f'{said}; a whole layer keeps its rank busy {more:.2f} times as long as the mean'
