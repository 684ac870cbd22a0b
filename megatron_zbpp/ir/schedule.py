"""WHEN: passes in the order of each rank.

>>> str(Pass('B', 3, 1)), Pass.parse('3B1.2')
('3B1', Pass(kind='B', stage=3, microbatch=1, slice=2))
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_zbpp.ir import strict_json
from megatron_zbpp.ir.graph import BW, Applied, B, F, Graph, Need, Task, chain
from megatron_zbpp.ir.placement import Placement
from megatron_zbpp.ir.techniques import applied

if TYPE_CHECKING:
    from megatron_zbpp.ir.costs import Costs

_FORMATS = ('megatron_zbpp.schedule/1', 'megatron_zbpp.schedule/2')
_PASS = re.compile(r'(\d+)([A-Z]+)(\d+)(?:\.(\d+))?', re.ASCII)


class Pass(NamedTuple):
    """One entry of a rank's order.

    What (`kind`), where in the model (`stage`), on which `microbatch`, and on which `slice` of its
    sequence.
    """

    kind: str
    stage: int
    microbatch: int
    slice: int = 0

    def __str__(self) -> str:
        cut = f'.{self.slice}' if self.slice else ''
        return f'{self.stage}{self.kind}{self.microbatch}{cut}'

    @property
    def words(self) -> str:
        """The pass in words, for messages to people."""
        cut = f' slice {self.slice}' if self.slice else ''
        return f'{self.kind} stage {self.stage} microbatch {self.microbatch}{cut}'

    @classmethod
    def parse(cls, text: str) -> Pass:
        """Return the pass that `text` names, for example `3F1`: stage 3, forward, microbatch 1.

        Raises:
            ValueError: `text` is not of that form.
        """
        match = _PASS.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f'{text!r} is not a pass: expected {{stage}}{{kind}}{{microbatch}}, such as 3F1, '
                'with .{slice} behind it where sequences are sliced'
            )
        return cls(match[2], int(match[1]), int(match[3]), int(match[4] or 0))


class Together(NamedTuple):
    """Passes that run as one: DualPipe's F & B."""

    passes: tuple[Pass, ...]

    def __str__(self) -> str:
        return '(' + '&'.join(map(str, self.passes)) + ')'

    @property
    def is_cell(self) -> bool:
        """True if they are a forward and a backward of two microbatches: DualPipe's overlap."""
        kinds = sorted(p.kind for p in self.passes)
        return kinds in ([B, F], [BW, F]) and len({p.microbatch for p in self.passes}) > 1


class Phase(NamedTuple):
    """Passes of a rank that go by one name, such as the warm-up."""

    label: str
    passes: tuple[Pass, ...]


@dataclass(frozen=True)
class Schedule:
    """For each rank, the order of its passes: an immutable value.

    Attributes:
        name: of the family that made it, or of the plan.
        placement: which rank holds which stage.
        num_microbatches: m; microbatches are 0..m-1.
        passes: for each rank, its passes in order.
        graph: what the passes mean; default: of a plain pipeline.
        together: (rank, index of the first) of passes that run as one with the one behind them.
        phases: for each rank, (index of its first pass, label) of each phase, where a family names
            them. They are for people: neither files nor comparisons know them.
        costs: for which it was planned, where its file says so; None: unknown. Comparisons do not
            know them.
    """

    name: str
    placement: Placement
    num_microbatches: int
    passes: tuple[tuple[Pass, ...], ...]
    graph: Graph = None  # type: ignore[assignment]  # filled below
    together: frozenset[tuple[int, int]] = frozenset()
    phases: tuple[tuple[tuple[int, str], ...], ...] = field(default=(), compare=False, repr=False)
    costs: Costs | None = field(default=None, compare=False, repr=False)

    def __repr__(self) -> str:
        """Say which it is; `passes` has the orders.

        >>> from megatron_zbpp import build
        >>> build('zb-v', 4, 8)
        <Schedule zb-v: 4 ranks, 8 stages (v), 8 microbatches, 192 passes>
        """
        sizes = f'{self.num_ranks} ranks, {self.placement.num_stages} stages'
        passes = sum(map(len, self.passes))
        return (
            f'<Schedule {self.name}: {sizes} ({self.placement.name}), '
            f'{self.num_microbatches} microbatches, {passes} passes>'
        )

    def __post_init__(self) -> None:
        if self.graph is None:  # pyright: ignore[reportUnnecessaryComparison]
            object.__setattr__(self, 'graph', chain(self.placement.num_stages))
        if self.graph.num_stages != self.placement.num_stages:
            raise ValueError(
                f'a graph of {self.graph.num_stages} stages on a placement of '
                f'{self.placement.num_stages}: give both the same'
            )

    @classmethod
    def of(
        cls,
        name: str,
        placement: Placement,
        num_microbatches: int,
        orders: Iterable[Iterable[Pass | Together | Phase]],
        graph: Graph | None = None,
    ) -> Schedule:
        """Return a schedule from any iterables of passes."""
        passes: list[tuple[Pass, ...]] = []
        phases: list[tuple[tuple[int, str], ...]] = []
        together: set[tuple[int, int]] = set()
        for rank, order in enumerate(orders):
            own: list[Pass] = []
            labels: list[tuple[int, str]] = []
            for entry in order:
                if isinstance(entry, Pass):
                    own.append(entry)
                    continue
                if isinstance(entry, Phase):
                    labels.append((len(own), entry.label))
                else:
                    together |= {(rank, len(own) + k) for k in range(len(entry.passes) - 1)}
                own += entry.passes
            passes.append(tuple(own))
            phases.append(tuple(labels))
        return cls(
            name,
            placement,
            num_microbatches,
            tuple(passes),
            graph or chain(placement.num_stages),
            frozenset(together),
            tuple(phases),
        )

    @property
    def num_ranks(self) -> int:
        return self.placement.num_ranks

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages

    def rank_of(self, p: Pass) -> int:
        """Return the rank that runs `p`."""
        return self.placement.rank_of(p.stage, p.microbatch)

    def __iter__(self) -> Iterator[tuple[int, Pass]]:
        """Yield (rank, pass) of every pass, rank by rank."""
        return ((rank, p) for rank, order in enumerate(self.passes) for p in order)

    def order(self, rank: int) -> Iterator[Pass | Together]:
        """Return the order of `rank`, with those that run as one as one."""
        joined: list[Pass] = []
        for at, p in enumerate(self.passes[rank]):
            joined.append(p)
            if (rank, at) not in self.together:
                yield Together(tuple(joined)) if len(joined) > 1 else p
                joined = []

    @cached_property
    def done_by(self) -> Mapping[tuple[Task, int], Pass]:
        """The pass that does a task of a microbatch."""
        return {
            (task, p.microbatch): p
            for _, p in self
            for task in self.graph.tasks(p.kind, p.stage, p.slice)
        }

    def needs(self, p: Pass) -> Iterator[tuple[Need, Pass]]:
        """Return the dependencies of `p` on any rank: each task, and the pass that runs it.

        What the schedule lacks is left out: `check` tells.
        """
        own = self.graph.tasks(p.kind, p.stage, p.slice)
        left = [need for task in own for need in self.graph.needs[task] if need.task not in own]
        for need in left:
            found = self.done_by.get((need.task, self.graph.occurrence(need, p.microbatch)))
            if found is not None:
                yield need, found
            elif self.graph.kinds[need.task.kind].optional:
                left += self.graph.needs[need.task]

    def predecessors(self, p: Pass) -> tuple[Pass, ...]:
        """Return the passes that must end before `p` starts."""
        return tuple(dict.fromkeys(q for _, q in self.needs(p)))

    def reversed(self) -> Schedule:
        """Return the same schedule with rank r renamed to p-1-r, and its shards with it."""
        return self.renamed(range(self.num_ranks)[::-1])

    def renamed(self, names: Sequence[int]) -> Schedule:
        """Return the same schedule with rank r renamed to `names[r]`, and its shards with it."""
        # ranks and shards that the placement lacks, which `check` refuses, keep their numbers
        full = dict(enumerate([*names, *range(len(names), len(self.passes))]))

        def moved(p: Pass) -> Pass:
            shard = p.stage - self.num_stages  # of the vocabulary: see `ir.graph.Task.stage`
            return p._replace(stage=self.num_stages + full.get(shard, shard))

        order = sorted(range(len(self.passes)), key=full.__getitem__)
        passes = tuple(self.passes[rank] for rank in order)
        if len(self.graph.sites) > self.num_stages:
            passes = tuple(tuple(map(moved, each)) for each in passes)
        costs = self.costs
        if costs is not None:
            from megatron_zbpp.ir.plan_costs import with_ranks  # which no run without a plan needs

            costs = with_ranks(costs, names)
        return replace(
            self,
            placement=self.placement.renamed(names),
            passes=passes,
            together=frozenset((full[rank], at) for rank, at in self.together),
            phases=tuple(self.phases[rank] for rank in order) if self.phases else (),
            costs=costs,
        )

    def reordered(self, orders: Iterable[Iterable[Pass]], graph: Graph) -> Schedule:
        """Return the schedule with other orders of its passes, and with more of `graph`.

        Passes that run as one still do, where they still follow each other. Phases are dropped.
        """
        passes = tuple(map(tuple, orders))
        places = [{p: at for at, p in enumerate(own)} for own in passes] if self.together else []
        together = {
            (rank, places[rank][first])
            for rank, at in self.together
            for first, second in (self.passes[rank][at : at + 2],)
            if passes[rank][places[rank][first] + 1 :][:1] == (second,)
        }
        return replace(self, passes=passes, graph=graph, together=frozenset(together), phases=())

    def over_replicas(self, one: Placement) -> Schedule:
        """Return a two-way schedule with rank 2k + h for rank k of the replica h of a pair.

        The first replica is where microbatches of route 0 come first. `one` is the folded
        placement, in the order of ranks that is wanted.
        """
        names: dict[int, int] = {}
        for stage, rank in enumerate(self.placement.routes[0]):
            first = 2 * one.only_route[stage]
            names.setdefault(rank, first + (first in names.values()))
        return self.renamed([names[rank] for rank in range(self.num_ranks)])

    def forward_only(self) -> Schedule:
        """Return the schedule of an evaluation: passes without a backward, in their order."""
        kinds = self.graph.evaluated
        kept = tuple(tuple(p for p in order if p.kind in kinds) for order in self.passes)
        name = f'{self.name} (forward only)'
        return replace(self, name=name, passes=kept, together=frozenset(), phases=())

    def to_json(self) -> str:
        """Return one JSON object; `from_json` reads it back to an equal value."""
        placement = {'name': self.placement.name, 'ranks': self.placement.first_route}
        if not self.placement.is_one_way:
            placement |= {'opposite': self.placement.opposite, 'route': self.placement.route}
        return json.dumps(
            {
                'format': _FORMATS[-1],
                'name': self.name,
                'placement': placement,
                'techniques': self.graph.techniques,
                'num_microbatches': self.num_microbatches,
                'passes': [
                    ' '.join(map(str, self.order(rank))) for rank in range(len(self.passes))
                ],
            },
            indent=1,
        )

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        """Return the schedule that `to_json` wrote, now or before there were techniques.

        Raises:
            ValueError: `text` is not JSON, or not a schedule; the message names the field.
        """
        return cls.from_object(strict_json.loads(text))

    @classmethod
    def from_object(cls, data: Any) -> Schedule:
        """Return the schedule that JSON says, once it has been read.

        Raises:
            ValueError: it says none; the message names the field.
        """
        if not strict_json.is_object(data) or 'format' not in data:
            raise ValueError(
                f'not a schedule: no "format": "{_FORMATS[-1]}" in it'
                + strict_json.other_kind(data, '', ': ')
            )
        if data['format'] not in _FORMATS:
            newer = 'is the file of a newer release?'
            ours = str(data['format']).startswith(_FORMATS[0].partition('/')[0])
            raise ValueError(
                f'format {data["format"]!r} is not one of {", ".join(_FORMATS)}: '
                + (newer if ours else strict_json.other_kind(data, newer))
            )
        strict_json.require(data, _FIELDS, _OPTIONAL)
        where = data['placement']
        strict_json.require(where, _PLACEMENT, _TWO_WAY)
        routes = {name: tuple(where[name]) for name in _TWO_WAY if name in where}
        placement = Placement(tuple(where['ranks']), where['name'], **routes)
        techniques = [Applied(name, _tuples(a)) for name, a in data.get('techniques', ())]
        try:
            graph = applied(placement.num_stages, techniques)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f'techniques: an argument is of a wrong type: {error!r}') from error
        orders = [[_entry(entry) for entry in order.split()] for order in data['passes']]
        return cls.of(data['name'], placement, data['num_microbatches'], orders, graph)


_ARGUMENTS = strict_json.list_of(strict_json.anything, 'arguments')
_OPTIONAL = {
    'techniques': strict_json.list_of(
        strict_json.tuple_of(strict_json.string, _ARGUMENTS), 'names with a list of arguments'
    )
}
_RANKS = strict_json.list_of(strict_json.integer, 'integers')
_PLACEMENT = {'name': strict_json.text, 'ranks': _RANKS}
_TWO_WAY = {'opposite': _RANKS, 'route': _RANKS}
_FIELDS = {
    'format': strict_json.text,
    'name': strict_json.text,
    'placement': strict_json.anything,
    'num_microbatches': strict_json.integer,
    'passes': strict_json.list_of(strict_json.text, 'texts'),
}


def _entry(text: str) -> Pass | Together:
    if text.startswith('(') and text.endswith(')'):
        return Together(tuple(map(Pass.parse, text[1:-1].split('&'))))
    return Pass.parse(text)


def _tuples(value: Any) -> Any:
    """Return `value` with JSON's lists as tuples."""
    return tuple(map(_tuples, value)) if strict_json.is_list(value) else value


_EMPTY = '___'  # a marked place past the end of a rank's order


def grid(
    schedule: Schedule, cells: Iterable[tuple[int, int]] = (), width: int = 100, height: int = 40
) -> str:
    """Draw `schedule`, cut to `width` characters and `height` ranks around what is marked.

    `cells` (rank, index in its order) stand in brackets, one a rank. An index past the end marks an
    empty place: there a pass is missing. A rank without a marked cell is cut around the first one's
    index.

    >>> orders = [[Pass('F', 0, 0), Pass('B', 0, 0)], [Pass('F', 1, 0), Pass('B', 1, 0)]]
    >>> print(grid(Schedule.of('torn', Placement.loop(2), 1, orders), [(1, 0)]))
    rank 0   0F0  0B0
    rank 1  [1F0] 1B0
    """
    marked = dict(cells)
    rank, index = next(iter(marked.items()), (0, 0))
    rows = [list(map(str, order)) for order in schedule.passes]
    for r, row in enumerate(rows):  # long enough to hold the marked place
        row += [_EMPTY] * (marked.get(r, -1) + 1 - len(row))
    cell = max((len(name) for row in rows for name in row), default=0) + 2
    label = len(f'rank {len(rows) - 1}') + 1
    fitting = max(1, (width - label - 2) // cell)
    first, last = _around(rank, len(rows), max(1, height))
    above = [f'({first} more above)'] if first else []
    below = [f'({len(rows) - last} more below)'] if last < len(rows) else []
    lines = (
        f'rank {r}'.ljust(label) + _line(rows[r], cell, fitting, marked.get(r), index)
        for r in range(first, last)
    )
    return '\n'.join([*above, *lines, *below])


def _line(names: list[str], cell: int, fitting: int, mark: int | None, index: int) -> str:
    """Return the `fitting` cells of a row around its mark, or else around `index`."""
    first, last = _around(index if mark is None else mark, len(names), fitting)
    shown = (
        (f'[{name}]' if i == mark else f' {name} ').ljust(cell)
        for i, name in enumerate(names[first:last], first)
    )
    before, after = '…' if first else ' ', '…' if last < len(names) else ''
    return (before + ''.join(shown)).rstrip() + after


def _around(center: int, count: int, most: int) -> tuple[int, int]:
    """Return the half-open range of at most `most` of `count` places, `center` near its middle."""
    first = max(0, min(center - most // 2, count - most))
    return first, min(count, first + most)


_MOST_RANKS = 13  # that the grid shows at most


class ScheduleError(ValueError):
    """A schedule that must not run: what is wrong, where, the cure, and the grid."""

    def __init__(
        self, what: str, schedule: Schedule, cells: Iterable[tuple[int, int]] = ()
    ) -> None:
        """Make the message of one line `what`, and the grid of the schedule: see `grid`."""
        super().__init__(f'{what}\n{grid(schedule, cells, height=_MOST_RANKS)}')
        self.what = what
