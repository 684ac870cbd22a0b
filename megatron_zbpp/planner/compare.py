"""Compare schedules for one model and one cluster: rows, the shortest first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from megatron_zbpp.analysis.gain import RIVAL, makespan_of
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import Placement, strict_json
from megatron_zbpp.ir.compiled import compiled
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.plan_costs import joined
from megatron_zbpp.ir.tables import FORMATS
from megatron_zbpp.schedules import FAMILIES, build, find
from megatron_zbpp.techniques.base import with_copies


class Row(NamedTuple):
    """One schedule as simulated."""

    name: str  # of its family
    makespan: float  # time of an iteration, in the unit of the costs
    gain: float  # share of the rival's time that it saves; negative where it takes more
    idle: float  # share of all GPU time that is lost
    bubble: float  # idle share of the busiest rank in the longest window
    peak: float  # most activations of a rank, in microbatches of a full rank


class Rows(list[Row]):
    """Rows, as a list; and as a table, by `str` and by `to`."""

    def to(self, table: str) -> str:
        """Return the table of `zbpp compare` as 'text', 'md', 'csv' or 'latex'.

        Raises:
            ValueError: another format.

        >>> print(compare(4, 8, ['zb-v']).to('csv'))
        name,makespan,gain,idle,bubble,peak
        zb-v,25.5,22.7%,5.88%,0.00%,4
        """
        if table not in FORMATS:
            raise ValueError(f'no table as {table!r}: give {", ".join(FORMATS)}')
        cells = [
            (
                row.name,
                f'{row.makespan:g}',
                f'{row.gain:.1%}',
                *(f'{share:.2%}' for share in (row.idle, row.bubble)),
                f'{row.peak:g}',
            )
            for row in self
        ]
        return FORMATS[table](Row._fields, cells)

    def __str__(self) -> str:
        return self.to('text')


def compare(
    num_ranks: int,
    num_microbatches: int,
    schedules: Iterable[str] | None = None,
    costs: Costs | None = None,
    against: str = RIVAL,
) -> Rows:
    """Return a row for each schedule, as `zbpp compare` prints them; the shortest first.

    Args:
        num_ranks: p.
        num_microbatches: m.
        schedules: names; None: all that are synchronous and take these sizes.
        costs: of the stages of a model, which are joined or cut as a schedule has fewer or more.
            None: F, B and W of a full rank take 1 each.
        against: the name of the rival.

    Raises:
        ValueError: a size is no whole number, or a schedule that is named does not take these sizes
            or costs.

    >>> [(row.name, f'{row.gain:.1%}') for row in compare(4, 8, ['1f1b', 'zb-h1', 'zb-v'])]
    [('zb-v', '22.7%'), ('zb-h1', '18.2%'), ('1f1b', '0.0%')]
    """
    strict_json.require_whole(num_ranks=num_ranks, num_microbatches=num_microbatches)
    rows: list[Row] = []
    usual = [family.name for family in FAMILIES if not family.asynchronous]
    for name in usual if schedules is None else schedules:
        try:
            rows.append(_row(name, num_ranks, num_microbatches, costs, against))
        except ValueError:
            if schedules is not None:
                raise
    return Rows(sorted(rows, key=lambda row: (row.makespan, row.peak)))


def _row(name: str, p: int, m: int, costs: Costs | None, against: str) -> Row:
    family = find(name)
    stages = p * family.default_chunks
    plain = Costs.uniform(Placement.loop(p, family.default_chunks))
    own = plain if costs is None else joined(costs, stages)
    if own is None:
        raise ValueError(
            f'{name} has {stages} stages, into which those of the costs neither join nor divide: '
            'give costs of a multiple'
        )
    schedule = build(name, p, m, costs=with_copies(own) if family.moves else own)
    flat = compiled(schedule.graph)
    if flat.on_copy_engines:
        own = with_copies(own, between=flat.between_partners)
    timeline, rival = simulate(schedule, own), makespan_of(against, schedule, own)
    if rival is None:
        raise ValueError(
            f'{find(against).name} does not take {m} microbatches on {p} ranks, or these stages: '
            'compare against another schedule, such as 1f1b'
        )
    return Row(
        name,
        timeline.makespan,
        1 - timeline.makespan / rival,
        timeline.idle_all_ranks,
        timeline.bubble,
        max(peak(schedule, own)),
    )
