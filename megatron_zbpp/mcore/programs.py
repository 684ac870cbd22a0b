"""The schedule that was asked for, as proven programs for whatever sizes a job has."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from megatron_zbpp.analysis.checker import check, is_mirrored
from megatron_zbpp.analysis.program import BY_TAKER, LATE
from megatron_zbpp.analysis.run_ahead import passes_ahead
from megatron_zbpp.guests.base import Guest
from megatron_zbpp.ir import Placement, Schedule, W
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.mcore import guests, own_offloading
from megatron_zbpp.mcore.lowered import Lowered, Size, for_megatron, one_replica
from megatron_zbpp.mcore.program_cache import ProgramCache
from megatron_zbpp.mcore.settings import AUTO, Settings
from megatron_zbpp.runtime.guard import agreement
from megatron_zbpp.schedules import build, checked_chunks, find
from megatron_zbpp.techniques import added, placed_in_turn
from megatron_zbpp.techniques import find as find_technique
from megatron_zbpp.techniques.amounts import ALL
from megatron_zbpp.techniques.composition import (
    LAYERS_OF,
    OVERLAP,
    techniques_of,
    techniques_of_family,
)
from megatron_zbpp.techniques.slices.sizes import Slices, ToFind, cuts_of, number_of, sizes_of

_SOME = 2  # slices, where it does not matter how many


class Family(NamedTuple):
    """A family and its options: makes a schedule for any number of microbatches.

    Attributes:
        name: of the family.
        num_chunks: stages a rank; None: the family's choice.
        memory_limit: in activations of one microbatch on a full rank; None: the family's choice.
        num_slices: of each sequence.
    """

    name: str
    num_chunks: int | None = None
    memory_limit: float | None = None
    num_slices: int = 1


class _Parts(NamedTuple):
    """Kinds of passes, names of techniques, and symmetry of a schedule."""

    kinds: frozenset[str]
    techniques: frozenset[str]
    mirrored: bool


class Programs:
    """Makes schedules and their programs, each once.

    Args:
        settings: what was asked for.

    Attributes:
        source: a schedule, or the family that makes one.
        cache: programs by their sizes.
        together: whether pairs of F and BW are to run as one.
        varying: whether a forward's message may have any shape.
        added: techniques without an amount that are put into the schedule, in their order.
    """

    def __init__(self, settings: Settings) -> None:
        self.together = self.varying = False
        self._settings = settings
        self._to_plan_from = settings.schedule == AUTO
        self.source: Schedule | Family
        if isinstance(settings.schedule, Schedule):
            self.source = settings.schedule
        elif self._to_plan_from:
            self.source = Family(start_family(settings.num_chunks), settings.num_chunks)
        else:
            slices = number_of(settings.sliced or find(settings.schedule).default_slices)
            self.source = Family(
                settings.schedule,
                settings.num_chunks,
                settings.memory_limit,
                slices or _SOME,  # until they are found
            )
        self._slices = settings.sliced
        self._amounts, self._freeze = settings.amounts, settings.freeze_plan
        for name, amount in self._amounts.items():
            find_technique(name).require(amount, self.num_chunks)
        self.added = LAYERS_OF[settings.vocab_parallel]
        self._receives = settings.message_receives
        self._early = settings.post_validation is not None
        self._measured: Costs | None = None
        self.cache = ProgramCache(self._make)
        self._placements: dict[int, Placement] = {}
        self._planned: dict[tuple[int, int], Schedule] = {}
        self._parts_of: dict[int, _Parts] = {}
        self._in_order_of: dict[tuple[int, int], bool] = {}
        self._fingerprints: dict[tuple[int, int], dict[str, str]] = {}

    @functools.cached_property
    def key(self) -> str:
        """The source in words: equal on two ranks exactly if the source is."""
        more = ''.join(f', {name} {amount}' for name, amount in self._amounts.items())
        more += f', receives {self._receives}' if self._receives != LATE else ''
        more += f', clipping {self._settings.clip}' if self._settings.clip else ''
        more += ''.join(f', {name}' for name in self.added)
        if self._freeze is not None:
            more += f', freezing {agreement.digest(self._freeze.to_json())}'
        if isinstance(self.source, Schedule):
            return agreement.fingerprint(self.source) + more
        _, num_chunks, memory_limit, slices = self.source
        name = self._family(self.together)
        asked = self._settings.sliced
        more += f' in {asked if isinstance(asked, ToFind) else slices} slices' if slices > 1 else ''
        chunks = f' with {num_chunks} chunks a rank' if num_chunks else ''
        limit = f' within {memory_limit:g}' if memory_limit else ''
        return name + chunks + limit + more + (' to plan from' if self._to_plan_from else '')

    @functools.cached_property
    def guests(self) -> tuple[Guest, ...]:
        """The guests that were asked for; they may refuse a schedule."""
        return tuple(guests.asked_for(self._settings))

    @property
    def num_chunks(self) -> int:
        """Stages on each rank."""
        if isinstance(self.source, Schedule):
            return self.source.placement.num_chunks
        chunks = checked_chunks(find(self.source.name), self.source.num_chunks)
        return self.num_replicas * chunks

    @functools.cached_property
    def num_replicas(self) -> int:
        """Replicas of the pipeline that run one schedule: one for each way."""
        if isinstance(self.source, Schedule):
            return len(self.source.placement.routes)
        return find(self.source.name).num_routes

    @property
    def asynchronous(self) -> bool:
        """True if the pipeline never drains, and a call goes on where the one before has left."""
        return not isinstance(self.source, Schedule) and find(self.source.name).asynchronous

    @property
    def name(self) -> str:
        """The name of the schedule or family."""
        return self.source.name

    def fingerprint(self, num_ranks: int, num_microbatches: int) -> dict[str, str]:
        """Return what a family of somebody's own module makes, by its name, for ranks to compare.

        Of the library's families nothing: a release makes the same everywhere. A module of one's
        own may be another on another host.
        """
        if isinstance(self.source, Schedule) or ':' not in self.source.name:
            return {}
        sizes = num_ranks, num_microbatches
        if sizes not in self._fingerprints:
            made = agreement.fingerprint(self.schedule(*sizes))
            self._fingerprints[sizes] = {f'what {self.source.name} makes': made}
        return self._fingerprints[sizes]

    def schedule(self, num_ranks: int, num_microbatches: int) -> Schedule:
        """Return the schedule for p ranks and m microbatches, in Megatron's ranks.

        Raises:
            ValueError: the family cannot make one, or the given one is for another p or m.
        """
        if (num_ranks, num_microbatches) in self._planned:
            return self._planned[num_ranks, num_microbatches]
        return self._with_techniques(self._plain(num_ranks, num_microbatches))

    def without_copies(self, num_ranks: int, num_microbatches: int) -> Schedule:
        """Return the same without the copies that were asked for.

        Raises:
            ValueError: as `schedule`.
        """
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
        """Return the schedule as its source has it."""
        if num_ranks == 1 and self.num_replicas > 1:
            raise ValueError(
                f'{self.name} needs at least 2 pipeline ranks a replica, not 1: use more pipeline '
                'ranks or another schedule, such as 1f1b'
            )
        if isinstance(self.source, Schedule):
            for what, has, needed in (
                ('pipeline ranks', self.source.num_ranks // self.num_replicas, num_ranks),
                (
                    'microbatches',
                    self.source.num_microbatches // self.num_replicas,
                    num_microbatches,
                ),
            ):
                if has != needed:
                    raise ValueError(
                        f'schedule {self.source.name} is for {has} {what}, not {needed}: change '
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

    def placement(self, num_ranks: int) -> Placement:
        """Return where a replica has its stages, whatever the number of microbatches."""
        if num_ranks not in self._placements:
            self._placements[num_ranks] = one_replica(self.whole_placement(num_ranks))
        return self._placements[num_ranks]

    def whole_placement(self, num_ranks: int) -> Placement:
        """Return where all replicas that run one schedule have their stages."""
        return self._example(num_ranks, 1).placement

    def splits(self, num_ranks: int) -> bool:
        """Return whether weight gradients wait for W passes."""
        return W in self._parts(num_ranks).kinds

    def mirrored(self, num_ranks: int) -> bool:
        """Return whether ranks that hold the same stages run them in one order."""
        return self._parts(num_ranks).mirrored

    def techniques(self, num_ranks: int) -> frozenset[str]:
        """Return the names of the techniques that the schedule has."""
        return self._parts(num_ranks).techniques

    @functools.cached_property
    def trained(self) -> frozenset[str]:
        """Names of the techniques that the schedule has, or may have, whatever its size."""
        source = self.source
        if isinstance(source, Schedule):
            overlaps = {OVERLAP} if source.together else set()
            return techniques_of(source).union(self.added, self._amounts, overlaps)
        own = techniques_of_family(find(self._family(True)), source.num_slices)
        return own.union(self.added, self._amounts)

    @property
    def seeded(self) -> bool:
        """True where each layer has its own seeds of dropout."""
        return self._settings.dropout_seeds

    def cuts(self, settings: Any, length: int | None) -> tuple[int, ...]:
        """Return the first token of each slice of a sequence, and behind them its length.

        Args:
            settings: Megatron's arguments or config, which say who shares sequences out.
            length: tokens of a sequence; None: not known. Then nothing is returned, nor before
                slices that are to be found are.

        Raises:
            ValueError: sequences of that length cannot be sliced so.
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
        for known in (self._parts_of, self._in_order_of, self._fingerprints):
            known.clear()
        self.cache.drop()

    @property
    def num_slices(self) -> int:
        """Slices of each sequence; 1: sequences are whole."""
        source = self.source
        return source.graph.num_slices if isinstance(source, Schedule) else source.num_slices

    def in_order(self, num_ranks: int, num_microbatches: int | None = None) -> bool:
        """Return whether Megatron's own offloading of activations fits what runs, and all of it.

        Not where the schedule will be another one, nor where forwards run ahead, which may be taken
        back.
        """
        if self._to_plan_from or self._early:
            return False
        sizes = num_ranks, num_microbatches or 2 * num_ranks
        if sizes not in self._in_order_of:
            self._in_order_of[sizes] = own_offloading.fits(self._example(*sizes))
        return self._in_order_of[sizes]

    def _parts(self, num_ranks: int) -> _Parts:
        if num_ranks not in self._parts_of:
            example = self._example(num_ranks, 2 * num_ranks)
            kinds = frozenset(p.kind for _, p in example)
            self._parts_of[num_ranks] = _Parts(kinds, techniques_of(example), is_mirrored(example))
        return self._parts_of[num_ranks]

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

    @functools.cached_property
    def corrects_weights(self) -> bool:
        """True if backwards use corrected weights (PipeMare)."""
        if not self.asynchronous:
            return False
        from megatron_zbpp.techniques.updates.graph import CORRECTED
        from megatron_zbpp.techniques.updates.versions import updates_of

        updates = updates_of(self.schedule(2, 2).graph)
        return updates is not None and updates.backward == CORRECTED

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
        """Return the checked programs, kept or made now.

        Args:
            num_ranks: p.
            num_microbatches: m.
            forward_only: whether there are no backwards.
            draining: whether an asynchronous schedule warms up, by a synchronous one.

        Raises:
            ScheduleError: the schedule is not valid.
            ValueError: a guest refuses it.
        """
        drains = draining or (forward_only and self.asynchronous)
        receives = BY_TAKER if self.varying else self._receives
        size = Size(num_ranks, num_microbatches, forward_only, self.together, drains, receives)
        return self.cache.get(size)

    def _make(self, size: Size) -> Lowered:
        """Return the checked programs of a size; see `lowered`."""
        num_ranks, num_microbatches, forward_only, *_ = size
        if size.draining:  # evaluations of an asynchronous one do, and what warms up
            chunks = self.num_chunks
            name = 'interleaved' if chunks > 1 else '1f1b'
            schedule = build(name, num_ranks, num_microbatches, num_chunks=chunks)
        else:
            schedule = self.schedule(num_ranks, num_microbatches)
        calls, endless = None, self.asynchronous
        if forward_only:
            from megatron_zbpp.analysis.evaluation import evaluation

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
        """Leave on the device from now on what would cost time to copy.

        Args:
            costs: measured, with times of O and L.
        """
        self._measured = costs
        self._parts_of.clear()
        self.cache.drop()

    def replace(self, planned: Schedule) -> None:
        """Run `planned` from now on where it has the right size."""
        size = planned.num_ranks, planned.num_microbatches
        self._planned[size] = planned
        self._parts_of.clear()
        self.cache.drop(lambda kept: kept[:2] == size)


def start_family(num_chunks: int | None, together: bool = False) -> str:
    """Return the named schedule that `auto` measures, which fixes the placement.

    Args:
        num_chunks: stages a rank; None: two.
        together: whether it is to have forwards and backwards that run as one, to be measured; on
            the same placement, if there is such a schedule.
    """
    v = 'dualpipe-v' if together else 'zb-v'
    return {None: v, 1: 'zb-h1', 2: v}.get(num_chunks, 'zb-interleaved')
