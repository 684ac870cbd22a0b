"""Schedules as they are asked for, by name or by file: checked, with the costs of their passes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from megatron_zbpp.analysis.checker import check
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import Placement, Schedule, formats
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.formats import BYTES, UNITS, Units
from megatron_zbpp.ir.graph import HOST, TRANSFERS, compiled
from megatron_zbpp.ir.plan_costs import in_reverse
from megatron_zbpp.ir.timeline import Timeline
from megatron_zbpp.planner.cost_sources import (
    NO_TIMES,
    CostSource,
    Naming,
    Overlap,
    PlanCosts,
    Times,
)
from megatron_zbpp.planner.limits import Bytes, OnTime, always
from megatron_zbpp.planner.sequence_slices import WHOLE_SEQUENCES, SliceRequest
from megatron_zbpp.schedules import build, find, names
from megatron_zbpp.techniques import ASKED, placed_in_turn
from megatron_zbpp.techniques import find as find_technique
from megatron_zbpp.techniques.base import USUAL_RATIO, with_copies
from megatron_zbpp.techniques.composition import BOTH, OUTPUT, VOCABULARY, techniques_of
from megatron_zbpp.techniques.slices.balance import Attention
from megatron_zbpp.techniques.slices.graph import AUTO
from megatron_zbpp.techniques.slices.place import in_slices, unsuited
from megatron_zbpp.techniques.updates.versions import updates_of, with_weight_copies
from megatron_zbpp.techniques.vocabulary.place import (
    in_embedding_shards,
    in_shards,
    with_shard_times,
    with_whole_layer,
)

IN_FILE = 'file'  # a share of shards: the costs have times of S and T


class Undecided(NamedTuple):
    """Shards only if they pay: `auto`, or `auto:SHARE`."""

    share: float | str | None = None  # None: times of shards among the costs, or the usual share

    def __str__(self) -> str:
        return AUTO if self.share is None else f'{AUTO}:{self.share}'


class Case(NamedTuple):
    """A checked schedule, what its passes cost, and in which units."""

    schedule: Schedule
    costs: Costs
    units: Units = UNITS

    @property
    def timeline(self) -> Timeline:
        return simulate(self.schedule, self.costs)


@dataclass(frozen=True)
class CaseRequest:
    """A schedule that is asked for: which, of which shape, at which costs."""

    schedule: str | None = None  # the name of a family
    file: str | None = None  # or the path of a schedule or a plan
    num_ranks: int | None = None
    num_microbatches: int | None = None
    num_chunks: int | None = None  # of a rank; None: as usual for the family
    cut: SliceRequest = WHOLE_SEQUENCES
    costs: CostSource = NO_TIMES
    comm: float | None = None  # latency of a message; None: as the costs say
    together: Overlap | None = None  # None: as the costs say
    memory_limit: float | None = None
    limits: Sequence[float] = ()  # further limits, of a frontier: they may be in bytes, too
    vocab_parallel: float | str | Undecided | None = None  # share of a shard, or IN_FILE
    vocab_layers: str = OUTPUT
    whole_layer: float | str | None = None  # the last stage has the layer that such shards make up
    copy_ratio: float | None = None
    amounts: Mapping[str, str | None] = field(default_factory=dict[str, 'str | None'])
    """Amounts of techniques, by name."""
    on_time: OnTime = always  # asked between shares of shards that are tried
    name: Naming = str

    @classmethod
    def of(cls, options: Mapping[str, Any], name: Naming = str) -> CaseRequest:
        """Return the request of options, as `zbpp` and `megatron_zbpp.plan` have them by name."""
        attention = options.get('attention') or 0.0
        cut = SliceRequest(
            options.get('slices'),
            options.get('seq_length'),
            Attention(attention) if isinstance(attention, int | float) else attention,
            options.get('context_exchange'),
            name,
        )
        own: dict[str, Any]
        own = {each.name: options[each.name] for each in fields(cls) if each.name in options}
        amounts = {technique: options.get(technique) for technique in ASKED}
        own.update(cut=cut, amounts=amounts, name=name)
        return cls(**own)

    def case(self, family: str | None = None) -> Case:
        """Return the schedule that is asked for, or that of a family: checked, with its costs."""
        name = self.schedule if family is None else family
        case = self._from_file() if name is None else self._generated(name)
        self.require_share()
        planned = case.schedule.costs is not None
        if self.vocab_parallel is not None:  # the output layer is on all ranks
            placement, made = case.schedule.placement, case.schedule
            costs = self._with_shard_times(case.costs, placement)
            if VOCABULARY not in techniques_of(made):
                made = in_shards(made, costs, self._room(costs, placement), self.on_time)
            if self.vocab_layers == BOTH:
                made = in_embedding_shards(made, costs)
            case = case._replace(schedule=made, costs=costs)
        copies = bool(compiled(case.schedule.graph).on_copy_engines)
        for technique in placed_in_turn(map(find_technique, ASKED)):
            amount = self.amounts.get(technique.name)
            if amount is not None and technique.request is not None:
                costs = self.copied(case.costs) if technique.moves else case.costs
                made = technique.request(case.schedule, amount, costs)
                case = case._replace(schedule=made, costs=costs)
        flat = compiled(case.schedule.graph)
        if copies:
            case = case._replace(costs=self.copied(case.costs, flat.between_partners))
        elif not flat.on_copy_engines and family is None and self.copy_ratio is not None:
            raise ValueError(
                f'{self.name("copy_ratio")} {self.copy_ratio:g}, but {case.schedule.name} copies '
                f'nothing: give {self.name(ASKED[0])}, or a schedule that moves activations, such '
                'as po-f or bpipe'
            )
        if not planned:  # else they are in the costs of the plan
            case = case._replace(costs=with_weight_copies(case.costs, case.schedule))
        check(case.schedule, memory_limit=self.memory_limit, costs=case.costs)
        return case

    def cases(
        self, families: Sequence[str], progress: Callable[[float], None]
    ) -> tuple[CaseRequest, dict[str, Case], dict[str, str]]:
        """Return this request, schedules to compare, and why other families have none.

        A plan's file comes first; then the request has its sizes and costs.
        """
        asked, found, skipped = self, dict[str, Case](), dict[str, str]()
        if self.file is not None:
            case, name = self.case(), Path(self.file).stem
            found[name] = case._replace(schedule=replace(case.schedule, name=name))
            asked = self._in_sizes_of(case)
        wanted = families or names()
        for k, name in enumerate(wanted, 1):
            try:
                found[name] = asked.case(name)
            except ValueError as error:
                find(name)  # one that is misspelt is no matter of sizes
                skipped[name] = str(error).partition('\n')[0]
            progress(k / len(wanted))
        if not found:
            raise ValueError(f'no schedule fits: {next(iter(skipped.values()))}')
        return asked, found, skipped

    def _in_sizes_of(self, case: Case) -> CaseRequest:
        """Return the request with the sizes of a file, and the costs of a plan."""
        schedule, updates = case.schedule, updates_of(case.schedule.graph)
        m = updates.every if updates else schedule.num_microbatches
        asked = replace(self, num_ranks=schedule.num_ranks, num_microbatches=m)
        if self.cut.slices is None and schedule.graph.num_slices > 1:
            asked = replace(asked, cut=replace(self.cut, slices=schedule.graph.num_slices))
        if schedule.costs is None or self.costs is not NO_TIMES:
            return asked
        down = schedule.placement.rank_of(0, 0) == 0
        costs = case.costs if down else in_reverse(case.costs, schedule.num_ranks)
        return replace(asked, costs=PlanCosts(costs, case.units), comm=None, together=None)

    def require_share(self) -> None:
        """Raise ValueError for layers on all ranks without a cost, or among layers of a file."""
        shares, layers = self.name('vocab_parallel'), self.name('vocab_layers')
        if self.costs.layers_file is not None and self.vocab_parallel is not None:
            raise ValueError(
                f'{shares} does not go with {self.name("layers_file")}: the output layer is one of '
                f'the layers; leave it out, or give {self.name("costs")}'
            )
        if self.vocab_layers != OUTPUT and self.vocab_parallel is None:
            raise ValueError(
                f'{layers} {self.vocab_layers} needs the cost of the output layer: give {shares} '
                f'SHARE, or {IN_FILE}'
            )

    def _room(self, costs: Costs, placement: Placement) -> float | None:
        if self.memory_limit is None:
            return None
        return max(0.0, self.memory_limit - max(costs.static(placement)))

    def _with_shard_times(self, costs: Costs, placement: Placement) -> Costs:
        share = self.vocab_parallel
        numbered = isinstance(share, float | int)
        return with_shard_times(costs, placement, share) if numbered else costs

    def copied(self, costs: Costs, between: Iterable[str] = ()) -> Costs:
        """Return `costs` with times of copies, by `copy_ratio` where they have none."""
        ratio = self.copy_ratio
        if ratio is not None and TRANSFERS[HOST].out in costs.times:
            raise ValueError(
                f'{self.name("copy_ratio")} {ratio:g}, but the file of {self.name("costs")} has '
                'its own: drop one'
            )
        return with_copies(costs, USUAL_RATIO if ratio is None else ratio, between)

    def _generated(self, name: str) -> Case:
        family, p, m = find(name), self.num_ranks, self.num_microbatches
        if p is None or m is None:
            missing = self.name('num_ranks' if p is None else 'num_microbatches')
            raise ValueError(
                f'{self.name("schedule")} {name} needs {missing}: give a number from 1 up'
            )
        chunks = self.costs.chunks(p, self.num_chunks, family.default_chunks, self.name)
        slices = self.cut.number or family.default_slices
        self.require_size(p * m * chunks * slices)
        placement = Placement.loop(p, chunks)  # a stage's share does not depend on its place
        costs = self.costs_of(placement)
        if self.whole_layer is not None:  # the last stage has what shards are weighed against
            if not isinstance(self.whole_layer, str):
                plain = Placement.loop(costs.num_stages)
                costs = with_shard_times(costs, plain, self.whole_layer)
            costs = with_whole_layer(costs)
        limit = self._room(costs, placement) if 'memory_limit' in family.options else None
        overlaps = 'together' in family.options
        if self.together is not None and self.schedule == name and not overlaps:
            raise ValueError(
                f'{self.name("together")} {self.together.share:g}, but {name} has no forwards and '
                'backwards that run as one: take dualpipe-v, or leave it out'
            )
        asked = self.together is not None or costs.together != 1 or bool(costs.pairs)
        planned = self.copied(costs) if family.moves else costs  # its copies have their slots
        if family.in_shards:
            planned = self._with_shard_times(planned, placement)
        options: dict[str, Any] = {
            'num_chunks': chunks,
            'memory_limit': limit,
            'together': overlaps and asked,
        }
        schedule = in_slices(name, p, m, slices, costs=planned, **options)
        if slices > 1 and family.default_slices == 1 and limit is None:
            why = unsuited(schedule, build(name, p, m, num_chunks=chunks))
            if why is not None:
                warnings.warn(why, stacklevel=2)
        return Case(*self.cut.with_sizes(schedule, costs), units=self.units)

    def _from_file(self) -> Case:
        assert self.file is not None, 'a name or a file is asked for'
        plan = formats.load_plan(self.file)
        schedule = plan.schedule
        updates = updates_of(schedule.graph)
        microbatches = updates.every if updates else schedule.num_microbatches
        for name, asked, found in (
            ('num_ranks', self.num_ranks, schedule.num_ranks),
            ('num_microbatches', self.num_microbatches, microbatches),
            ('num_chunks', self.num_chunks, schedule.placement.num_chunks),
            ('slices', self.cut.number, schedule.graph.num_slices),
        ):
            if asked not in (None, found):
                flag = self.name(name)
                raise ValueError(f'{flag} {asked}, but {self.file} has {found}: leave {flag} out')
        if schedule.costs is not None and self.costs is NO_TIMES:
            if self.cut.parts.share:
                raise ValueError(
                    f'{self.name("attention")}, but the costs of {self.file} have it: leave it '
                    f'out, or give {self.name("costs")}'
                )
            if isinstance(self.memory_limit, Bytes) and plan.units.memory != BYTES:
                raise ValueError(
                    f'a memory limit in bytes, but {self.file} counts {plan.units.memory}: give a '
                    'number of those'
                )
            costs = self._with_messages_and_pairs(schedule.costs, self.file, self.file)
            return Case(schedule, costs, plan.units)
        if plan.lacks and self.costs is NO_TIMES:
            warnings.warn(f'{self.file}: {plan.lacks}', stacklevel=2)
        costs, schedule = self.costs_of(schedule.placement), replace(schedule, costs=None)
        return Case(*self.cut.with_sizes(schedule, costs))

    def costs_of(self, placement: Placement, selective: bool = False) -> Costs:
        """Return the costs of a placement's stages; `selective`: with selective recomputation."""
        if self._in_bytes:
            self.costs.require_bytes(self.name)
        costs = self.costs.costs(placement, self.name, selective)
        of_times = f'the file of {self.name("costs")}'
        return self._with_messages_and_pairs(costs, self.costs.layers_file or of_times, of_times)

    def _with_messages_and_pairs(self, costs: Costs, source: str, pairs_in: str) -> Costs:
        """Return costs with the latency of messages and the times of passes that run as one."""
        if self.comm is not None:
            if costs.comm:
                raise ValueError(
                    f'{self.name("comm")} {self.comm}, but {source} has {costs.comm}: drop one'
                )
            costs = replace(costs, comm=self.comm)
        if self.together is None:
            return costs
        if costs.together != 1 or costs.pairs:
            raise ValueError(
                f'{self.name("together")} {self.together.share:g}, but {pairs_in} has '
                f'{costs.together:g}: drop one'
            )
        return replace(costs, together=self.together.share, pairs=self.together.pairs)

    @property
    def _in_bytes(self) -> bool:
        return any(isinstance(limit, Bytes) for limit in (self.memory_limit, *self.limits))

    @property
    def units(self) -> Units:
        """Units of a plan: those of the costs, which are bytes where they are as many."""
        return self.costs.units(self._in_bytes)

    def heading(self, case: Case | None = None) -> str:
        """Return sizes and times that all schedules of a picture have in common."""
        sizes = {'p': self.num_ranks, 'm': self.num_microbatches, 'n': self.cut.number}
        parts = [f'{name} = {size}' for name, size in sizes.items() if size is not None]
        planned = case is not None and case.schedule.costs is not None
        own = isinstance(self.costs, Times) and planned
        parts.append('times of the plan' if own else self.costs.heading)
        if isinstance(self.vocab_parallel, float | int):
            parts.append(f'shards {self.vocab_parallel:g}')
        if self.copy_ratio is not None:
            parts.append(f'copies k = {self.copy_ratio:g}')
        if self.comm:
            parts.append(f'messages {self.comm:g}')
        return f'{", ".join(parts)}; simulated'

    def require_size(self, chunk_microbatches: int) -> None:
        """Raise ValueError for more passes than a file may have."""
        if 3 * chunk_microbatches > formats.MOST_PASSES:
            flags = ' times '.join(map(self.name, ('num_ranks', 'num_chunks', 'num_microbatches')))
            raise ValueError(
                f'{flags} is {chunk_microbatches}: give less than {formats.MOST_PASSES // 3} in all'
            )
