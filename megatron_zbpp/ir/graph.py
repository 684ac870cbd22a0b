"""Graphs: the tasks of one microbatch, with the needs and the memory of each.

A graph is a value. `chain` makes that of a plain pipeline; a technique (`ir.techniques`) is a
function from graph to graph, and techniques compose. Nothing else in this package knows what a kind
of pass needs or holds: whoever wants to know asks the graph, or `Compiled`, its flat form.

>>> graph = chain(2)
>>> [str(need.task) for need in graph.needs[Task('B', 0)]]
['0F', '1B']
>>> graph.tasks('BW', 1)
(Task(kind='B', stage=1, slice=0), Task(kind='W', stage=1, slice=0))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import NamedTuple

F, B, W, BW = 'F', 'B', 'W', 'BW'
R = 'R'  # a forward again
DEVICE, HOST, PARTNER = 'device', 'host', 'partner'
COMPUTE, COPY = 'compute', 'copy'
KV, KV_GRADIENT = 'kv', 'kv_gradient'  # amounts of all slices together: they move with none
BROADCAST, GATHER, REDUCE = 'broadcast', 'all-gather', 'reduce'


class Transfers(NamedTuple):
    """Kinds of the passes that move what a forward holds elsewhere and back."""

    out: str
    back: str


TRANSFERS: Mapping[str, Transfers] = {  # by pool
    HOST: Transfers('O', 'L'),
    PARTNER: Transfers('E', 'K'),
}


class Task(NamedTuple):
    """A node: what is done of one microbatch."""

    # F forward, B gradient of the input, W gradient of the weights, ...: see `Graph.kinds`
    kind: str
    # where in the model; beyond the last stage, what each rank has one of (`num_stages` + rank),
    # such as a shard of the vocabulary
    stage: int
    slice: int = 0  # of the sequence

    def __str__(self) -> str:
        return f'{self.stage}{self.kind}' + (f'.{self.slice}' if self.slice else '')


class Need(NamedTuple):
    """An edge into a task."""

    task: Task  # that must end before
    # what it sends if it is on another rank; None: an order only, nothing travels
    message: str | None = None
    # how many microbatches before; 0: of the same one. Of a kind that comes once in several
    # microbatches it is the occurrence of the group of that microbatch.
    back: int = 0


class Collective(NamedTuple):
    """An exchange of a message among all ranks at once, once a microbatch and slice."""

    # `BROADCAST` from the one pass that makes the message, `GATHER` of what all make to all, or
    # `REDUCE`, the sum of what all make, to the one pass that takes it
    operation: str
    # the message whose collective comes first, since its result is needed to contribute
    after: str = ''


class Hold(NamedTuple):
    """An effect of a task on memory.

    At its start if all its changes of a pool add up to more, at its end if to less. Of the device's
    memory that holds in the order of the rank: what is copied in begins when the passes before it
    have ended, and those behind what is copied out wait for its end. So the order alone bounds what
    a rank holds, whatever the times are.
    """

    pool: str  # 'device', 'host' or 'partner'
    amount: str  # which of the amounts in `Costs`, such as 'activation'
    change: int  # how many of them: 1 takes one, -1 gives one back


@dataclass(frozen=True)
class Kind:
    """A kind of task: what all tasks of it have in common."""

    words: str  # for people
    # kinds of the tasks that one pass of this kind does at once; none: its own
    parts: tuple[str, ...] = ()
    engine: str = COMPUTE  # 'compute', or 'copy', which runs beside it
    # whether a stage's must come in microbatch order, where roundings or dropout depend on it
    in_order: bool = True
    every: int = 1  # it occurs once in so many microbatches, with the last of them
    # it changes the weights of its stage, so that each copy of them has to do it
    of_weights: bool = field(default=False, repr=False)
    # a microbatch may do without it and without all that is optional beside it; who needs it then
    # needs what that needs
    optional: bool = False
    # time that it usually takes, in forwards of a full rank: by that programs are written where no
    # costs are known
    usual: float = field(default=0.0, repr=False)


class Applied(NamedTuple):
    """A technique that made a graph of another: its name, and its arguments in order."""

    name: str
    arguments: tuple[object, ...]


@dataclass(frozen=True)
class Graph:
    """The tasks of one microbatch."""

    num_stages: int  # S
    # that made it of `chain(num_stages)`, first to last; two graphs are equal if these are
    techniques: tuple[Applied, ...]
    # of each task, in the order in which they are told to people
    needs: Mapping[Task, tuple[Need, ...]] = field(compare=False, repr=False)
    holds: Mapping[Task, tuple[Hold, ...]] = field(compare=False, repr=False)  # of each task
    # by name, in the order of a legend
    kinds: Mapping[str, Kind] = field(compare=False, repr=False)
    # messages that all ranks exchange at once, by name; others go from one pass to another
    collectives: Mapping[str, Collective] = field(
        default_factory=dict[str, Collective], compare=False, repr=False
    )

    def __post_init__(self) -> None:
        for name in ('needs', 'holds', 'kinds', 'collectives'):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def tasks(self, kind: str, stage: int, slice: int = 0) -> tuple[Task, ...]:
        """Return the tasks of a pass of `kind`."""
        return tuple(Task(part, stage, slice) for part in self.kinds[kind].parts or (kind,))

    def occurrence(self, need: Need, microbatch: int) -> int:
        """Return the microbatch with which comes what `microbatch` needs: the last of a group."""
        every, wanted = self.kinds[need.task.kind].every, microbatch - need.back
        return wanted - wanted % every + every - 1

    @cached_property
    def doers(self) -> Mapping[str, tuple[str, ...]]:
        """The kinds of passes that do each kind of task: its own first."""
        return {
            kind: (kind, *(name for name, other in self.kinds.items() if kind in other.parts))
            for kind, own in self.kinds.items()
            if not own.parts
        }

    @cached_property
    def num_slices(self) -> int:
        """The number of parts into which each sequence is cut."""
        return 1 + max(task.slice for task in self.needs)

    @cached_property
    def last_slice_first(self) -> frozenset[str]:
        """Kinds whose slices come in descending order: they need, or do, what needs a later one."""
        found = {
            task.kind
            for task, needs in self.needs.items()
            if any(need.task.slice > task.slice for need in needs)
        }
        before: set[str] = set()
        while found != before:
            before = set(found)
            found |= {
                task.kind
                for task, needs in self.needs.items()
                if any(need.task.kind in before and not need.back for need in needs)
            }
        return frozenset({*found, *(n for n, kind in self.kinds.items() if found & {*kind.parts})})

    @cached_property
    def evaluated(self) -> frozenset[str]:
        """Kinds of tasks without a backward: F, what each rank has one of, and what these need."""
        needed: dict[str, set[str]] = {}
        for task, needs in self.needs.items():
            own = needed.setdefault(task.kind, set())
            own |= {need.task.kind for need in needs if not need.back}
        for _ in needed:
            for own in needed.values():
                own |= set().union(*(needed[kind] for kind in own))
        of_ranks = {task.kind for task in self.needs if task.stage >= self.num_stages}
        last = {F, *(kind for kind in of_ranks if B not in needed[kind])}
        return frozenset(last.union(*(needed[kind] for kind in last)))

    @cached_property
    def sites(self) -> range:
        """The stages, and behind them what each rank has one of."""
        return range(1 + max(task.stage for task in self.needs))

    @cached_property
    def feeds(self) -> Mapping[Task, tuple[tuple[Task, Need], ...]]:
        """The tasks that need each task, each with that need."""
        feeds: dict[Task, list[tuple[Task, Need]]] = {task: [] for task in self.needs}
        for task, needs in self.needs.items():
            for need in needs:
                feeds[need.task].append((task, need))
        return {task: tuple(fed) for task, fed in feeds.items()}


@lru_cache(64)
def chain(num_stages: int) -> Graph:
    """Return the graph of a plain pipeline: F down the stages, B back up, W after its B.

    (Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.1: B hands on the gradient of the
    input, W needs it of its own stage only.) F holds an activation; what W needs of it is
    'retained' from the end of B on.
    """
    stages = range(num_stages)
    needs: dict[Task, tuple[Need, ...]] = {}
    for stage in stages:
        needs[Task(F, stage)] = (Need(Task(F, stage - 1), 'activation'),) if stage else ()
    for stage in stages:
        own = Need(Task(F, stage))
        above = (Need(Task(B, stage + 1), 'gradient'),) if stage + 1 < num_stages else ()
        needs[Task(B, stage)] = (own, *above)
    for stage in stages:
        needs[Task(W, stage)] = (Need(Task(B, stage)),)
    held = {
        F: (Hold(DEVICE, 'activation', 1),),
        B: (Hold(DEVICE, 'activation', -1), Hold(DEVICE, 'retained', 1)),
        W: (Hold(DEVICE, 'retained', -1),),
    }
    kinds = {
        F: Kind('forward'),
        B: Kind('input gradient'),
        W: Kind('weight gradient'),
        BW: Kind('whole backward', parts=(B, W)),
    }
    return Graph(num_stages, (), needs, {task: held[task.kind] for task in needs}, kinds)


class Link(NamedTuple):
    """A dependency of a pass."""

    row: int  # of the task
    back: int  # how many microbatches before
    stage: int  # of that task
    message: str | None  # as in `ir.graph.Need`


class Step(NamedTuple):
    """The effects of a pass of one kind, stage and slice."""

    rows: tuple[int, ...]  # that somebody waits for, of the tasks that it does
    links: tuple[Link, ...]  # what it waits for, without what those wait for themselves
    engine: str  # that it occupies


@dataclass(frozen=True)
class Compiled:
    """A graph in flat numbers, for those that ask of every pass of a schedule.

    Each task is a *row*; the n-th microbatch is entry n of it. What a pass does and needs depends
    on its kind, stage and slice alone, and on the route of its microbatch where there are two.
    """

    graph: Graph  # of which it was made
    rows: Mapping[Task, int]  # number of each task
    # by kind, and there by `stage * num_slices + slice`; None where the graph has none
    steps: Mapping[str, tuple[Step | None, ...]]

    @property
    def per_stage(self) -> int:
        """The number of entries of a stage in `steps`: one for each slice."""
        return self.graph.num_slices

    def step(self, kind: str, stage: int, slice: int = 0) -> Step:
        """Return the work of a pass of a kind."""
        step = self.steps[kind][stage * self.per_stage + slice]
        if step is None:
            raise KeyError((kind, stage, slice))
        return step

    @cached_property
    def num_rows(self) -> int:
        return len(self.rows)

    @cached_property
    def looks_back(self) -> int:
        """The most microbatches back that a pass looks."""
        needs = (need for needs in self.graph.needs.values() for need in needs)
        return max((need.back for need in needs), default=0)

    @cached_property
    def on_copy_engines(self) -> frozenset[str]:
        """Kinds of passes that run beside those that compute."""
        kinds = self.graph.kinds.items()
        return frozenset(name for name, kind in kinds if kind.engine != COMPUTE)

    @cached_property
    def leaving(self) -> frozenset[str]:
        """Kinds on copy engines that give the device's memory back, at their end."""
        return frozenset(kind for kind in self.on_copy_engines if self._takes(kind) < 0)

    @cached_property
    def arriving(self) -> frozenset[str]:
        """Kinds on copy engines that take the device's memory, at their start."""
        return frozenset(kind for kind in self.on_copy_engines if self._takes(kind) > 0)

    @cached_property
    def between_partners(self) -> frozenset[str]:
        """Kinds whose passes move something to the partner's memory, or from there."""
        return frozenset(kind for kind, _, _ in self.changes.get(PARTNER, {}))

    def _takes(self, kind: str) -> int:
        changes = self.changes.get(DEVICE, {}).items()
        sums = (sum(counts.values()) for (name, _, _), counts in changes if name == kind)
        return next((count for count in sums if count), 0)

    @cached_property
    def changes(self) -> Mapping[str, Mapping[tuple[str, int, int], Mapping[str, int]]]:
        """The amounts that a pass adds, all in all, each with its count.

        By pool, then by kind, stage and slice.
        """
        pools: dict[str, dict[tuple[str, int, int], dict[str, int]]] = {}
        for kind, steps in self.steps.items():
            for at, step in enumerate(steps):
                if step is None:
                    continue
                stage, part = divmod(at, self.per_stage)
                for task in self.graph.tasks(kind, stage, part):
                    for hold in self.graph.holds[task]:
                        own = pools.setdefault(hold.pool, {}).setdefault((kind, stage, part), {})
                        own[hold.amount] = own.get(hold.amount, 0) + hold.change
        return pools


@lru_cache(64)
def compiled(graph: Graph) -> Compiled:
    """Return `graph` in flat numbers."""
    rows = {task: row for row, task in enumerate(graph.needs)}
    waits = _without_implied(graph, rows)
    awaited = {link.row for links in waits.values() for link in links}
    steps: dict[str, tuple[Step | None, ...]] = {}
    for name, kind in graph.kinds.items():
        own: list[Step | None] = []
        for stage in graph.sites:
            for part in range(graph.num_slices):
                tasks = graph.tasks(name, stage, part)
                if not all(task in rows for task in tasks):
                    own.append(None)
                    continue
                done = {rows[task] for task in tasks}
                links = (link for task in tasks for link in waits[task] if link.row not in done)
                steps_rows = tuple(row for row in sorted(done) if row in awaited)
                own.append(Step(steps_rows, tuple(dict.fromkeys(links)), kind.engine))
        steps[name] = tuple(own)
    return Compiled(graph, rows, steps)


def _without_implied(graph: Graph, rows: Mapping[Task, int]) -> dict[Task, tuple[Link, ...]]:
    before: dict[Task, int] = {}  # all that come before, one bit a row

    def ancestors(task: Task) -> int:
        """Return the ancestors, depth first without recursion: chains are long."""
        stack = [task]
        while stack:
            top = stack[-1]
            inputs = [need.task for need in graph.needs[top] if not need.back]
            missing = [each for each in inputs if each not in before]
            if missing:
                if len(stack) > len(rows):
                    raise ValueError(f'the graph has a circle through {top}')
                stack += missing
                continue
            before[top] = 0
            for each in inputs:
                before[top] |= before[each] | 1 << rows[each]
            stack.pop()
        return before[task]

    return {
        task: tuple(
            Link(rows[need.task], need.back, need.task.stage, need.message)
            for need in needs
            if need.message
            or need.back
            or not any(
                ancestors(other.task) >> rows[need.task] & 1
                for other in needs
                if other is not need and not other.back
            )
        )
        for task, needs in graph.needs.items()
    }
