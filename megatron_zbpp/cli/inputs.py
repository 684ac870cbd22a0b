"""Inputs of `zbpp`, from its arguments: schedules, checked, with their costs."""

from __future__ import annotations

import warnings
from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from megatron_zbpp.analysis.checker import check
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.cli import slicing
from megatron_zbpp.cli.layer_costs import LayerCosts, require_bytes
from megatron_zbpp.cli.progress import progress
from megatron_zbpp.ir import Placement, Schedule, files, formats, strict_json
from megatron_zbpp.ir.compiled import compiled
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.formats import BYTES, MANY, UNITS, PlanFile, Units
from megatron_zbpp.ir.graph import HOST, TRANSFERS
from megatron_zbpp.ir.plan_costs import in_reverse, joined
from megatron_zbpp.ir.timeline import Timeline
from megatron_zbpp.planner.budget import always
from megatron_zbpp.planner.limits import Bytes
from megatron_zbpp.schedules import build, find, names
from megatron_zbpp.techniques import ASKED, placed_in_turn
from megatron_zbpp.techniques import find as find_technique
from megatron_zbpp.techniques.base import USUAL_RATIO, with_copies
from megatron_zbpp.techniques.composition import BOTH, OUTPUT, VOCABULARY, techniques_of
from megatron_zbpp.techniques.slices.place import in_slices, unsuited
from megatron_zbpp.techniques.updates.versions import updates_of, with_weight_copies
from megatron_zbpp.techniques.vocabulary.place import (
    in_embedding_shards,
    in_shards,
    with_shard_times,
    with_whole_layer,
)

IN_FILE = 'file'  # of --vocab-parallel: times of S and T are in that of --times

# How many chunks a rank may have on each placement that `plan` knows.
PLACEMENTS: dict[str, Callable[[int], bool]] = {
    'loop': lambda chunks: chunks >= 1,
    'v': lambda chunks: chunks == 2,
    'wave': lambda chunks: chunks >= 2,
}


class Times(NamedTuple):
    """`--times` of one full rank."""

    forward: float
    backward: float
    weight: float


TIMES_FILE = 'F,B,W or a file {"F": [...], "B": [...], "W": [...]}, one entry per stage'
NO_TIMES = Times(1.0, 1.0, 1.0)  # --times where it is not given


class StageCosts(NamedTuple):
    """`--times` of a file: costs of each stage in model order, as it says them."""

    text: str
    num_stages: int

    @classmethod
    def read(cls, path: str) -> StageCosts:
        """Return what the file says.

        Raises:
            OSError: it cannot be read.
            ValueError: it has no costs.
        """
        return files.read(
            path, lambda text: cls(text, Costs.from_json(text).num_stages), TIMES_FILE
        )


class PlanCosts(NamedTuple):
    """Carries costs of a plan to named schedules beside it, which join or cut its stages."""

    costs: Costs
    units: Units


AnyTimes = Times | StageCosts | PlanCosts | LayerCosts


class Case(NamedTuple):
    """A checked schedule, what its passes cost, and in which units."""

    schedule: Schedule
    costs: Costs
    units: Units = UNITS

    @property
    def timeline(self) -> Timeline:
        return simulate(self.schedule, self.costs)


def load_case(args: Namespace, name: str | None = None) -> Case:
    """Return the schedule that is asked for (or that of family `name`), checked, with costs."""
    asked = name is None
    name = getattr(args, 'schedule', None) if name is None else name
    case = _from_file(args) if name is None else _generated(args, name)
    require_share(args)
    planned = case.schedule.costs is not None
    if getattr(args, 'vocab_parallel', None) is not None:
        case = _in_shards(args, case)
    copies = bool(compiled(case.schedule.graph).on_copy_engines)
    for technique in placed_in_turn(map(find_technique, ASKED)):
        amount = getattr(args, technique.name, None)
        if amount is not None and technique.request is not None:
            costs = copied(args, case.costs) if technique.moves else case.costs
            case = case._replace(
                schedule=technique.request(case.schedule, amount, costs), costs=costs
            )
    flat = compiled(case.schedule.graph)
    if copies:
        case = case._replace(costs=copied(args, case.costs, flat.between_partners))
    elif not flat.on_copy_engines and asked and getattr(args, 'copy_ratio', None) is not None:
        raise ValueError(
            f'--copy-ratio {args.copy_ratio:g}, but {case.schedule.name} copies nothing: give '
            '--offload, or a schedule that moves activations, such as po-f or bpipe'
        )
    if not planned:  # else they are in the costs of the plan
        case = case._replace(costs=with_weight_copies(case.costs, case.schedule))
    check(case.schedule, memory_limit=args.memory_limit, costs=case.costs)
    return case


def require_share(args: Namespace) -> None:
    """Raise ValueError for layers on all ranks whose cost nobody says, or a file of layers has."""
    if isinstance(args.times, LayerCosts) and getattr(args, 'vocab_parallel', None) is not None:
        raise ValueError(
            '--vocab-parallel does not go with --layers-file: the output layer is one of the '
            'layers; leave it out, or give --times'
        )
    layers = getattr(args, 'vocab_layers', OUTPUT)
    if layers != OUTPUT and args.vocab_parallel is None:
        raise ValueError(
            f'--vocab-layers {layers} needs the cost of the output layer: give --vocab-parallel '
            f'SHARE, or {IN_FILE}'
        )


def _in_shards(args: Namespace, case: Case) -> Case:
    """Return the case with the output layer on all ranks."""
    placement = case.schedule.placement
    costs = _with_shard_times(args, case.costs, placement)
    limit, made = args.memory_limit, case.schedule
    if limit is not None:
        limit = max(0.0, limit - max(costs.static(placement)))
    if VOCABULARY not in techniques_of(made):
        made = in_shards(made, costs, limit, getattr(args, 'on_time', always))
    if args.vocab_layers == BOTH:
        made = in_embedding_shards(made, costs)
    return case._replace(schedule=made, costs=costs)


def _with_whole_layer(args: Namespace, costs: Costs) -> Costs:
    """Return costs whose last stage has the output layer, if its shards are weighed against it."""
    share = getattr(args, 'whole_layer', None)
    if share is None:
        return costs
    if share == IN_FILE:
        return with_whole_layer(costs)
    return with_whole_layer(with_shard_times(costs, Placement.loop(costs.num_stages), share))


def _with_shard_times(args: Namespace, costs: Costs, placement: Placement) -> Costs:
    """Return costs with the times of S and T that are asked for."""
    share = args.vocab_parallel
    return costs if share in (None, IN_FILE) else with_shard_times(costs, placement, share)


def copied(args: Namespace, costs: Costs, between: Iterable[str] = ()) -> Costs:
    """Return `costs` with times of copies, which --copy-ratio tells where they have none.

    Args:
        args: of the command.
        costs: of the stages.
        between: kinds of copies between ranks.

    Raises:
        ValueError: both tell them.
    """
    ratio = getattr(args, 'copy_ratio', None)
    if ratio is not None and TRANSFERS[HOST].out in costs.times:
        raise ValueError(f'--copy-ratio {ratio:g}, but the file of --times has its own: drop one')
    return with_copies(costs, USUAL_RATIO if ratio is None else ratio, between)


def load_cases(args: Namespace) -> tuple[dict[str, Case], dict[str, str]]:
    """Return the cases to compare, and for each family that has none the reason why.

    A plan's file comes first; then `args` get its sizes and costs.

    Raises:
        ValueError: nothing is left to compare, or a name is not known.
    """
    found, skipped = {}, {}
    if args.file is not None:
        case = load_case(args)
        name = Path(args.file).stem
        found[name] = case._replace(schedule=replace(case.schedule, name=name))
        _take_sizes(args, case)
    wanted = args.schedules or names()
    with progress('schedules', 'it', len(wanted)) as done:
        for k, name in enumerate(wanted, 1):
            try:
                found[name] = load_case(args, name)
            except ValueError as error:
                find(name)  # one that is misspelt is no matter of sizes
                skipped[name] = str(error).partition('\n')[0]
            done(k / len(wanted))
    if not found:
        raise ValueError(f'no schedule fits: {next(iter(skipped.values()))}')
    return found, skipped


def _take_sizes(args: Namespace, case: Case) -> None:
    """Write the sizes of a file into the arguments, and the costs of a plan."""
    schedule, updates = case.schedule, updates_of(case.schedule.graph)
    args.pp = schedule.num_ranks
    args.microbatches = updates.every if updates else schedule.num_microbatches
    if args.slices is None and schedule.graph.num_slices > 1:
        args.slices = schedule.graph.num_slices
    if schedule.costs is not None and args.times is NO_TIMES:
        down = schedule.placement.rank_of(0, 0) == 0
        costs = case.costs if down else in_reverse(case.costs, schedule.num_ranks)
        args.times, args.comm, args.together = PlanCosts(costs, case.units), None, None


def _generated(args: Namespace, name: str) -> Case:
    family, p, m = find(name), args.pp, args.microbatches
    if p is None or m is None:
        missing = '--pp' if p is None else '--microbatches'
        raise ValueError(f'--schedule {name} needs {missing}: give a number from 1 up')
    chunks = chunks_of(args.times, p, args.vpp, family.default_chunks)
    slices = slicing.number(args) or family.default_slices
    require_size(p * m * chunks * slices)
    # a stage's share does not depend on its place
    costs = _with_whole_layer(args, costs_of(args, Placement.loop(p, chunks)))
    limit = args.memory_limit if 'memory_limit' in family.options else None
    if limit is not None:
        limit = max(0.0, limit - max(costs.static(Placement.loop(p, chunks))))
    asked = getattr(args, 'together', None) is not None
    if asked and getattr(args, 'schedule', None) == name and 'together' not in family.options:
        raise ValueError(
            f'--together {args.together:g}, but {name} has no forwards and backwards that run as '
            'one: take dualpipe-v, or leave it out'
        )
    together = 'together' in family.options and (asked or costs.together != 1 or costs.pairs)
    planned = copied(args, costs) if family.moves else costs  # its copies have their slots
    if family.in_shards and hasattr(args, 'vocab_parallel'):
        planned = _with_shard_times(args, planned, Placement.loop(p, chunks))
    schedule = in_slices(
        name,
        p,
        m,
        slices,
        num_chunks=chunks,
        costs=planned,
        memory_limit=limit,
        together=bool(together),
    )
    if slices > 1 and family.default_slices == 1 and limit is None:
        why = unsuited(schedule, build(name, p, m, num_chunks=chunks))
        if why is not None:
            warnings.warn(why, stacklevel=2)
    return Case(*slicing.in_their_sizes(args, schedule, costs), units=units_of(args))


def _from_file(args: Namespace) -> Case:
    plan = formats.load_plan(args.file)
    schedule = plan.schedule
    updates = updates_of(schedule.graph)
    held = {
        '--pp': (args.pp, schedule.num_ranks),
        '--microbatches': (
            args.microbatches,
            updates.every if updates else schedule.num_microbatches,
        ),
        '--vpp': (args.vpp, schedule.placement.num_chunks),
        '--slices': (slicing.number(args), schedule.graph.num_slices),
    }
    for flag, (asked, found) in held.items():
        if asked not in (None, found):
            raise ValueError(f'{flag} {asked}, but {args.file} has {found}: leave {flag} out')
    if schedule.costs is not None and args.times is NO_TIMES:
        return Case(schedule, _planned_costs(args, plan, schedule.costs), plan.units)
    if plan.lacks and args.times is NO_TIMES:
        warnings.warn(f'{args.file}: {plan.lacks}', stacklevel=2)
    costs, schedule = costs_of(args, schedule.placement), replace(schedule, costs=None)
    return Case(*slicing.in_their_sizes(args, schedule, costs))


def _planned_costs(args: Namespace, plan: PlanFile, costs: Costs) -> Costs:
    if slicing.attention(args).share:
        raise ValueError(
            f'--attention, but the costs of {args.file} have it: leave it out, or give --times'
        )
    if isinstance(args.memory_limit, Bytes) and plan.units.memory != BYTES:
        raise ValueError(
            f'a memory limit in bytes, but {args.file} counts {plan.units.memory}: give a number '
            'of those'
        )
    return _with_pairs(args, _with_comm(args, costs, args.file), args.file)


def heading(args: Namespace, case: Case | None = None) -> str:
    """Return what all schedules of a picture have in common: sizes and times.

    Args:
        args: of the command.
        case: that is drawn alone; None: there are several.
    """
    sizes = {'p': args.pp, 'm': args.microbatches, 'n': slicing.number(args)}
    parts = [f'{name} = {size}' for name, size in sizes.items() if size is not None]
    if isinstance(args.times, LayerCosts):
        parts.append('layers from a file')
    elif isinstance(args.times, StageCosts):
        parts.append('times of each stage from a file')
    elif isinstance(args.times, PlanCosts) or (case and case.schedule.costs is not None):
        parts.append('times of the plan')
    else:
        parts.append('F, B, W = ' + ', '.join(f'{time:g}' for time in args.times))
    if getattr(args, 'vocab_parallel', None) not in (None, IN_FILE):
        parts.append(f'shards {args.vocab_parallel:g}')
    if getattr(args, 'copy_ratio', None) is not None:
        parts.append(f'copies k = {args.copy_ratio:g}')
    if args.comm:
        parts.append(f'messages {args.comm:g}')
    return f'{", ".join(parts)}; simulated'


def stages_of(times: AnyTimes) -> int | None:
    """Return of how many stages they are; None: of one full rank."""
    return times.num_stages if isinstance(times, StageCosts) else None


def chunks_of(times: AnyTimes, p: int, asked: int | None, default: int) -> int:
    """Return v: what is asked for, or follows from the times of all stages, or the default."""
    stages = stages_of(times)
    if stages is None:
        return asked or default
    if stages % p or asked not in (None, stages // p):
        wanted = f'{p} ranks' + (f' of {asked} chunks' if asked else '')
        raise ValueError(
            f'--times has {stages} stages, which do not make {wanted}: give pp * vpp entries each'
        )
    return stages // p


def costs_of(args: Namespace, placement: Placement, selective: bool = False) -> Costs:
    """Return the costs that are asked for; those with selective recomputation, if `selective`.

    Raises:
        ValueError: they do not fit the placement, one is given twice, or say nothing of bytes
            though a limit does.
    """
    if isinstance(args.times, LayerCosts):
        require_bytes(args.times.layers, args.times.file, _limits(args))
    elif any(isinstance(limit, Bytes) for limit in _limits(args)):
        _require_bytes(args.times)
    return _with_pairs(args, _of_passes(args, placement, selective), 'the file of --times')


def _with_pairs(args: Namespace, costs: Costs, source: str) -> Costs:
    """Return `costs` with the times of passes that run as one, where they have none."""
    together = getattr(args, 'together', None)
    if together is None:
        return costs
    if costs.together != 1 or costs.pairs:
        raise ValueError(f'--together {together:g}, but {source} has {costs.together:g}: drop one')
    return replace(costs, together=float(together), pairs=together.pairs)


def _with_comm(args: Namespace, costs: Costs, source: str) -> Costs:
    """Return `costs` with the latency of messages, where they have none."""
    if args.comm is None:
        return costs
    if costs.comm:
        raise ValueError(f'--comm {args.comm}, but {source} has {costs.comm}: drop one')
    return replace(costs, comm=args.comm)


def units_of(args: Namespace) -> Units:
    """Return the units of a plan: those of --times, which are bytes where they are as many."""
    if isinstance(args.times, PlanCosts | LayerCosts):
        return args.times.units
    in_bytes = any(isinstance(limit, Bytes) for limit in _limits(args))
    if isinstance(args.times, StageCosts):
        in_bytes |= max(Costs.from_json(args.times.text).amounts['activation']) >= MANY
    return UNITS._replace(memory=BYTES) if in_bytes else UNITS


def _limits(args: Namespace) -> list[float | None]:
    return [args.memory_limit, *(getattr(args, 'frontier', None) or ())]


def _require_bytes(times: AnyTimes) -> None:
    """Raise ValueError unless costs say how many bytes a stage holds."""
    if isinstance(times, PlanCosts) and times.units.memory == BYTES:
        return
    told: Any = strict_json.loads(times.text) if isinstance(times, StageCosts) else {}
    told = {**told, **told.get('amounts', {})}
    missing = [name for name in ('activation', 'parameters') if name not in told]
    if missing:
        raise ValueError(
            f'a memory limit in bytes, but --times says nothing of {" and ".join(missing)}: give a '
            'file that has them by stage, in bytes (of parameters with gradients and optimizer), '
            'or a limit in activations'
        )


def _of_passes(args: Namespace, placement: Placement, selective: bool) -> Costs:
    if isinstance(args.times, PlanCosts):
        own, stages = args.times.costs, placement.num_stages
        if (alike := joined(own, stages)) is None:
            raise ValueError(f'{own.num_stages} stages of the plan do not make {stages}')
        return alike
    if isinstance(args.times, LayerCosts):
        return _with_comm(args, args.times.costs(placement), args.times.file)
    if not isinstance(args.times, StageCosts):
        return Costs.uniform(placement, *args.times, comm=args.comm or 0.0)
    if args.times.num_stages != placement.num_stages:
        raise ValueError(
            f'--times has {args.times.num_stages} stages and the schedule {placement.num_stages}: '
            'give one entry per stage, in model order'
        )
    shares = Costs.uniform(placement).amounts['activation']
    costs = Costs.from_json(args.times.text, selective, shares)
    costs.require(placement)
    return _with_comm(args, costs, 'the file of --times')


def require_size(chunk_microbatches: int) -> None:
    if 3 * chunk_microbatches > formats.MOST_PASSES:
        raise ValueError(
            f'--pp times --vpp times --microbatches is {chunk_microbatches}: give less than '
            f'{formats.MOST_PASSES // 3} in all'
        )
