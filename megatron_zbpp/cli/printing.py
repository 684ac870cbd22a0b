"""Output of the subcommands of `zbpp`: facts, tables, pictures."""

from __future__ import annotations

import json
import os
import textwrap
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from megatron_zbpp.analysis.gain import (
    gain_of,
    gain_text,
    idle_parts,
    makespan_of,
    megatron_refuses,
)
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.cli.inputs import Case
from megatron_zbpp.ir import Placement, Schedule
from megatron_zbpp.ir.formats import BYTES, UNITS, Units, load_plan
from megatron_zbpp.ir.timeline import MEANING, Timeline
from megatron_zbpp.render.html import html
from megatron_zbpp.render.perfetto import perfetto
from megatron_zbpp.render.png import timeline_png
from megatron_zbpp.render.scene import number
from megatron_zbpp.render.svg import svg
from megatron_zbpp.render.text import examples
from megatron_zbpp.techniques.updates.versions import SteadyState, copies, steady_state, updates_of
from megatron_zbpp.techniques.vocabulary.place import WHOLE, has_shards, rival_costs

PICTURES = ('html', 'svg', 'png', 'pdf')  # formats, and how names of their files end
# of a table of schedules, see `row`; with names as long as there are, a line has 80 columns
HEADS = ('schedule', 'makespan', 'gain', 'idle', 'window', 'bubble', 'peak')


def takes_colours(stream: TextIO) -> bool:
    """Return whether a terminal reads it that shows colours, and the user wants them."""
    return stream.isatty() and not os.environ.get('NO_COLOR') and os.environ.get('TERM') != 'dumb'


def legend(timeline: Timeline, width: int) -> str:
    """Return the meaning of the labels in `timeline_text(timeline, width)`."""
    schedule = timeline.schedule
    used = dict.fromkeys(p.kind for order in schedule.passes for p in order)
    kinds = ', '.join(f'{kind} {schedule.graph.kinds[kind].words}' for kind in used)
    return '; '.join((f'{kinds}, · idle', *examples(timeline, width)))


def shape(schedule: Schedule) -> dict:
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


def facts(case: Case, timeline: Timeline, against: str) -> dict:
    """Return what a script may want to know of a schedule, and a table shows.

    Args:
        case: the schedule and its costs.
        timeline: simulated by them.
        against: the family to which it is compared.
    """
    steady = steady_state(timeline)
    m = case.schedule.num_microbatches if steady is None else steady.num_microbatches
    name = against + WHOLE * has_shards(case.schedule)
    own = rival_costs(case.schedule, case.costs)
    rival = makespan_of(against, replace(case.schedule, num_microbatches=m), own)
    taken = timeline.makespan if steady is None else steady.period
    return {
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
        **({} if steady is None else _of_calls(steady)),
    }


def _of_calls(steady: SteadyState) -> dict:
    """Return the facts of an asynchronous schedule."""
    return {
        'microbatches_a_call': steady.num_microbatches,
        'period': steady.period,
        'bubble_rate_period': steady.bubble,
        'weight_copies': steady.weight_copies,
        'delays': [delay._asdict() for delay in steady.delays],
    }


def rows(
    found: Sequence[dict], units: Units = UNITS
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return heads and lines of a table; of asynchronous schedules the period, of a call."""
    found = [
        {**each, 'peak_activations': list(map(units.scaled, each['peak_activations']))}
        for each in found
    ]
    heads = (*HEADS[:-1], 'peak, GiB' if units.memory == BYTES else HEADS[-1])
    if not any('period' in each for each in found):
        return heads, list(map(row, found))
    lines = [
        (
            each['name'],
            *('-', row(each)[2], '-', '-', f'{each["bubble"]:.2%}'),
            number(max(each['peak_activations'])),
            number(each['period']),
        )
        if 'period' in each
        else (*row(each), '')
        for each in found
    ]
    return (*heads, 'period'), lines


def row(found: dict) -> tuple[str, ...]:
    """Return the facts as a line of a table."""
    return (
        found['name'],
        number(found['makespan']),
        '-' if found['gain'] is None else f'{found["gain"]:.1%}',
        f'{found["idle_all_ranks"]:.2%}',
        number(found['window']),
        f'{found["bubble"]:.2%}',
        number(max(found['peak_activations'])),
    )


def headline(schedule: Schedule) -> str:
    """Return name and sizes in a line."""
    sizes = shape(schedule)
    slices = f' of {sizes["slices"]} slices' if sizes['slices'] > 1 else ''
    ways = '' if schedule.placement.is_one_way else ' by turns down and up'
    copies = f', {sizes["copies"]} copies of the weights' if ways else ''
    updates = updates_of(schedule.graph)
    m = sizes['microbatches']
    calls = f'{m // updates.every} calls of {updates.every}' if updates else m
    return (
        f'{sizes["name"]}: {sizes["ranks"]} ranks, {sizes["stages"]} stages '
        f'({sizes["placement"]}{copies}), {calls} microbatches{ways}{slices}, '
        f'{sizes["passes"]} passes'
    )


def print_headline(schedule: Schedule) -> None:
    """Print name and sizes, and where Megatron has no such order."""
    print(headline(schedule))
    refused = megatron_refuses(schedule.placement, schedule.num_microbatches)
    if refused and schedule.name == 'interleaved':
        print_wrapped(refused)


def print_reversed(placement: Placement) -> None:
    """Print that a training has the ranks in the other order, where it has."""
    if placement.is_one_way and placement.num_ranks > 1 and placement.only_route[-1] == 0:
        print('Megatron wants the loss on its last rank: it runs this with the ranks reversed')


def print_summary(found: dict, units: Units = UNITS) -> None:
    """Print the facts of one schedule."""
    print(f'makespan {number(found["makespan"])}{"" if "period" in found else gained(found)}')
    print(idle_text(found['idle_all_ranks'], found['idle_parts']))
    bubble = '' if 'period' in found else f', bubble {found["bubble"]:.2%}'
    print(f'window {number(found["window"])}{bubble}')
    print(f'{peak_text(found, units)}\n{MEANING}')
    if 'period' in found:
        print_asynchronous(found)


def peak_head(units: Units) -> str:
    """Return the head of a column of `peak` in `units`."""
    return 'peak, GiB' if units.memory == BYTES else 'peak activations'


def peak_text(found: dict, units: Units) -> str:
    """Return the most that a rank holds."""
    most = number(units.scaled(max(found['peak_activations'])))
    return f'peak memory {most} GiB' if units.memory == BYTES else f'peak activations {most}'


def with_layers(
    file: str | None, schedule: Schedule, heads: list[str], rows: Sequence[tuple[object, ...]]
) -> tuple[list[str], list[tuple[object, ...]]]:
    """Return a table of ranks with the layers of each, where a plan's file has a layout."""
    layout = load_plan(file).layout if file else None
    if layout is None:
        return heads, list(rows)
    held, placement = layout.split('|'), schedule.placement
    own = [' '.join(held[s] for s in placement.stages(rank)) for rank in range(len(rows))]
    return [*heads, 'layers'], [(*row, text) for row, text in zip(rows, own, strict=True)]


def print_asynchronous(found: dict) -> None:
    """Print what a call takes, and how late gradients are: the model trained is another one."""
    m, period = found['microbatches_a_call'], number(found['period'])
    print_wrapped(
        f'asynchronous: period {period} of a call of {m} microbatches, bubble of it '
        f'{found["bubble"]:.2%}{gained(found)}'
    )
    copies = ' '.join(map(str, found['weight_copies']))
    delays = ' '.join(number(each['mean'], 3) for each in found['delays'])
    print_wrapped(f'weight copies of each stage {copies}')
    print_wrapped(f'delay of its forwards in steps, in the mean {delays}')


def gained(found: dict) -> str:
    """Return how much less time that is than the rival's; empty: there is none."""
    rival = found['against'] or {'name': '', 'makespan': None}
    return gain_text(found.get('period', found['makespan']), rival['makespan'], rival['name'])


def idle_text(share: float, parts: Mapping[str, float]) -> str:
    """Return the share of all GPU time that is idle, and its causes."""
    told = ', '.join(
        f'{cause.replace("_", " ")} {part:.2%}' for cause, part in parts.items() if part >= 5e-5
    )
    return f'idle GPU time {share:.2%}{f": {told}" if told else ""}'


def gib(amount: float) -> str:
    """Return bytes for people."""
    return f'{amount / 2**30:.2f} GiB'


def print_json(value: dict) -> None:
    """Print one JSON object."""
    print(json.dumps(value))


def print_wrapped(text: str) -> None:
    """Print lines of at most 80 columns, the later ones indented by four more than the first."""
    indent = ' ' * (len(text) - len(text.lstrip()) + 4)
    print(textwrap.fill(text, 80, subsequent_indent=indent, break_on_hyphens=False))


def picture_format(path: str | None, title: str | None, saves: str = '') -> str | None:
    """Return the format of a picture by the suffix of its path; None: no picture.

    Args:
        path: of --output.
        title: of --title.
        saves: what a path that ends in .json asks for, which is no picture; empty: nothing.

    Raises:
        ValueError: there is no such format, or a title of no picture.
    """
    plain = not path or (bool(saves) and path.endswith('.json'))
    if plain and title is not None:
        raise ValueError(f'--title {title!r} heads a picture: name one by -o')
    if not path or plain:
        return None
    suffix = Path(path).suffix[1:].lower()
    if suffix not in PICTURES:
        saved = f'.json for {saves}, or ' if saves else 'a file of '
        raise ValueError(f'-o {path}: name {saved}{", ".join(f".{each}" for each in PICTURES)}')
    return suffix


def draw(
    args: Namespace,
    to: str,
    shown: Mapping[str, Case],
    timelines: Mapping[str, Timeline],
    heading: str,
) -> None:
    """Write the picture of `timelines` in format `to`, where --output says, headed by --title."""
    costs = {name: case.costs for name, case in shown.items()}
    unit, named = next(iter(shown.values())).units.time, {'title': args.title} if args.title else {}
    if to == 'perfetto':
        return write(args.output, perfetto(timelines, costs))
    if to in ('png', 'pdf'):
        return timeline_png(timelines, args.output, unit, heading=heading, **named)
    picture: Callable[..., str] = {'html': html, 'svg': svg}[to]
    write(args.output, picture(timelines, costs, heading=f'{heading}, time in {unit}', **named))


def write(path: str, text: str) -> None:
    """Write a file of text."""
    Path(path).write_text(text, encoding='utf-8')
