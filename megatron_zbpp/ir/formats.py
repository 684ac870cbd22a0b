"""Schedules from and to files: our JSON, and the CSV of torch.distributed.pipelining.

The CSV has a row for each rank and a cell for each pass, `{stage}{kind}{microbatch}`; an empty cell
is a bubble. It comes in two dialects:

    ours    torch since 2.6 (`new`)    before (`old`)
    F       F                          F
    B       I                          B
    W       W                          W
    BW      B                          BW

>>> from megatron_zbpp.ir import Placement
>>> text = '0F0,,0I0,0W0\\n1F0,1B0'
>>> schedule = from_torch_csv(text)
>>> ' '.join(map(str, schedule.passes[1])), schedule.placement == Placement.loop(2)
('1F0 1BW0', True)
>>> to_torch_csv(schedule, 'old')
'0F0,0B0,0W0\\n1F0,1BW0\\n'
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from megatron_zbpp.ir import BW, B, F, Pass, Placement, Schedule, Together, W, files, strict_json
from megatron_zbpp.ir.costs import Costs

_KINDS = {
    'new': {'F': F, 'I': B, 'W': W, 'B': BW},
    'old': {'F': F, 'B': B, 'W': W, 'BW': BW},
}
DIALECTS = tuple(_KINDS)

# What `zbpp plan`, `zbpp show` and measurements have beside the schedule, for people and scripts.
PLAN_FIELDS = (
    *'name ranks stages microbatches slices slice_sizes slice_counts share ways copies'.split(),
    *'placement passes makespan window bubble idle_busiest_rank bubble_rate_makespan'.split(),
    *'bubble_rate_window idle_all_ranks idle_parts against gain peak_activations'.split(),
    *'objective lower_bound gap best_named repeats cached selective schedule costs'.split(),
    *'units timeline spans'.split(),
    *'cuts device_order layout layers devices'.split(),  # of `zbpp partition`
)

_ACTION = re.compile(r'(\d+)(F|I|BW|B|W)(\d+)', re.ASCII)
# What torch adds when it lowers a schedule, in its format compute_comms.
_LOWERED = re.compile(r'\d+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d*', re.ASCII)
_OVERLAP = re.compile(r'\((.*)\)OVERLAP_F_B')

# Of a schedule in a file: to prove one takes about half a kilobyte a pass.
MOST_PASSES = 4_000_000
_SHORTEST = len('0F0 ')
_ANY_PASS = re.compile(r'[0-9][A-Z]+[0-9]', re.ASCII)

_Action = tuple[int, str, int]  # stage, kind in the file's dialect, microbatch


class Units(NamedTuple):
    """Units of the numbers of costs."""

    time: str = 'units of --times'
    memory: str = 'activations of one microbatch on a full rank'

    def scaled(self, amount: float) -> float:
        """Return an amount of memory as people read it: in GiB where it is bytes."""
        return amount / 2**30 if self.memory == BYTES else amount


BYTES = 'bytes'  # as a unit of memory
MANY = 2**20  # what holds as much is in bytes, not in activations
UNITS = Units()


@dataclass(frozen=True)
class PlanFile:
    """The content of a schedule's or a plan's file, for the training that runs it."""

    schedule: Schedule  # passes of each rank, with the costs for which it was planned
    # of the layers, as text such as Ett|ttL, from `zbpp partition`; None: it has none
    layout: str | None = None
    selective: bool = False  # whether it is for a run with Megatron's selective recomputation
    units: Units = UNITS  # of the costs
    lacks: str = ''  # note to the user, where a plan of an older release has no costs; else empty
    # all that the plan's file has, as JSON; empty: it is the file of a schedule
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])


def load(path: str | Path) -> Schedule:
    """Return the schedule in a file: see `load_plan`."""
    return load_plan(path).schedule


def load_plan(path: str | Path) -> PlanFile:
    """Read a schedule from a file: our JSON, a plan's, or torch's CSV, told by its contents.

    It is read, not checked: see `analysis.checker.check`.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds no schedule, or another field makes no sense; the message names it.
    """

    def parse(text: str) -> PlanFile:
        _require_few_passes(text)
        if text.lstrip().startswith(('{', '[')):  # no pass of a CSV begins so
            return _from_json(text)
        schedule = from_torch_csv(text, strict_json.printable(Path(path).stem))
        return PlanFile(in_microbatch_order(schedule))

    return files.read(path, parse, 'a schedule or a plan, as JSON or CSV')


def _require_few_passes(text: str) -> None:
    """Raise ValueError for a text with more passes than can be checked."""
    if len(text) > _SHORTEST * MOST_PASSES:
        passes = sum(1 for _ in _ANY_PASS.finditer(text))
        if passes > MOST_PASSES:
            raise ValueError(
                f'{passes} passes: at most {MOST_PASSES} can be checked; give fewer microbatches'
            )


def from_json(text: str) -> Schedule:
    """Return the schedule in our JSON, or in the `schedule` of what `zbpp plan --json` prints."""
    return _from_json(text).schedule


def _from_json(text: str) -> PlanFile:
    data: Any = strict_json.loads(text)
    if not (strict_json.is_object(data) and 'schedule' in data):
        return PlanFile(Schedule.from_object(data))
    strict_json.require(data, {}, dict.fromkeys(PLAN_FIELDS, strict_json.anything))
    layout = data.get('layout')
    if layout is not None and strict_json.text(layout) is not None:
        raise ValueError(f'layout {layout!r} is not a text such as Ett|ttL')
    schedule, costs = Schedule.from_object(data['schedule']), data.get('costs')
    lacks = ''
    if costs is not None:
        schedule = replace(schedule, costs=_costs(costs, schedule.placement))
    elif 'makespan' in data:
        lacks = (
            'a plan of an older release, which lacks the costs that it was made for: here F = B '
            '= W on equal stages; plan anew, or give zbpp --times'
        )
    units = _units(data['units']) if 'units' in data else UNITS
    return PlanFile(schedule, layout, data.get('selective') is True, units, lacks, data)


def _costs(data: Any, placement: Placement) -> Costs:
    try:
        costs = Costs.from_fields(data)
        costs.require(placement)
    except ValueError as error:
        raise ValueError(f'costs: {error}') from error
    return costs


def _units(data: Any) -> Units:
    try:
        strict_json.require(data, {}, dict.fromkeys(Units._fields, strict_json.text))
    except ValueError as error:
        raise ValueError(f'units: {error}') from error
    return Units(**data)


def memory_of_plan(costs: Costs, units: Units) -> dict[str, Any]:
    """Return costs and their units, which a plan's file has beside its schedule."""
    from megatron_zbpp.ir import plan_costs  # which no run without a file needs

    return {'costs': plan_costs.written(costs), 'units': units._asdict()}


def to_torch_csv(schedule: Schedule, dialect: str = 'new') -> str:
    """Return the CSV that torch's `_PipelineScheduleRuntime._load_csv` reads (compute_only).

    Raises:
        ValueError: the schedule has passes that torch has no name for, or two routes.
    """
    if not schedule.placement.is_one_way:
        raise ValueError(
            f'{schedule.name} cannot be written as the CSV of torch, which has one rank for each '
            'stage: write JSON'
        )
    names = {ours: theirs for theirs, ours in _kinds(dialect).items()}

    def cell(entry: Pass | Together) -> str:
        if isinstance(entry, Together):
            return f'({";".join(map(cell, entry.passes))})OVERLAP_F_B'
        if entry.kind not in names or entry.slice:
            raise ValueError(f'{entry}: the CSV of torch has F, B and W of whole sequences only')
        return f'{entry.stage}{names[entry.kind]}{entry.microbatch}'

    rows = (schedule.order(rank) for rank in range(schedule.num_ranks))
    return ''.join(','.join(map(cell, row)) + '\n' for row in rows)


def from_torch_csv(text: str, name: str = 'torch-csv', dialect: str | None = None) -> Schedule:
    """Return the schedule in torch's CSV. Rows say which rank holds which stage.

    Sends, receives and other lowered actions (format compute_comms) are dropped with a warning:
    our own lowering makes them anew. The passes of an `OVERLAP_F_B` run together.

    Args:
        text: of the file.
        name: for the schedule; the format has none.
        dialect: `new` or `old`; by default told by the kinds that occur.

    Raises:
        ValueError: a cell is not an action, a row has none, or stages are not one rank's each.
    """
    rows = [list(_cells(row, rank)) for rank, row in enumerate(text.splitlines())]
    while rows and not rows[-1]:
        rows.pop()
    kept = [[cell for cell in row if cell] for row in rows]
    dropped = sum(map(len, rows)) - sum(map(len, kept))
    if dropped:
        warnings.warn(f'{name}: dropped {dropped} sends, receives and the like', stacklevel=2)
    if not any(kept):
        raise ValueError('not a schedule: neither our JSON nor a CSV with passes such as 0F0')
    found = {kind for row in kept for cell in row for _, kind, _ in cell}
    dialect = dialect or _dialect(found)
    kinds = _kinds(dialect)
    if found - set(kinds):
        raise ValueError(f'kinds {sorted(found - set(kinds))} are not of the dialect {dialect!r}')
    cells = [[[Pass(kinds[k], s, mb) for s, k, mb in cell] for cell in row] for row in kept]
    orders = [list(map(_entry, row)) for row in cells]
    passes = [[p for cell in row for p in cell] for row in cells]
    microbatches = 1 + max(p.microbatch for row in passes for p in row)
    return Schedule.of(name, _placement(passes), microbatches, orders)


def in_microbatch_order(schedule: Schedule) -> Schedule:
    """Return the schedule with backwards in microbatch order, if only their numbers prevent that.

    torch's LoopedBFS runs the last microbatch's backward first, on all stages. 1F1B adds gradients
    in microbatch order, so backwards get the numbers of that order, with a warning. A schedule
    whose stages run backwards in unlike orders is returned as it is.
    """
    numbers = _backward_numbers(schedule)
    if not numbers:
        return schedule
    first = next(old for old, new in numbers.items() if new == 0)
    warnings.warn(
        f'{schedule.name}: backwards begin with microbatch {first}; they are numbered in '
        'microbatch order, in which 1F1B adds gradients',
        stacklevel=2,
    )

    def renumbered(p: Pass) -> Pass:
        return p if p.kind == F else p._replace(microbatch=numbers.get(p.microbatch, p.microbatch))

    return replace(schedule, passes=tuple(tuple(map(renumbered, row)) for row in schedule.passes))


def _backward_numbers(schedule: Schedule) -> dict[int, int]:
    """Return a number for each microbatch by which the backwards of all stages are in order."""
    orders: dict[int, list[int]] = {}
    for p in (p for row in schedule.passes for p in row if p.kind in (B, BW)):
        orders.setdefault(p.stage, []).append(p.microbatch)
    first = next(iter(orders.values()), list[int]())
    once = len({*first}) == len(first)
    if not once or first == sorted(first) or any(order != first for order in orders.values()):
        return {}
    return dict(zip(first, sorted(first), strict=True))


def _entry(passes: list[Pass]) -> Pass | Together:
    return passes[0] if len(passes) == 1 else Together(tuple(passes))


def _kinds(dialect: str) -> dict[str, str]:
    if dialect not in _KINDS:
        raise ValueError(f'dialect {dialect!r} is not known: choose one of {", ".join(DIALECTS)}')
    return _KINDS[dialect]


def _cells(row: str, rank: int) -> Iterator[list[_Action]]:
    for column, cell in enumerate(map(str.strip, row.split(','))):
        overlap = _OVERLAP.fullmatch(cell)
        texts = [text.strip() for text in overlap[1].split(';')] if overlap else [cell]
        found = [_action(text, rank, column) for text in texts if text]
        if found:
            yield [action for action in found if action is not None]


def _action(text: str, rank: int, column: int) -> _Action | None:
    """Return stage, kind and microbatch of one action; None: torch's lowering added it."""
    if _LOWERED.fullmatch(text):
        return None
    if match := _ACTION.fullmatch(text):
        return int(match[1]), match[2], int(match[3])
    raise ValueError(
        f'row {rank}, column {column}: {text[:40]!r} is not an action of '
        'torch.distributed.pipelining, such as 3F1, 3I1, 3W1 or 3B1'
    )


def _dialect(kinds: set[str]) -> str:
    """Return the dialect of a file with these kinds of passes: a W without an I is the old one."""
    if {'I', 'BW'} <= kinds:
        raise ValueError(
            "'I' and 'BW' in one file: I is torch's since 2.6, BW from before; use one"
        )
    return 'old' if 'BW' in kinds or ('W' in kinds and 'I' not in kinds) else 'new'


def _placement(passes: list[list[Pass]]) -> Placement:
    """Return the placement of the stages on rows, by its common name if it has one."""
    rank_of: dict[int, int] = {}
    for rank, row in enumerate(passes):
        if not row:
            raise ValueError(f'row {rank} has no passes: give each rank a row with at least one')
        for p in row:
            if rank_of.setdefault(p.stage, rank) != rank:
                raise ValueError(
                    f'row {rank} has {p}, but row {rank_of[p.stage]} has passes of stage {p.stage} '
                    'too: give each stage to one rank'
                )
    if max(rank_of) + 1 != len(rank_of):
        gap = next(stage for stage in range(len(rank_of)) if stage not in rank_of)
        raise ValueError(f'stage {gap} has no passes, but stage {max(rank_of)} has: fill the gap')
    ranks = tuple(rank for _, rank in sorted(rank_of.items()))
    shape = len(passes), len(ranks) // len(passes)
    for known in (Placement.loop(*shape), Placement.wave(*shape)):
        for placement in (known, known.reversed()):
            if placement.only_route == ranks:
                return placement
    return Placement(ranks)
