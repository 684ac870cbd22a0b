"""Brute force that check, lower and simulate must agree with: slow and obvious.

Nothing here knows how the package decides; it tries every interleaving of small cases.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random

from megatron_zbpp.analysis.program import Program, Receive, Send
from megatron_zbpp.ir import BW, B, F, Pass, Placement, Schedule, W
from megatron_zbpp.ir.costs import Costs


def legal(schedule: Schedule) -> bool:
    return _complete(schedule) and _in_microbatch_order(schedule) and _always_ends(schedule)


def _complete(schedule: Schedule) -> bool:
    """Each stage's rank does for each microbatch F, and B with W or BW; or everywhere F only."""
    stages, microbatches = range(schedule.num_stages), range(schedule.num_microbatches)
    for rank, p in schedule:
        if p.stage not in stages or schedule.placement.only_route[p.stage] != rank:
            return False
        if p.microbatch not in microbatches or p.kind not in (F, B, W, BW):
            return False
    found = Counter(p for _, p in schedule)
    wanted = [(F, B, W), (F, BW)] if any(p.kind != F for p in found) else [(F,)]
    return all(
        tuple(kind for kind in (F, B, W, BW) for _ in range(found[Pass(kind, stage, i)])) in wanted
        for stage in stages
        for i in microbatches
    )


def _in_microbatch_order(schedule: Schedule) -> bool:
    """Forwards, input gradients and weight gradients of each stage: 0, 1, 2, ..."""
    for kinds in ({F}, {B, BW}, {W, BW}):
        for stage in range(schedule.num_stages):
            done = [p.microbatch for _, p in schedule if p.kind in kinds and p.stage == stage]
            if done != sorted(done):
                return False
    return True


def needs(p: Pass, everything: Iterable[Pass]) -> set[Pass]:
    kind, stage, i, _ = p
    wanted = {
        F: {Pass(F, stage - 1, i)},
        B: {Pass(F, stage, i), Pass(B, stage + 1, i), Pass(BW, stage + 1, i)},
        W: {Pass(B, stage, i)},
    }
    wanted[BW] = wanted[B]
    return wanted[kind].intersection(everything)


def _always_ends(schedule: Schedule) -> bool:
    """Whether all ranks reach their end, whichever of those that can act next acts next."""
    everything = {p for _, p in schedule}

    def can_act(state: tuple[int, ...], rank: int) -> bool:
        done = {p for order, at in zip(schedule.passes, state, strict=True) for p in order[:at]}
        return needs(schedule.passes[rank][state[rank]], everything) <= done

    return _never_stuck(list(map(len, schedule.passes)), can_act)


def programs_always_end(
    programs: tuple[Program, ...], synchronises: bool = False, in_order: bool = False
) -> bool:
    """The same of lowered programs, with every send waiting until its receive has been posted.

    The k-th send of a channel meets the k-th receive, and they must mean the same message. A pass
    may wait for all receives of its rank (synchronises), a receive for the one before it (in
    order).
    """

    def channel(rank: int, at: int, kind: type, peer: int, saved: bool | None = None) -> list[Pass]:
        return [
            i.consumer
            for i in programs[rank][:at]
            if isinstance(i, kind) and i.peer == peer and saved in (None, i.saved)
        ]

    def can_act(state: tuple[int, ...], rank: int) -> bool:
        def arrived(peer: int, saved: bool) -> bool:
            """Whether all that is posted from there has been sent."""
            posted = channel(rank, state[rank], Receive, peer, saved)
            return channel(peer, state[peer], Send, rank, saved) == posted

        instruction = programs[rank][state[rank]]
        if isinstance(instruction, Receive):
            return not in_order or arrived(instruction.peer, instruction.saved)
        if isinstance(instruction, Send):
            peer, saved = instruction.peer, instruction.saved
            sent = channel(rank, state[rank] + 1, Send, peer, saved)
            posted = channel(peer, state[peer], Receive, rank, saved)
            return posted[: len(sent)] == sent
        if not isinstance(instruction, Pass):
            return True
        peers = range(len(programs))
        if synchronises and not all(arrived(r, saved) for r in peers for saved in (False, True)):
            return False
        awaited = {
            i.peer for i in programs[rank] if isinstance(i, Receive) and i.consumer == instruction
        }
        return all(instruction in channel(peer, state[peer], Send, rank) for peer in awaited)

    return _never_stuck(list(map(len, programs)), can_act)


def _never_stuck(lengths: list[int], can_act: Callable[[tuple[int, ...], int], bool]) -> bool:
    """Visits every state that `lengths` of programs can reach; False if one has no way on."""
    seen = set()
    stack = [(0,) * len(lengths)]
    while stack:
        state = stack.pop()
        if state in seen:
            continue
        seen.add(state)
        able = [r for r, at in enumerate(state) if at < lengths[r] and can_act(state, r)]
        if not able and list(state) != lengths:
            return False
        stack += [tuple(at + (rank == r) for rank, at in enumerate(state)) for r in able]
    return True


def spans(
    schedule: Schedule, costs: Costs, sizes: Sequence[float] = ()
) -> tuple[tuple[tuple[float, float], ...], ...]:
    """Start and end of each pass, by correcting guesses until none is too early."""
    ranks, everything = schedule.placement.only_route, {p for _, p in schedule}

    def time(p: Pass) -> float:
        whole = sum(costs.times[kind][p.stage] for kind in ((B, W) if p.kind == BW else (p.kind,)))
        return whole * (sizes[p.microbatch] if sizes else 1)

    starts, changed = dict.fromkeys(everything, 0.0), True
    while changed:
        changed = False
        for order in schedule.passes:
            for before, p in zip((None, *order), order, strict=False):
                ready = starts[before] + time(before) if before else 0.0
                for q in needs(p, everything):
                    edge = 0.0
                    if ranks[q.stage] != ranks[p.stage]:
                        there, back = dict(enumerate(costs.hops)).get(min(q.stage, p.stage), (0, 0))
                        hop = there if q.stage < p.stage else back
                        edge = costs.comm + costs.message + hop
                    ready = max(ready, starts[q] + time(q) + edge)
                if ready > starts[p]:
                    starts[p], changed = ready, True
    return tuple(
        tuple((starts[p], starts[p] + time(p)) for p in order) for order in schedule.passes
    )


def random_schedule(random: Random, placement: Placement, num_microbatches: int) -> Schedule:
    """Any legal schedule, B and W fused on some stages and microbatches: one possible run of it."""
    fused = random.choice((0.0, 0.5, 1.0))
    todo = set()
    for stage in range(placement.num_stages):
        for i in range(num_microbatches):
            kinds = (F, BW) if random.random() < fused else (F, B, W)
            todo.update(Pass(kind, stage, i) for kind in kinds)
    orders: list[list[Pass]] = [[] for _ in range(placement.num_ranks)]
    for p in _any_order(random, todo):
        orders[placement.only_route[p.stage]].append(p)
    return Schedule.of('random', placement, num_microbatches, orders)


def _any_order(random: Random, todo: set[Pass]) -> Iterator[Pass]:
    """The passes of `todo`, each after those of them that it must follow."""
    everything = frozenset(todo)
    while todo:
        p = random.choice(sorted(p for p in todo if _may_come_next(p, todo, everything)))
        todo.remove(p)
        yield p


def _may_come_next(p: Pass, todo: set[Pass], everything: frozenset[Pass]) -> bool:
    """Whether all that `p` needs is done, and its jobs for all earlier microbatches."""
    jobs = [kinds for kinds in ({F}, {B, BW}, {W, BW}) if p.kind in kinds]
    earlier = {Pass(k, p.stage, i) for kinds in jobs for k in kinds for i in range(p.microbatch)}
    return todo.isdisjoint(earlier | needs(p, everything))


def shuffled(random: Random, schedule: Schedule) -> Schedule:
    orders = [list(order) for order in schedule.passes]
    for _ in range(random.randint(1, 3)):
        order = random.choice(orders)
        i, j = random.randrange(len(order)), random.randrange(len(order))
        order[i], order[j] = order[j], order[i]
    return Schedule.of('shuffled', schedule.placement, schedule.num_microbatches, orders)


def reordered(random: Random, schedule: Schedule) -> Schedule:
    """The same passes in orders that are right as far as each rank alone can tell."""
    orders = [_any_order(random, set(order)) for order in schedule.passes]
    return Schedule.of('reordered', schedule.placement, schedule.num_microbatches, orders)


def all_orders(
    placement: Placement, num_microbatches: int, kinds: tuple[str, ...]
) -> Iterator[Schedule]:
    ranks = [
        [Pass(k, s, i) for s in placement.stages(r) for i in range(num_microbatches) for k in kinds]
        for r in range(placement.num_ranks)
    ]
    for orders in itertools.product(*map(itertools.permutations, ranks)):
        yield Schedule.of('permuted', placement, num_microbatches, orders)
