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

_KINDS = {'new': {'F': F, 'I': B, 'W': W, 'B': BW}, 'old': {'F': F, 'B': B, 'W': W, 'BW': BW}}
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

    It is read, not checked: see `analysis.checker.check`. ValueError: it holds no schedule, or
    another field makes no sense; the message names it.
    """

    def parse(text: str) -> PlanFile:
        if len(text) > _SHORTEST * MOST_PASSES:
            passes = sum(1 for _ in _ANY_PASS.finditer(text))
            if passes > MOST_PASSES:
                raise ValueError(
                    f'{passes} passes: at most {MOST_PASSES} can be checked; give fewer '
                    'microbatches'
                )
        if text.lstrip().startswith(('{', '[')):  # no pass of a CSV begins so
            return _from_json(text)
        schedule = from_torch_csv(text, strict_json.printable(Path(path).stem))
        return PlanFile(in_microbatch_order(schedule))

    return files.read(path, parse, 'a schedule or a plan, as JSON or CSV')


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
        try:
            planned = Costs.from_fields(costs)
            planned.require(schedule.placement)
        except ValueError as error:
            raise ValueError(f'costs: {error}') from error
        schedule = replace(schedule, costs=planned)
    elif 'makespan' in data:
        lacks = (
            'a plan of an older release, which lacks the costs that it was made for: here F = B '
            '= W on equal stages; plan anew, or give zbpp --times'
        )
    units = UNITS
    if 'units' in data:
        try:
            strict_json.require(data['units'], {}, dict.fromkeys(Units._fields, strict_json.text))
        except ValueError as error:
            raise ValueError(f'units: {error}') from error
        units = Units(**data['units'])
    return PlanFile(schedule, layout, data.get('selective') is True, units, lacks, data)


def memory_of_plan(costs: Costs, units: Units) -> dict[str, Any]:
    """Return costs and their units, which a plan's file has beside its schedule."""
    from megatron_zbpp.ir import plan_costs  # which no run without a file needs

    return {'costs': plan_costs.written(costs), 'units': units._asdict()}


def to_torch_csv(schedule: Schedule, dialect: str = 'new') -> str:
    """Return the CSV that torch's `_PipelineScheduleRuntime._load_csv` reads (compute_only)."""
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

    Sends, receives and other lowered actions (format compute_comms) are dropped with a warning: our
    own lowering makes them anew. The passes of an `OVERLAP_F_B` run together. The format has no
    name; without a dialect the kinds that occur tell it.
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
    if not dialect:
        if {'I', 'BW'} <= found:
            raise ValueError(
                "'I' and 'BW' in one file: I is torch's since 2.6, BW from before; use one"
            )
        # a W without an I is the old one
        dialect = 'old' if 'BW' in found or ('W' in found and 'I' not in found) else 'new'
    kinds = _kinds(dialect)
    if found - set(kinds):
        raise ValueError(f'kinds {sorted(found - set(kinds))} are not of the dialect {dialect!r}')
    cells = [[[Pass(kinds[k], s, mb) for s, k, mb in cell] for cell in row] for row in kept]
    orders = [[cell[0] if len(cell) == 1 else Together(tuple(cell)) for cell in r] for r in cells]
    passes = [[p for cell in row for p in cell] for row in cells]
    microbatches = 1 + max(p.microbatch for row in passes for p in row)
    return Schedule.of(name, _placement(passes), microbatches, orders)


def in_microbatch_order(schedule: Schedule) -> Schedule:
    """Return the schedule with backwards in microbatch order, if only their numbers prevent that.

    torch's LoopedBFS runs the last microbatch's backward first, on all stages. 1F1B adds gradients
    in microbatch order, so backwards get the numbers of that order, with a warning. A schedule
    whose stages run backwards in unlike orders is returned as it is.
    """
    orders: dict[int, list[int]] = {}  # by stage
    for _, p in schedule:
        if p.kind in (B, BW):
            orders.setdefault(p.stage, []).append(p.microbatch)
    first = next(iter(orders.values()), list[int]())
    once = len({*first}) == len(first)
    if not once or first == sorted(first) or any(order != first for order in orders.values()):
        return schedule
    numbers = dict(zip(first, sorted(first), strict=True))
    begins = next(old for old, new in numbers.items() if new == 0)
    warnings.warn(
        f'{schedule.name}: backwards begin with microbatch {begins}; they are numbered in '
        'microbatch order, in which 1F1B adds gradients',
        stacklevel=2,
    )
    passes = tuple(
        tuple(
            p if p.kind == F else p._replace(microbatch=numbers.get(p.microbatch, p.microbatch))
            for p in row
        )
        for row in schedule.passes
    )
    return replace(schedule, passes=passes)


def _kinds(dialect: str) -> dict[str, str]:
    if dialect not in _KINDS:
        raise ValueError(f'dialect {dialect!r} is not known: choose one of {", ".join(DIALECTS)}')
    return _KINDS[dialect]


def _cells(row: str, rank: int) -> Iterator[list[_Action]]:
    for column, cell in enumerate(map(str.strip, row.split(','))):
        overlap = _OVERLAP.fullmatch(cell)
        texts = [text.strip() for text in overlap[1].split(';')] if overlap else [cell]
        actions: list[_Action] = []
        for text in filter(None, texts):
            if match := _ACTION.fullmatch(text):
                actions.append((int(match[1]), match[2], int(match[3])))
            elif not _LOWERED.fullmatch(text):
                raise ValueError(
                    f'row {rank}, column {column}: {text[:40]!r} is not an action of '
                    'torch.distributed.pipelining, such as 3F1, 3I1, 3W1 or 3B1'
                )
        if any(texts):
            yield actions


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
