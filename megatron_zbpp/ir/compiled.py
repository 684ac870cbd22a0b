"""A graph on a placement in flat numbers, for those that ask of every pass of a schedule.

Each task is a *row*; the n-th microbatch is entry n of it. What a pass does and needs depends on
its kind, stage and slice alone, and on the route of its microbatch where there are two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from megatron_zbpp.ir.graph import COMPUTE, DEVICE, PARTNER, Graph, Need, Task


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
    """A graph in flat numbers."""

    graph: Graph  # of which it was made
    rows: Mapping[Task, int]  # number of each task
    # by kind, and there by `stage * num_slices + slice`; None where the graph has none
    steps: Mapping[str, tuple[Step | None, ...]]

    def step(self, kind: str, stage: int, slice: int = 0) -> Step:
        """Return the work of a pass of a kind."""
        step = self.steps[kind][stage * self.graph.num_slices + slice]
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
        graph = self.graph
        for kind, steps in self.steps.items():
            for at, step in enumerate(steps):
                if step is None:
                    continue
                stage, part = divmod(at, graph.num_slices)
                for task in graph.tasks(kind, stage, part):
                    for hold in graph.holds[task]:
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

    def implied(need: Need, needs: tuple[Need, ...]) -> bool:
        others = (other.task for other in needs if other is not need and not other.back)
        bit = 1 << rows[need.task]
        return not (need.message or need.back) and any(ancestors(task) & bit for task in others)

    return {
        task: tuple(
            Link(rows[need.task], need.back, need.task.stage, need.message)
            for need in needs
            if not implied(need, needs)
        )
        for task, needs in graph.needs.items()
    }
