"""The best partition, device order and schedule that can be found: the way of `zbpp partition`.

1. Candidates. Those of the bound's table (`bounds`), of the even split, and of devices in the order
   of a minimum cut (`min_cut_order`), each climbed. Where partitions are few, all others, too, the
   lowest bound first, until the bounds are above the best value known.
2. Ranking, by simulating named schedules and drafts.
3. Planning: the most promising get most of the time; one whose bound is no better gets none.
4. `exact`: every candidate whose bound is below the best value is planned until that is proven.

Climbing has the moves of AdaPtis (OctoPipe, arXiv 2509.23722), by its rule. If ranks idle so
differently that the lightest layer could even it out, layers move between stages, from busy ranks
to idle ones. Else, if most of the idle time is at the ends of the ranks' windows, the placement
moves: devices change places. Else it is the schedule's turn, which planning does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations, count
from math import fsum, inf

from megatron_zbpp.analysis.checker import check
from megatron_zbpp.ir import BW, Schedule
from megatron_zbpp.ir.formats import MANY
from megatron_zbpp.partitioning.bounds import Bounds
from megatron_zbpp.partitioning.space import Partition, Space, fused_costs
from megatron_zbpp.partitioning.strategies import min_cut_order
from megatron_zbpp.planner import cp_sat
from megatron_zbpp.planner.ends import lower_bound, replay, replay_whole
from megatron_zbpp.planner.limits import Budget, by_bound
from megatron_zbpp.planner.pattern import Pattern, dispatch
from megatron_zbpp.planner.plans import on_placement
from megatron_zbpp.planner.problem import EPSILON, Orders, Problem
from megatron_zbpp.planner.search import Search
from megatron_zbpp.schedules import find

_WHOLE = {  # by chunks a rank, whether in a loop: named schedules whose backward is whole
    (1, True): ('1f1b', '1f1b-pb'),
    (2, True): ('interleaved',),
    (2, False): ('1f1b-v',),
}
_SPLIT = {
    (1, True): ('zb-h1', 'zb-h2', '1f1b', '1f1b-pb'),
    (2, True): ('zb-interleaved', 'gis', 'interleaved'),
    (2, False): ('zb-v', 'v-half', '1f1b-v'),
}
_unweighted = lru_cache(64)(on_placement)  # one order whatever the costs
_DRAFTS = ((0.0, 1.0, inf), (0.5, 0.3, inf), (0.0, 2.0, 0.6))  # turn, delay, lead


@dataclass(frozen=True)
class Ranked:
    """A partition with the best schedule known for it."""

    partition: Partition  # what is where
    problem: Problem  # to plan
    value: float  # what the schedule takes, by the space's objective
    orders: Orders  # of the schedule, B and W apart
    schedule: Schedule | None  # it as it was built; None: it is a draft of the planner's


def rank(
    space: Space, partition: Partition, names: Iterable[str] = (), draft: bool = True
) -> Ranked | None:
    """Return the best of the named schedules on a partition, and of drafts; None: none fits.

    Without names, the schedules are those that suit the placement.
    """
    problem = space.problem(partition)
    if problem is None:
        return None
    best: Ranked | None = None
    key = min(problem.placement.num_chunks, 2), problem.placement.is_loop
    suited = names or (_WHOLE if space.fused else _SPLIT)[key]
    built = filter(None, (named_schedule(name, problem) for name in suited))
    tries: list[tuple[Orders, Schedule | None]] = [(problem.orders(each), each) for each in built]
    if draft and not names and not space.fused:
        drafts = (Pattern.straight(problem, *each) for each in _DRAFTS)
        tries += [(dispatch(problem, each), None) for each in drafts]
    for orders, schedule in tries:
        if not problem.fits(orders):
            continue
        on = problem
        whole = schedule is not None and any(
            p.kind == BW for order in schedule.passes for p in order[-1:]
        )
        if whole and not space.fused:
            if names:  # it is wanted as it is
                on = replace(problem, costs=fused_costs(problem.costs))
            else:
                schedule = None  # its B and W apart, which takes no longer
        result = replay(on, orders, cap=inf if best is None else best.value)
        if result is not None and (best is None or result[0] < best.value):
            best = Ranked(partition, problem, result[0], orders, schedule)
    if best is not None and space.objective == 'period':
        return Ranked(partition, problem, max(problem.work), best.orders, best.schedule)
    return best


def named_schedule(name: str, problem: Problem) -> Schedule | None:
    """Return a named schedule on the problem's placement; None: it is on another, or not for it."""
    family, sizes = find(name), (problem.placement, problem.num_microbatches)
    if 'costs' not in family.options:
        return _unweighted(family, *sizes)
    limit = min(problem.limits)
    adapts = 'memory_limit' in family.options and limit < inf
    return on_placement(family, *sizes, problem.costs, limit if adapts else None)


_FEW = 16  # ranks of which all pairs are looked at
_TRIED = 12  # neighbours that are simulated in a round, the best by their bound first


def climb(
    space: Space,
    bounds: Bounds,
    start: Partition,
    names: tuple[str, ...],
    go_on: Callable[[Ranked], bool],
) -> Ranked | None:
    """Return the best partition found from `start`, round by round as long as one helps.

    Without `names`, schedules are those that suit. `go_on` is called with each partition that was
    simulated; False ends the climb.
    """
    best = rank(space, start, names, draft=False)
    tried = {start}
    while best is not None and go_on(best):
        near = [other for other in _neighbours(space, best) if other not in tried]
        near.sort(key=bounds.of)
        better: Ranked | None = None
        for other in near[:_TRIED]:
            tried.add(other)
            if bounds.of(other) >= best.value:
                break
            found = rank(space, other, names, draft=False)
            if found is None:
                continue
            if found.value < (better or best).value - EPSILON:
                better = found
            if not go_on(found):
                return better or best
        if better is None:
            return best
        best = better
    return best


def _neighbours(space: Space, ranked: Ranked) -> Iterator[Partition]:
    """Yield partitions one move away, of the kind that the rule picks; in the end of both kinds."""
    idle, ends, inside = _bubbles(ranked)
    partition = ranked.partition
    lightest = min((layer.time for layer in space.layers if layer.time > 0), default=0.0)
    if max(idle) - min(idle) > lightest or ends <= inside or space.keep_order:
        yield from moved_layers(space, partition, idle)
    if not space.keep_order and not space.alike:
        yield from swapped(space, partition)


def _bubbles(ranked: Ranked) -> tuple[list[float], float, float]:
    """Return idle time of each rank, and of all ranks: at the ends, and between passes."""
    problem = ranked.problem
    value, ends = replay_whole(problem, ranked.orders)
    idle: list[float] = []
    outside = inside = 0.0
    for queues, work, first in zip(problem.queues, problem.work, problem.firsts, strict=True):
        last = max(ends[queue][-1] for queue in queues)
        idle.append(value - work)
        outside += first + max(0.0, value - last)
        inside += last - first - work
    return idle, outside, inside


def moved_layers(space: Space, partition: Partition, idle: Sequence[float]) -> Iterator[Partition]:
    """Yield partitions where one layer has left a stage for another, those between passing one on.

    From the busiest rank to the idlest first.
    """
    ranks, cuts = partition.placement.only_route, partition.cuts
    by_work = sorted(range(len(cuts)), key=lambda stage: idle[ranks[stage]])
    for giver in by_work[:_FEW]:
        for taker in by_work[::-1][:_FEW]:
            if giver == taker or cuts[giver] < 2:
                continue
            moved = list(cuts)
            moved[giver] -= 1
            moved[taker] += 1
            other = Partition(partition.placement, tuple(moved), partition.order)
            if space.allowed(other):
                yield other


def swapped(space: Space, partition: Partition) -> Iterator[Partition]:
    """Yield partitions where two unlike devices change places, or a run of them is reversed."""
    order, output = partition.order, max(layer.output for layer in space.layers)
    own = space.devices.signature(order, output), tuple(space.limits[d] for d in order)
    linked = bool(space.devices.latency or space.devices.bandwidth)
    for a, b in combinations(range(len(order)), 2):
        if len(order) > _FEW and (b - a) & (b - a - 1):
            continue  # of many devices, those whose distance is a power of two
        turned = [*order[:a], *order[a : b + 1][::-1], *order[b + 1 :]]
        exchanged = list(order)
        exchanged[a], exchanged[b] = order[b], order[a]
        for changed in (exchanged, turned) if linked and b > a + 1 else (exchanged,):
            key = space.devices.signature(changed, output), tuple(space.limits[d] for d in changed)
            if key != own:
                yield Partition(partition.placement, partition.cuts, tuple(changed))


_LISTED = 100_000  # partitions that are all looked at
_RANKING = 0.5  # share of the time, at most
_CLIMBING = 0.3  # share of that, where all partitions are looked at
_EXACT_PASSES = 4 * 16 * 3 * 2  # that the exact solver is asked for without `exact`
_SECONDS = 1e6  # what "until it is proven" means


class PartitionSearch:
    """A search for the best of a space."""

    def __init__(
        self,
        space: Space,
        names: tuple[str, ...] = (),
        top: int = 32,
        seconds: float = 60.0,
        seed: int = 0,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        """Begin a search; without `names`, of schedules that suit each placement, and of plans.

        `top` partitions are kept for planning. It takes `seconds` at most, but for a proof.
        """
        self.space = space
        self.bounds = Bounds(space)
        self.kept: list[Ranked] = []
        self.interrupted = False  # whether Ctrl-C ended it
        self.repeats = True  # whether the same inputs give the same again
        self._names = names
        self._plans = not (names or space.fused or space.objective == 'period')
        self._top = top
        self._seed = seed
        self._budget = Budget(seconds, progress)
        self._proven: dict[Partition, float] = {}  # bounds that the exact solver has raised
        self._listed = space.size <= _LISTED
        self._charge = space.num_microbatches * len(space.devices) * 30  # of a simulation, a chunk

    def find(self, exact: bool = False) -> tuple[Ranked, float]:
        """Return the best that there is time for, or that there is, and a bound of all."""
        if exact and not self._listed:
            raise ValueError(
                f'{self.space.size:.3g} partitions are too many to prove one the best, more than '
                f'{_LISTED}: leave --exact out, or give fewer --placements, --keep-order where '
                'devices differ, or layers in larger pieces'
            )
        if exact and self._plans and not cp_sat.available():
            raise ValueError('a proof needs OR-tools: pip install ortools')
        share = _RANKING if self._plans and not exact else 1.0
        try:
            self._rank(self._budget.split_off(share), exact)
            if not self.kept:
                raise ValueError(_no_room(self.space))
            if self._plans:
                self._plan(exact)
        except KeyboardInterrupt:
            if not self.kept:
                raise
            self.interrupted = True
        self.repeats = not (self._budget.overran or self.interrupted)
        best = self.kept[0]
        return best, min(best.value, self._bound(exact and not self.interrupted))

    def _keep(self, found: Ranked | None) -> None:
        """Remember a partition, the best first; of one partition the best schedule."""
        if found is not None:
            own = [known for known in self.kept if known.partition == found.partition]
            others = [known for known in self.kept if known.partition != found.partition]
            best = min([found, *own], key=_by_value)
            self.kept = sorted([*others, best], key=_by_value)[: self._top]

    def _rank(self, budget: Budget, whole: bool) -> None:
        """Fill `kept`: with the best of some climbs, and of all partitions where they are few."""
        if not self._listed:
            self._climb(budget)
            for known in self.kept[: self._top]:
                self._keep(rank(self.space, known.partition, self._names))
            return
        self._climb(budget.split_off(_CLIMBING))
        every = ((self.bounds.of(partition), partition) for partition in self.space.partitions())
        for partition in by_bound(every, self._best):
            found = rank(self.space, partition, self._names)
            if found is not None and not self._go_on(found, budget) and not whole:
                break

    def _climb(self, budget: Budget) -> None:
        for start in map(self.space.repaired, self._starts()):
            if not self.space.allowed(start):
                continue
            found = climb(
                self.space, self.bounds, start, self._names, lambda x: self._go_on(x, budget)
            )
            if found is None:
                budget.charge(self._charge)
            if budget.left <= 0:
                break

    def _best(self) -> float:
        return self.kept[0].value - EPSILON if self.kept else inf

    def _go_on(self, found: Ranked, budget: Budget) -> bool:
        """Keep a partition that was simulated, and spend that; return whether there is more."""
        self._keep(found)
        return budget.charge(self._charge * found.problem.placement.num_chunks)

    def _starts(self) -> Iterator[Partition]:
        space = self.space
        output = max(layer.output for layer in space.layers)
        given = tuple(range(len(space.devices)))
        orders = [given] if space.keep_order else [min_cut_order(space.devices, output), given]
        for placement in space.placements:
            if placement.num_chunks == 1:
                _, cuts, kinds = self.bounds.chain()
                for order in orders:
                    yield Partition(placement, cuts, self._assigned(kinds, order))
            for order in dict.fromkeys(orders):
                yield space.balanced(placement, order)
                yield replace(space.even(placement), order=order)

    def _assigned(self, kinds: Sequence[object], order: Sequence[int]) -> tuple[int, ...]:
        left = list(order)
        chosen: list[int] = []
        for factors in kinds:
            alike = (d for d in left if self.space.devices.devices[d].factors == factors)
            device = next(alike, left[0])
            left.remove(device)
            chosen.append(device)
        return tuple(chosen)

    def _plan(self, exact: bool) -> None:
        """Plan the orders of the most promising partitions; `exact`: of all that may be better."""
        most = self.kept[0].value * 1.2
        searches = [
            (Search(ranked.problem, [ranked.orders], self._seed), ranked)
            for ranked in self.kept
            if ranked.value <= most
        ]
        for at, (search, ranked) in enumerate(searches):
            if search.bound >= self._best():
                continue
            share = 0.5 if at < len(searches) - 1 else 1.0
            part = self._budget.split_off(share * (0.2 if exact else 1.0))
            self._improve(search, ranked, part)
        if exact:
            self._prove()

    def _improve(self, search: Search, ranked: Ranked, budget: Budget) -> None:
        """Search on one partition; where it is small, ask the exact solver, too."""
        small = search.problem.num_passes <= _EXACT_PASSES and cp_sat.available()
        search.improve(budget.split_off(0.3 if small else 1.0))
        if small and not search.done and search.bound < self._best():
            best = min(self.kept[0].value, search.best.value)
            answer = search.solve(best, budget.effort, budget.seconds)
            budget.spend_effort(answer.effort, answer.overran)
            self._proven[ranked.partition] = answer.bound
        if search.best.value < ranked.value - EPSILON:
            value, orders = search.best.value, search.best.orders
            self._keep(replace(ranked, value=value, orders=orders, schedule=None))

    def _prove(self) -> None:
        """Solve every partition whose bound is below the best value, the lowest bound first."""
        for bound, partition, problem in self._open():
            if max(bound, self._proven.get(partition, 0.0)) >= self._best():
                continue
            known = next((k for k in self.kept if k.partition == partition), None)
            known = known or rank(self.space, partition)
            assert known is not None
            search = Search(problem, [known.orders], self._seed)
            for effort in (2.0**k for k in count(4)):
                answer = search.solve(self.kept[0].value, effort, _SECONDS)
                if answer.orders is not None:
                    solution = search.best
                    self._keep(Ranked(partition, problem, solution.value, solution.orders, None))
                if search.bound >= min(self.kept[0].value, search.best.value) - EPSILON:
                    break
            self._proven[partition] = search.bound

    def _open(self) -> list[tuple[float, Partition, Problem]]:
        """Return the partitions whose bound is below the best value, the lowest first."""
        best = self._best()
        found: list[tuple[float, Partition, Problem]] = []
        for partition in self.space.partitions():
            bound = self.bounds.of(partition)
            problem = self.space.problem(partition) if bound < best else None
            if problem is None:
                continue
            bound = max(bound, lower_bound(problem))
            if bound < best:
                found.append((bound, partition, problem))
        return sorted(found, key=lambda entry: entry[0])

    def _bound(self, whole: bool) -> float:
        best = self.kept[0].value
        if not self._listed or self.space.objective == 'period':
            return self.bounds.overall
        lowest = best if whole and self._plans else inf
        for bound, partition, _ in self._open():
            lowest = min(lowest, max(bound, self._proven.get(partition, 0.0)))
        return min(best, lowest)


def _by_value(ranked: Ranked) -> tuple[float, int]:
    """Return a sort key: the value, and of equal ones the number of messages."""
    return round(ranked.value, 9), ranked.problem.placement.num_stages


def schedule_of(ranked: Ranked) -> Schedule:
    """Return the schedule of the best, checked."""
    schedule = ranked.schedule or ranked.problem.schedule(ranked.orders, 'planned')
    check(schedule)
    return schedule


def _no_room(space: Space) -> str:
    devices, limits = space.devices.devices, space.limits
    each = [layer.activation + layer.parameters for layer in space.layers]
    least = max(*each, fsum(each) / len(devices))
    most = {min(own.memory, limit): 0 for own, limit in zip(devices, limits, strict=True)}
    more = ' with parameters' if any(layer.parameters for layer in space.layers) else ''
    unit = ', which is bytes: 70GiB is more than 70' if least >= MANY else ''
    return (
        'no partition holds one microbatch on every rank within its memory of '
        f'{", ".join(f"{own:g}" for own in most)} (in the unit of the layers{unit}): some rank '
        f'takes {least:.5g} or more{more}; give more memory, more pipeline ranks, or smaller '
        'microbatches'
    )
