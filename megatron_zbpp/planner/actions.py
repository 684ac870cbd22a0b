"""One search over orders and over what is done with activations, stage by stage.

What a stage saves between F and B is kept, or a technique takes it: it goes to the host or to the
partner, or is made again. What passes cost with another setting of the whole model, such as
Megatron's selective recomputation, are further candidates on the same placements. Orders to begin
with are the named schedules and what the planner finds under several limits above the one that is
asked for; each is rated with its actions by the simulator, copy engines included, and its memory by
its order alone. From the best of them on, actions of single stages are changed. (AdaPipe, ASPLOS
2024, chooses recomputation per stage so, for 1F1B; OptPipe, arXiv 2510.05186, asks for orders and
offloads at once.) Named schedules that move activations take part as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from math import inf
from random import Random

from megatron_zbpp.ir import Schedule
from megatron_zbpp.planner.action_search import ActionSearch
from megatron_zbpp.planner.budget import Budget
from megatron_zbpp.planner.limits import Candidate, Graphs, Limit, same_limits, with_room
from megatron_zbpp.planner.plans import Plan, PlanningInterrupted, plan, require_question
from megatron_zbpp.techniques import find_all
from megatron_zbpp.techniques.base import Technique

_ABOVE = (1.0, 1.5, 2.0, 3.0, inf)  # limits of the orders to begin with, over the one asked for
_ORDERS = 0.5  # share of the time that these get
_OTHERS = 0.25  # of slices: that of orders under higher limits
_NAMED = 0.5  # of the rest, the most that named schedules get where they take long
_BRIEF = 0.3  # of what is left, that is searched before
_EXACT = 0.8  # and of what is left then, that the exact solver gets, where it can do it


def plan_within(
    candidates: Sequence[Candidate],
    num_microbatches: int,
    *,
    actions: Collection[str] = (),
    memory_limit: Limit = None,
    objective: str = 'makespan',
    seconds: float = 20.0,
    seed: int = 0,
    starts: Iterable[Schedule] = (),
    graph: Graphs | None = None,
    progress: Callable[[float], None] | None = None,
) -> Plan:
    """Return the best schedule found, in which activations may be elsewhere between F and B.

    Args:
        candidates: placements that may be used, each with the costs of its stages, and of what
            `actions` take.
        num_microbatches: m.
        actions: names of the techniques that are allowed; none: see `plan`.
        memory_limit: see `plan`.
        objective: see `plan`.
        seconds: see `plan`.
        seed: see `plan`.
        starts: schedules of m microbatches to be at least as good as, where they keep the limit.
        graph: see `plan`; with `actions` that of slices, or none.
        progress: called now and then with the share of the budget that is spent.

    Raises:
        PlanningInterrupted: by Ctrl-C; it has the best plan by then.
        ValueError: as `plan` does, an unknown action, or costs that do not say what one takes.
    """
    if not actions or memory_limit is None:
        return plan(
            candidates,
            num_microbatches,
            memory_limit=memory_limit,
            objective=objective,
            seconds=seconds,
            seed=seed,
            starts=starts,
            graph=graph,
            progress=progress,
        )
    techniques = _known(candidates, actions, objective)
    search = ActionSearch(candidates, num_microbatches, memory_limit, objective, techniques, graph)
    rest = 1 - _ORDERS - (_OTHERS if graph is not None else 0)
    whole, length, repeats = Budget(seconds, progress), seconds * rest, True

    def tell(_: float) -> None:
        whole.on_time()  # reports the share of the whole time

    try:
        for schedule in starts:
            search.start(schedule)
        if search.is_small:
            search.start_named()
        else:
            naming = Budget(length * _NAMED, tell)
            search.start_named(naming)
            repeats = not naming.overran
        asked = memory_limit, objective, seconds, seed, graph
        for found in _plain_plans(candidates, num_microbatches, *asked, tell):
            search.start(found.schedule)
            repeats = repeats and found.repeats
        late = 0.0 if search.is_small else length - whole.seconds
        budget = Budget(length, tell, reserve=max(late, 0.0))
        search.climb(budget.split_off(_BRIEF), Random(seed))
        search.solve(budget.split_off(_EXACT))
        search.climb(budget, Random(seed + 1))
    except KeyboardInterrupt:
        if search.best is None:
            raise KeyboardInterrupt from None  # what it has is above the limit
        raise PlanningInterrupted(search.made(repeats=False)) from None
    return search.made(repeats and not budget.overran)


def _plain_plans(
    candidates: Sequence[Candidate],
    num_microbatches: int,
    limit: Limit,
    objective: str,
    seconds: float,
    seed: int,
    graph: Graphs | None,
    progress: Callable[[float], None] | None,
) -> Iterator[Plan]:
    """Yield plans without actions under limits that actions may bring down to the one asked for."""
    shares = [_ORDERS / len(_ABOVE)] * len(_ABOVE)
    if graph is not None:  # orders of slices take longer to find, and fewer need actions
        shares = [_ORDERS, *[_OTHERS / len(_ABOVE)] * (len(_ABOVE) - 1)]
    for share, higher in zip(shares, _higher(limit, candidates[0][0].num_ranks), strict=True):
        if _any_fits(candidates, higher, graph):
            yield plan(
                candidates,
                num_microbatches,
                memory_limit=higher,
                objective=objective,
                seconds=seconds * share,
                seed=seed,
                graph=graph,
                progress=progress,
            )


def _higher(limit: Limit, num_ranks: int) -> Iterator[list[float]]:
    """Yield limits for orders that actions bring below the one asked for."""
    for above in _ABOVE:
        asked = same_limits(limit, num_ranks)
        yield [inf] * num_ranks if above == inf else [above * amount for amount in asked]


def _any_fits(candidates: Sequence[Candidate], limits: list[float], graph: Graphs | None) -> bool:
    try:
        return bool(with_room(candidates, limits, graph))
    except ValueError:
        return False


def _known(
    candidates: Sequence[Candidate], actions: Collection[str], objective: str
) -> tuple[Technique, ...]:
    require_question(candidates, objective)
    techniques = find_all(actions)
    for technique in techniques:
        for _, costs in candidates:
            if lack := technique.lacks(costs):
                raise ValueError(f'{technique.name}, but {lack}')
    return techniques
