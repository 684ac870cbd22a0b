"""WHEN: passes in the order of each rank.

>>> str(Pass('B', 3, 1)), Pass.parse('3B1.2')
('3B1', Pass(kind='B', stage=3, microbatch=1, slice=2))
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
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
        last = self.num_ranks - 1

        def renamed(p: Pass) -> Pass:
            shard = p.stage - self.num_stages  # of the vocabulary: see `ir.graph.Task.stage`
            return p if shard < 0 else p._replace(stage=self.num_stages + last - shard)

        passes = self.passes[::-1]
        if len(self.graph.sites) > self.num_stages:
            passes = tuple(tuple(map(renamed, order)) for order in passes)
        return replace(
            self,
            placement=self.placement.reversed(),
            passes=passes,
            together=frozenset((last - rank, at) for rank, at in self.together),
            phases=self.phases[::-1],
            costs=self._costs_in_reverse(),
        )

    def _costs_in_reverse(self) -> Costs | None:
        if self.costs is None:
            return None
        from megatron_zbpp.ir.plan_costs import in_reverse  # which no run without a plan needs

        return in_reverse(self.costs, self.num_ranks)

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
        strict_json.require(
            data,
            _FIELDS,
            _OPTIONAL,
        )
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


def _technique(value: Any) -> str | None:
    """Check the name and the arguments of a technique."""
    fits = strict_json.is_list(value) and len(value) == 2 and isinstance(value[0], str)
    return None if fits and strict_json.is_list(value[1]) else 'a name and a list of arguments'


_OPTIONAL = {'techniques': strict_json.list_of(_technique, 'names with a list of arguments')}
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
