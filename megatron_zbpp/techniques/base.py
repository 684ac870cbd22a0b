"""The value of a technique, all that others know of it; times of copies where nobody says them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_zbpp.ir import B, F, Schedule, Task, W
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.graph import HOST, PARTNER, TRANSFERS, Graph
from megatron_zbpp.techniques import Amount, chunks_of


class Life(NamedTuple):
    """The activation of a microbatch of a stage, whatever is done with it."""

    held: float  # how much it is
    forward: float  # time of F, on its rank
    backward: float  # time of B
    there: float  # least time from the start of F to the end of B
    speed: float  # of its rank
    stays: bool  # nothing moves what F saves, where it runs again


class Way(NamedTuple):
    """Needs of one microbatch of a stage, by one technique."""

    passes: float  # time of them, beside F, B and W
    copies: float  # time of them
    held: float  # memory x time, between F and B


def lack_of_times(costs: Costs, kinds: Iterable[str]) -> str | None:
    """Return why costs do not say how long passes of these kinds take; None: they do."""
    missing = [kind for kind in kinds if kind not in costs.times]
    if not missing:
        return None
    return (
        f'costs have no times of {" and ".join(missing)}: give a file with "times": '
        f'{{"{missing[0]}": [...]}}'
    )


@dataclass(frozen=True, eq=False)
class Technique:
    """A technique: all that others know of it."""

    name: str  # by which a user asks for it
    words: str  # what becomes of activations, for people
    # WHAT it does: a function from graph to graph, whose name files have. A technique of one's own
    # has that name, too.
    graph: Callable[..., Graph]
    # `place(schedule, stages, costs, limits)` puts its passes for these stages into orders: where a
    # rank holds more than its limit, or wherever there is time
    place: Callable[[Schedule, Collection[int], Costs, Sequence[float]], Schedule]
    to: str | None = None  # the pool to which it moves activations; None: it moves none
    # `request(schedule, amount, costs)` places as much as a user asks for; None: a user cannot ask
    # for it by an amount, a planner may
    request: Callable[[Schedule, Amount, Costs | None], Schedule] | None = None
    free: str = ''  # the word by which a user asks for what costs no time; empty: there is none
    # why the costs do not say what it takes; None: they do
    lacks: Callable[[Costs], str | None] = lambda costs: None
    # of costs, a stage and its activation, the least that it needs; None: it has no bound
    way: Callable[[Costs, int, Life], Way] | None = None
    # further costs by which named schedules that have it are planned
    variants: Callable[[Costs], Iterable[Costs]] = lambda costs: ()
    # `module:function` that solves small instances of it alone; see `planner.actions`
    exact: str = ''

    @property
    def moves(self) -> bool:
        """True where it moves what a forward saves."""
        return self.to is not None

    @property
    def pairs(self) -> bool:
        """True where what leaves one rank's memory is held by its partner's."""
        return self.to == PARTNER

    def require(self, amount: Amount, num_chunks: int) -> None:
        """Raise ValueError unless a user may ask for that amount, of so many chunks of a rank."""
        if not self.free or amount != self.free:
            chunks_of(amount, num_chunks, self.name, (self.free,) if self.free else ())


USUAL_RATIO = 1.0
"""Time of a copy out and back over that of F, B and W, where nobody says it."""


def way_by_copies(costs: Costs, stage: int, life: Life, pool: str) -> Way:
    """Return needs of what is held during F, until it has left, and from coming back to B's end."""
    copies = sum(costs.time(Task(kind, stage)) for kind in TRANSFERS[pool]) / life.speed
    return Way(0.0, copies, life.held * min(life.there, life.forward + copies + life.backward))


def copy_ratio(costs: Costs) -> float:
    """Return k of the worst stage: time of an activation's O and L over that of its F, B and W."""
    works = zip(costs.times[F], costs.times[B], costs.times[W], strict=True)
    ways = zip(*(costs.times[kind] for kind in TRANSFERS[HOST]), strict=True)
    found = (sum(way) / sum(work) for way, work in zip(ways, works, strict=True) if sum(work))
    return max(found, default=0.0)


def with_copies(costs: Costs, ratio: float = USUAL_RATIO, between: Iterable[str] = ()) -> Costs:
    """Return `costs` with times of copies, where they have none: half of `ratio` (F + B + W) each.

    `ratio` is the time of a copy out and back, over that of F, B and W of what is copied; kinds of
    copies in `between` take as long.
    """
    if not ratio > 0:
        raise ValueError(f'a copy both ways in {ratio} of the time of F, B and W: give more than 0')
    if TRANSFERS[HOST].out in costs.times:
        return costs
    works = zip(costs.times[F], costs.times[B], costs.times[W], strict=True)
    ways = tuple(ratio * sum(work) / 2 for work in works)
    return costs.with_times(**dict.fromkeys((*TRANSFERS[HOST], *between), ways))
