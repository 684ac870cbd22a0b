"""Output of the subcommands of `zbpp`: facts, tables, pictures."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from megatron_zbpp.analysis.gain import gain_text, idle_parts, makespan_of
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.cli.inputs import Case
from megatron_zbpp.ir import Schedule
from megatron_zbpp.ir.timeline import MEANING, Timeline
from megatron_zbpp.render.html import html
from megatron_zbpp.render.perfetto import perfetto
from megatron_zbpp.render.png import timeline_png
from megatron_zbpp.render.scene import number
from megatron_zbpp.render.svg import svg

# of a table of schedules, see `row`; with names as long as there are, a line has 80 columns
HEADS = ('schedule', 'makespan', 'gain', 'idle', 'window', 'bubble', 'peak')
_UNIT = 'units of --times'


def takes_colours(stream: TextIO) -> bool:
    """Return whether a terminal reads it that shows colours, and the user wants them."""
    return stream.isatty() and not os.environ.get('NO_COLOR') and os.environ.get('TERM') != 'dumb'


def legend(schedule: Schedule) -> str:
    """Return what the letters of a drawing in text mean."""
    used = dict.fromkeys(p.kind for order in schedule.passes for p in order)
    kinds = ', '.join(f'{kind} {schedule.graph.kinds[kind].words}' for kind in used)
    example = schedule.passes[0][0]
    return f'{kinds}, · idle; {example} is {example.words}'


def shape(schedule: Schedule) -> dict:
    """Return name and sizes."""
    placement = schedule.placement
    return {
        'name': schedule.name,
        'ranks': schedule.num_ranks,
        'stages': schedule.num_stages,
        'microbatches': schedule.num_microbatches,
        'slices': schedule.graph.num_slices,
        'placement': placement.name,
        'copies': len(placement.routes),
        'passes': sum(map(len, schedule.passes)),
    }


def facts(case: Case, timeline: Timeline, against: str) -> dict:
    """Return what a script may want to know of a schedule, and a table shows.

    Args:
        case: the schedule and its costs.
        timeline: simulated by them.
        against: the family to which it is compared.
    """
    rival = makespan_of(against, case.schedule, case.costs)
    return {
        **shape(case.schedule),
        'makespan': timeline.makespan,
        'window': max(timeline.windows),
        'bubble_rate_makespan': timeline.bubble_makespan,
        'bubble_rate_window': timeline.bubble_window,
        'idle_all_ranks': timeline.idle_all_ranks,
        'idle_parts': idle_parts(timeline, case.costs)._asdict(),
        'against': None if rival is None else {'name': against, 'makespan': rival},
        'gain': None if not rival else 1 - timeline.makespan / rival,
        'peak_activations': peak(case.schedule, case.costs),
    }


def row(found: dict) -> tuple[str, ...]:
    """Return the facts as a line of a table."""
    return (
        found['name'],
        number(found['makespan']),
        '-' if found['gain'] is None else f'{found["gain"]:.1%}',
        f'{found["idle_all_ranks"]:.2%}',
        number(found['window']),
        f'{found["bubble_rate_window"]:.2%}',
        number(max(found['peak_activations'])),
    )


def headline(schedule: Schedule) -> str:
    """Return name and sizes in a line."""
    sizes = shape(schedule)
    slices = f' of {sizes["slices"]} slices' if sizes['slices'] > 1 else ''
    ways = '' if schedule.placement.is_one_way else ' by turns down and up'
    copies = f', {sizes["copies"]} copies of the weights' if ways else ''
    return (
        f'{sizes["name"]}: {sizes["ranks"]} ranks, {sizes["stages"]} stages '
        f'({sizes["placement"]}{copies}), {sizes["microbatches"]} microbatches{ways}{slices}, '
        f'{sizes["passes"]} passes'
    )


def print_summary(found: dict) -> None:
    """Print the facts of one schedule."""
    print(f'makespan {number(found["makespan"])}{gained(found)}')
    print(idle_text(found['idle_all_ranks'], found['idle_parts']))
    print(f'window {number(found["window"])}, bubble {found["bubble_rate_window"]:.2%}')
    print(f'peak activations {number(max(found["peak_activations"]))}\n{MEANING}')


def gained(found: dict) -> str:
    """Return how much less time that is than the rival's; empty: there is none."""
    rival = found['against'] or {'name': '', 'makespan': None}
    return gain_text(found['makespan'], rival['makespan'], rival['name'])


def idle_text(share: float, parts: Mapping[str, float]) -> str:
    """Return the share of all GPU time that is idle, and its causes."""
    told = ', '.join(
        f'{cause.replace("_", " ")} {part:.2%}' for cause, part in parts.items() if part >= 5e-5
    )
    return f'idle GPU time {share:.2%}{f": {told}" if told else ""}'


def print_json(value: dict) -> None:
    """Print one JSON object."""
    print(json.dumps(value))


def print_table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print columns as wide as they need be: the first to the left, numbers to the right."""
    lines = [tuple(map(str, line)) for line in (heads, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *others in lines:
        cells = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        print('  '.join([first.ljust(widths[0]), *cells]))


def print_wrapped(text: str) -> None:
    """Print lines of at most 80 columns, the later ones indented by four more than the first."""
    indent = ' ' * (len(text) - len(text.lstrip()) + 4)
    print(textwrap.fill(text, 80, subsequent_indent=indent, break_on_hyphens=False))


def picture_format(path: str, cure: str = 'name a .html, .svg or .png file') -> str:
    """Return the format that a picture's path asks for.

    Raises:
        ValueError: none that there is; the message ends in `cure`.
    """
    suffix = Path(path).suffix[1:].lower()
    if suffix not in ('html', 'svg', 'png'):
        raise ValueError(f'-o {path}: {cure}')
    return suffix


def draw(
    path: str, to: str, shown: dict[str, Case], timelines: dict[str, Timeline], heading: str
) -> None:
    """Write the picture of `timelines` in format `to`."""
    costs = {name: case.costs for name, case in shown.items()}
    if to == 'perfetto':
        return write(path, perfetto(timelines, costs))
    if to == 'png':
        return timeline_png(timelines, path, _UNIT, heading=heading)
    picture: Callable[..., str] = {'html': html, 'svg': svg}[to]
    write(path, picture(timelines, costs, heading=f'{heading}, time in {_UNIT}'))


def write(path: str, text: str) -> None:
    """Write a file of text."""
    Path(path).write_text(text, encoding='utf-8')
