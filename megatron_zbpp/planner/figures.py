r"""Figures of a schedule at its costs: facts for tables and files, and rows that compare several.

>>> print(markdown(('schedule', 'gain'), [('zb-v', '22.7%')]))
| schedule | gain |
|---|---:|
| zb-v | 22.7% |
>>> print(latex(('schedule', 'gain'), [('zb-v', '22.7%')]))
\begin{tabular}{lr}
schedule & gain \\
\hline
zb-v & 22.7\% \\
\end{tabular}
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from megatron_zbpp.analysis.gain import RIVAL, gain_of, idle_parts, makespan_of
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import Placement, Schedule, strict_json
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.graph import compiled
from megatron_zbpp.ir.timeline import Timeline
from megatron_zbpp.planner.cases import Case
from megatron_zbpp.schedules import FAMILIES, build, find
from megatron_zbpp.techniques.base import with_copies
from megatron_zbpp.techniques.updates.versions import copies, steady_state, updates_of
from megatron_zbpp.techniques.vocabulary.place import WHOLE, has_shards, rival_costs


def shape(schedule: Schedule) -> dict[str, Any]:
    """Return name and sizes of a schedule, for JSON."""
    placement, graph = schedule.placement, schedule.graph
    return {
        'name': schedule.name,
        'ranks': schedule.num_ranks,
        'stages': schedule.num_stages,
        'microbatches': schedule.num_microbatches,
        'slices': graph.num_slices,
        'placement': placement.name,
        'copies': max(copies(schedule)) if updates_of(graph) else len(placement.routes),
        'passes': sum(map(len, schedule.passes)),
    }


def facts(case: Case, timeline: Timeline, against: str) -> dict[str, Any]:
    """Return sizes, times and memory of a schedule, for JSON and tables; `against`: a family."""
    steady = steady_state(timeline)
    m = case.schedule.num_microbatches if steady is None else steady.num_microbatches
    name = against + WHOLE * has_shards(case.schedule)
    own = rival_costs(case.schedule, case.costs)
    rival = makespan_of(against, replace(case.schedule, num_microbatches=m), own)
    taken = timeline.makespan if steady is None else steady.period
    found = {
        **shape(case.schedule),
        'makespan': timeline.makespan,
        'window': max(timeline.windows),
        'bubble': timeline.bubble if steady is None else steady.bubble,
        'idle_busiest_rank': timeline.idle_busiest_rank,
        'bubble_rate_makespan': timeline.idle_busiest_rank,  # earlier names
        'bubble_rate_window': timeline.bubble,
        'idle_all_ranks': timeline.idle_all_ranks,
        'idle_parts': idle_parts(timeline, case.costs)._asdict(),
        'against': None if rival is None else {'name': name, 'makespan': rival},
        'gain': gain_of(taken, rival),
        'peak_activations': peak(case.schedule, case.costs),
    }
    if steady is None:
        return found
    return {
        **found,
        'microbatches_a_call': steady.num_microbatches,
        'period': steady.period,
        'bubble_rate_period': steady.bubble,
        'weight_copies': steady.weight_copies,
        'delays': [delay._asdict() for delay in steady.delays],
    }


Lines = Sequence[Sequence[object]]
_LATEX = {
    '\\': r'\textbackslash{}',
    '~': r'\textasciitilde{}',
    '^': r'\textasciicircum{}',
    **{sign: f'\\{sign}' for sign in '&%$#_{}'},
}


def text(heads: Sequence[str], rows: Lines) -> str:
    """Return columns as wide as they need be: the first to the left, the others to the right."""
    lines = [tuple(map(str, line)) for line in (heads, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return '\n'.join(
        '  '.join(
            [
                first.ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)),
            ]
        )
        for first, *others in lines
    )


def markdown(heads: Sequence[str], rows: Lines) -> str:
    """Return a table of GitHub's Markdown."""
    rule = '|'.join(['', '---', *('---:' for _ in heads[1:]), ''])
    head, *lines = (
        f'| {" | ".join(str(cell).replace("|", chr(92) + "|") for cell in line)} |'
        for line in (heads, *rows)
    )
    return '\n'.join([head, rule, *lines])


def comma_separated(heads: Sequence[str], rows: Lines) -> str:
    """Return lines of CSV, their cells as people see them."""
    written = io.StringIO()
    csv.writer(written, lineterminator='\n').writerows([heads, *rows])
    return written.getvalue().removesuffix('\n')


def latex(heads: Sequence[str], rows: Lines) -> str:
    """Return a tabular, which needs no package."""
    head, *lines = (
        ' & '.join(''.join(_LATEX.get(sign, sign) for sign in str(cell)) for cell in line)
        for line in (heads, *rows)
    )
    columns = 'l' + 'r' * (len(heads) - 1)
    ends = ''.join(f'{line} \\\\\n' for line in lines)
    return f'\\begin{{tabular}}{{{columns}}}\n{head} \\\\\n\\hline\n{ends}\\end{{tabular}}'


FORMATS: Mapping[str, Callable[[Sequence[str], Lines], str]] = {
    'text': text,
    'md': markdown,
    'csv': comma_separated,
    'latex': latex,
}


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
    own = plain if costs is None else costs.joined(stages)
    if own is None:
        raise ValueError(
            f'{name} has {stages} stages, into which those of the costs neither join nor divide: '
            'give costs of a multiple'
        )
    schedule = build(name, p, m, costs=with_copies(own) if family.moves else own)
    flat = compiled(schedule.graph)
    if flat.on_copy_engines:
        own = with_copies(own, between=flat.between_partners)
    found = facts(Case(schedule, own), simulate(schedule, own), against)
    if found['gain'] is None:
        raise ValueError(
            f'{find(against).name} does not take {m} microbatches on {p} ranks, or these stages: '
            'compare against another schedule, such as 1f1b'
        )
    makespan, gain, idle = found['makespan'], found['gain'], found['idle_all_ranks']
    return Row(name, makespan, gain, idle, found['bubble'], max(found['peak_activations']))
