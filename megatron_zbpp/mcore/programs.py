"""The schedule that was asked for, as proven programs for whatever sizes a job has."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from megatron_zbpp.analysis.checker import check, is_mirrored
from megatron_zbpp.analysis.program import BY_TAKER, LATE
from megatron_zbpp.analysis.run_ahead import passes_ahead
from megatron_zbpp.guests.base import Guest
from megatron_zbpp.ir import Placement, Schedule, W
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.mcore.lowered import Lowered, ProgramCache, Size, for_megatron, one_replica
from megatron_zbpp.mcore.model_settings import offloads_in_order
from megatron_zbpp.mcore.settings import AUTO, Settings
from megatron_zbpp.runtime.guard import agreement
from megatron_zbpp.runtime.log import job_log
from megatron_zbpp.schedules import build, checked_chunks, find
from megatron_zbpp.techniques import ALL, added, placed_in_turn
from megatron_zbpp.techniques import find as find_technique
from megatron_zbpp.techniques.composition import (
    LAYERS_OF,
    OVERLAP,
    techniques_of,
    techniques_of_family,
)
from megatron_zbpp.techniques.slices.graph import Slices, ToFind, cuts_of, number_of, sizes_of

TWO_WAY = 'two_way'  # microbatches go both ways: of the placement, and not of the graph


class Family(NamedTuple):
    """A family and its options: makes a schedule for any number of microbatches."""

    name: str  # of the family
    num_chunks: int | None = None  # stages a rank; None: the family's choice
    # in activations of one microbatch on a full rank; None: the family's choice
    memory_limit: float | None = None
    num_slices: int = 1  # of each sequence


_Method = TypeVar('_Method', bound=Callable)


def _once(make: _Method) -> _Method:
    """Let a method of `Programs` make a thing of a size once, until the schedule is another one."""

    @functools.wraps(make)
    def kept(programs: Programs, *sizes: int) -> Any:
        key = make.__name__, *sizes
        if key not in programs._known:
            programs._known[key] = make(programs, *sizes)
        return programs._known[key]

    return cast(Any, kept)


class Traits(NamedTuple):
    """Traits of a schedule that rules ask, by the names that `rules.Context` has for them."""

    splits: bool  # there are W passes
    techniques: frozenset[str]  # names
    joins: bool  # there are pairs of F and BW that can run as one
    mirrored: bool  # ranks that hold the same stages run them in one order
    seeded: bool  # each layer has its own seeds of dropout


class Programs:
    """Makes schedules and their programs, each once."""

    def __init__(self, settings: Settings) -> None:
        self.together = False  # whether pairs of F and BW are to run as one
        self.varying = False  # whether a forward's message may have any shape
        self._settings = settings
        self._to_plan_from = settings.schedule == AUTO
        self._slices, self._amounts = settings.sliced, settings.amounts
        self.source: Schedule | Family
        if isinstance(settings.schedule, Schedule):
            self.source = settings.schedule
            self.asynchronous, self.num_replicas = False, len(self.source.placement.routes)
            self.num_chunks = self.source.placement.num_chunks  # stages on each rank
        else:
            plain, chunks = start_family(settings.num_chunks), settings.num_chunks
            family = find(plain if self._to_plan_from else settings.schedule)
            # whether the pipeline never drains, and a call goes on where the one before has left
            self.asynchronous = family.asynchronous
            self.num_replicas = family.num_routes  # that run one schedule: one for each way
            self.num_chunks = self.num_replicas * checked_chunks(family, chunks)
            if self._to_plan_from:
                self.source = Family(plain, chunks)
            else:
                slices = number_of(self._slices or family.default_slices) or 2  # to be found
                self.source = Family(settings.schedule, chunks, settings.memory_limit, slices)
        for name, amount in self._amounts.items():
            find_technique(name).require(amount, self.num_chunks)
        # techniques without an amount that are put into the schedule, in their order
        self.added = LAYERS_OF[settings.vocab_parallel]
        self._early = settings.post_validation is not None
        self._measured: Costs | None = None
        self.cache = ProgramCache(self._make)
        self._planned: dict[tuple[int, int], Schedule] = {}
        self._known: dict[tuple, Any] = {}  # by what it is, and sizes

    @functools.cached_property
    def key(self) -> str:
        """The source in words: equal on two ranks exactly if the source is."""
        settings = self._settings
        more = ''.join(f', {name} {amount}' for name, amount in self._amounts.items())
        if settings.message_receives != LATE:
            more += f', receives {settings.message_receives}'
        more += f', clipping {settings.clip}' if settings.clip else ''
        more += ''.join(f', {name}' for name in self.added)
        if settings.freeze_plan is not None:
            more += f', freezing {agreement.digest(settings.freeze_plan.to_json())}'
        if isinstance(self.source, Schedule):
            return agreement.fingerprint(self.source) + more
        _, num_chunks, limit, slices = self.source
        name = self._family(self.together)
        name += f' with {num_chunks} chunks a rank' if num_chunks else ''
        name += f' within {limit:g}' if limit else ''
        asked = settings.sliced if isinstance(settings.sliced, ToFind) else slices
        more += f' in {asked} slices' if slices > 1 else ''
        return name + more + (' to plan from' if self._to_plan_from else '')

    @functools.cached_property
    def guests(self) -> tuple[Guest, ...]:
        """The guests that were asked for; they may refuse a schedule."""
        return tuple(_guests(self._settings))

    def require_pairs(self, size: int) -> None:
        """Check that replicas form groups that run one schedule, which go as many ways."""
        if size % self.num_replicas:
            raise ValueError(
                f'data-parallel size {size} is wrong because {self.source.name} runs on pairs of '
                'replicas: give an even number of them, by twice or half the ranks'
            )

    @_once
    def fingerprint(self, num_ranks: int, num_microbatches: int) -> dict[str, str]:
        """Return the orders of a family from a user's module, by its name, for ranks to compare.

        Of the library's families nothing: a release makes the same everywhere. A module of one's
        own may be another on another host.
        """
        if isinstance(self.source, Schedule) or ':' not in self.source.name:
            return {}
        orders = agreement.fingerprint(self.schedule(num_ranks, num_microbatches))
        return {f'what {self.source.name} makes': orders}

    def schedule(self, num_ranks: int, num_microbatches: int) -> Schedule:
        """Return the schedule for p ranks and m microbatches, in Megatron's ranks."""
        if (num_ranks, num_microbatches) in self._planned:
            return self._planned[num_ranks, num_microbatches]
        return self._with_techniques(self._plain(num_ranks, num_microbatches))

    def without_copies(self, num_ranks: int, num_microbatches: int) -> Schedule:
        """Return the same without the copies that were asked for."""
        return self._with_techniques(self._plain(num_ranks, num_microbatches), copies=False)

    def _with_techniques(self, schedule: Schedule, copies: bool = True) -> Schedule:
        for name in self.added:
            if name not in techniques_of(schedule):
                schedule = added(name)(schedule)
        for technique in placed_in_turn(map(find_technique, self._amounts)):
            if technique.moves and not copies:
                continue
            assert technique.request is not None  # else nobody can ask for it
            amount, costs = self._amounts[technique.name], None
            if technique.free:
                costs = self._measured
                amount = ALL if amount == technique.free and costs is None else amount
            schedule = technique.request(schedule, amount, costs)
        return schedule

    def _plain(self, num_ranks: int, num_microbatches: int) -> Schedule:
        if num_ranks == 1 and self.num_replicas > 1:
            raise ValueError(
                f'{self.source.name} needs at least 2 pipeline ranks a replica, not 1: use more '
                'pipeline ranks or another schedule, such as 1f1b'
            )
        if isinstance(self.source, Schedule):
            source, replicas = self.source, self.num_replicas
            for what, has, needed in (
                ('pipeline ranks', source.num_ranks // replicas, num_ranks),
                ('microbatches', source.num_microbatches // replicas, num_microbatches),
            ):
                if has != needed:
                    raise ValueError(
                        f'schedule {source.name} is for {has} {what}, not {needed}: change '
                        'the parallel or batch sizes, or take a schedule by its name (see zbpp '
                        'list)'
                    )
            return for_megatron(self.source)
        _, num_chunks, memory_limit, slices = self.source
        make = build
        if slices > 1 or find(self.source.name).default_slices > 1:
            from megatron_zbpp.techniques.slices.place import in_slices

            make = functools.partial(in_slices, num_slices=slices)
        schedule = make(
            self._family(self.together),
            num_ranks * self.num_replicas,
            num_microbatches * self.num_replicas,
            num_chunks=num_chunks,
            memory_limit=memory_limit,
            together=self.together,
        )
        if schedule.graph.num_slices != slices:
            raise ValueError(
                f'{self.source.name} makes {schedule.graph.num_slices} slices of a sequence that '
                'nobody asked for: give its function a parameter num_slices, with that default'
            )
        if len(schedule.placement.routes) != self.num_replicas:
            raise ValueError(
                f'{self.source.name} makes {len(schedule.placement.routes)} ways through the '
                f'ranks, not {self.num_replicas}: say num_routes above it, in @family'
            )
        return for_megatron(schedule)

    @_once
    def placement(self, num_ranks: int) -> Placement:
        """Return where a replica has its stages, whatever the number of microbatches."""
        return one_replica(self.whole_placement(num_ranks))

    @_once
    def whole_placement(self, num_ranks: int) -> Placement:
        """Return where all replicas that run one schedule have their stages."""
        return self._example(num_ranks, 1).placement

    @functools.cached_property
    def is_loop(self) -> bool:
        """True if stages go around the ranks, however many there are, as by Megatron's schedules.

        A family of a user's own may have other placements than it says.
        """
        if isinstance(self.source, Schedule):
            return one_replica(self.source.placement).is_loop
        family = find(self._family(False))
        return ':' not in family.name and family.placement == 'loop'

    @_once
    def traits(self, num_ranks: int) -> Traits:
        example = self._example(num_ranks, 2 * num_ranks)
        splits, seeds = any(p.kind == W for _, p in example), self._settings.dropout_seeds
        return Traits(splits, techniques_of(example), self.joins, is_mirrored(example), seeds)

    @functools.cached_property
    def trained(self) -> frozenset[str]:
        """Names of the techniques that the schedule has, or may have, whatever its size."""
        source, both_ways = self.source, {TWO_WAY} if self.num_replicas > 1 else set()
        if isinstance(source, Schedule):
            overlaps = {OVERLAP} if source.together else set()
            return techniques_of(source).union(self.added, self._amounts, overlaps, both_ways)
        own = techniques_of_family(find(self._family(True)), source.num_slices)
        return own.union(self.added, self._amounts, both_ways)

    def cuts(self, settings: Any, length: int | None) -> tuple[int, ...]:
        """Return the first token of each slice of a sequence, and behind them its length.

        Nothing where the length is not known, or slices are still to be found. ValueError where
        sequences of that length cannot be sliced so.
        """
        if length is None or isinstance(self._slices, ToFind):
            return ()
        shared = getattr(settings, 'sequence_parallel', False)
        ranks = getattr(settings, 'tensor_model_parallel_size', 1) if shared else 1
        own = sizes_of(self.source.graph) if isinstance(self.source, Schedule) else ()
        return cuts_of(self._slices or own or self.num_slices, length, ranks)

    @property
    def to_find_slices(self) -> bool:
        """True while it is open which slices sequences have."""
        return isinstance(self._slices, ToFind)

    def slice_by(self, slices: Slices) -> None:
        """Cut sequences so from now on: what was to be found."""
        self._slices = slices
        if isinstance(self.source, Family):
            self.source = self.source._replace(num_slices=number_of(slices))
        self._known.clear()
        self.cache.drop()

    @property
    def num_slices(self) -> int:
        """Slices of each sequence; 1: sequences are whole."""
        source = self.source
        return source.graph.num_slices if isinstance(source, Schedule) else source.num_slices

    @_once
    def in_order(self, num_ranks: int, num_microbatches: int | None = None) -> bool:
        """Return True if Megatron's own offloading of activations fits all programs.

        Not where the schedule will be another one, nor where forwards run ahead, which may be taken
        back.
        """
        if self._to_plan_from or self._early:
            return False
        return offloads_in_order(self._example(num_ranks, num_microbatches or 2 * num_ranks))

    def join(self, asked: object) -> None:
        """Make schedules from now on have pairs that run as one, if `asked` and there are any."""
        self.together = bool(asked) and self.joins

    @property
    def runs_ahead(self) -> bool:
        """True if ranks may run forwards of an iteration before the one before has ended."""
        return self._early or self.asynchronous

    @property
    def replays(self) -> bool:
        """True if forwards may run twice, or before the step of the iteration before."""
        return self.runs_ahead or 'recompute' in self._amounts

    @property
    def joins(self) -> bool:
        """True if there are pairs of F and BW that can run as one."""
        if isinstance(self.source, Schedule):
            return bool(self.source.together)
        return 'together' in find(self._family(True)).options

    def _family(self, together: bool) -> str:
        """Return the family's name; for a plan, a family on the same placement."""
        assert not isinstance(self.source, Schedule)
        if self._to_plan_from:
            return start_family(self.source.num_chunks, together)
        return self.source.name

    def _example(self, num_ranks: int, num_microbatches: int) -> Schedule:
        """Return the schedule for p ranks and, where that can be chosen, so many microbatches."""
        if isinstance(self.source, Schedule):
            num_microbatches = self.source.num_microbatches // self.num_replicas
        elif self.asynchronous:  # which some cannot do with fewer
            num_microbatches = max(num_microbatches, num_ranks)
        return self.schedule(num_ranks, num_microbatches)

    def lowered(
        self, num_ranks: int, num_microbatches: int, forward_only: bool, draining: bool = False
    ) -> Lowered:
        """Return the checked programs, kept or made now; ValueError where a guest refuses it.

        `draining`: an asynchronous schedule warms up, by a synchronous one.
        """
        drains = draining or (forward_only and self.asynchronous)
        receives = BY_TAKER if self.varying else self._settings.message_receives
        size = Size(num_ranks, num_microbatches, forward_only, self.together, drains, receives)
        return self.cache.get(size)

    def _make(self, size: Size) -> Lowered:
        num_ranks, num_microbatches, forward_only, *_ = size
        if size.draining:  # evaluations of an asynchronous one do, and what warms up
            chunks = self.num_chunks
            name = 'interleaved' if chunks > 1 else '1f1b'
            schedule = build(name, num_ranks, num_microbatches, num_chunks=chunks)
        else:
            schedule = self.schedule(num_ranks, num_microbatches)
        calls, endless = None, self.asynchronous
        if forward_only:
            from megatron_zbpp.analysis.run_ahead import evaluation

            schedule = evaluation(schedule)
        elif endless and not size.draining:
            from megatron_zbpp.techniques.updates.calls import calls_of

            calls = calls_of(schedule)
        for guest in () if forward_only or endless else self.guests:
            if why := guest.refuses(schedule):
                raise ValueError(why)
        programs = check(schedule, receives=size.receives).programs
        ahead = () if endless or self.num_replicas > 1 else passes_ahead(schedule)
        return Lowered(schedule, programs, ahead, calls)

    def copy_what_is_free(self, costs: Costs) -> None:
        """Leave on the device from now on what would cost time to copy, by measured O and L."""
        self._measured = costs
        self._known.clear()
        self.cache.drop()

    def replace(self, planned: Schedule) -> None:
        """Run `planned` from now on where it has the right size."""
        size = planned.num_ranks, planned.num_microbatches
        self._planned[size] = planned
        self._known.clear()
        self.cache.drop(lambda kept: kept[:2] == size)


def _guests(settings: Settings) -> Iterator[Guest]:
    """Yield guests in the order in which they hear of an iteration; others are not imported."""
    if settings.dropout_seeds:
        from megatron_zbpp.mcore import dropout_seeds

        yield dropout_seeds.DropoutSeeds()
    if settings.freeze_plan is not None:
        from megatron_zbpp.guests import freeze_run

        yield freeze_run.FreezeRun(settings.freeze_plan, job_log.warning)
    if settings.trace_dir is not None:
        from megatron_zbpp.guests import tracing

        yield tracing.Tracer(Path(settings.trace_dir))
    if 'nemo.lens' in sys.modules:  # as where Megatron has telemetry
        from megatron_zbpp.guests import telemetry

        yield telemetry.Spans()
    if settings.offload == AUTO:
        from megatron_zbpp.guests import measurements

        yield measurements.OffloadTuner(settings.profile_iters)
    if settings.schedule == AUTO:
        from megatron_zbpp.guests import auto_plan

        objective = 'makespan' if settings.post_validation is None else 'window'
        yield auto_plan.AutoPlan(settings.profile_iters, settings.memory_limit, objective=objective)


def start_family(num_chunks: int | None, together: bool = False) -> str:
    """Return the named schedule that `auto` measures, which fixes the placement.

    `together`: with forwards and backwards that run as one, if there is such a schedule.
    """
    v = 'dualpipe-v' if together else 'zb-v'
    return {None: v, 1: 'zb-h1', 2: v}.get(num_chunks, 'zb-interleaved')
