"""Output of the subcommands of `zbpp`: facts, tables, pictures."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TextIO, TypeVar

from megatron_zbpp.analysis.gain import gain_text, megatron_refuses
from megatron_zbpp.ir import Placement, Schedule
from megatron_zbpp.ir.formats import BYTES, UNITS, Units
from megatron_zbpp.ir.timeline import MEANING, Timeline
from megatron_zbpp.planner.cases import Case
from megatron_zbpp.planner.figures import FORMATS, Lines, shape
from megatron_zbpp.render.drawing import examples
from megatron_zbpp.render.html import html
from megatron_zbpp.render.perfetto import perfetto
from megatron_zbpp.render.png import timeline_png
from megatron_zbpp.render.scene import number
from megatron_zbpp.render.svg import svg
from megatron_zbpp.techniques.updates.versions import updates_of

Found = TypeVar('Found')
PICTURES = ('html', 'svg', 'png', 'pdf')  # formats, and how names of their files end
# of a table of schedules, see `row`; with names as long as there are, a line has 80 columns
HEADS = ('schedule', 'makespan', 'gain', 'idle', 'window', 'bubble', 'peak')

_found: ContextVar[list[tuple[Sequence[str], Lines]] | None] = ContextVar('found', default=None)


def takes_colours(stream: TextIO) -> bool:
    """Return True for a terminal that shows colours, where the user wants them."""
    return stream.isatty() and not os.environ.get('NO_COLOR') and os.environ.get('TERM') != 'dumb'


def legend(timeline: Timeline, width: int) -> str:
    """Return the meaning of the labels in `timeline_text(timeline, width)`."""
    schedule = timeline.schedule
    used = dict.fromkeys(p.kind for order in schedule.passes for p in order)
    kinds = ', '.join(f'{kind} {schedule.graph.kinds[kind].words}' for kind in used)
    return '; '.join((f'{kinds}, · idle', *examples(timeline, width)))


def rows(
    found: Sequence[dict], units: Units = UNITS
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return heads and lines of a table; of asynchronous schedules the period, of a call."""
    heads = (*HEADS[:-1], 'peak, GiB' if units.memory == BYTES else HEADS[-1])
    lines = [row(each, units) for each in found]
    if not any('period' in each for each in found):
        return heads, lines
    periods = (number(each['period']) if 'period' in each else '' for each in found)
    return (*heads, 'period'), [(*line, each) for line, each in zip(lines, periods, strict=True)]


def row(found: dict, units: Units = UNITS) -> tuple[str, ...]:
    """Return the facts as a line of a table; an asynchronous schedule has no iteration."""
    makespan, window = number(found['makespan']), number(found['window'])
    idle = f'{found["idle_all_ranks"]:.2%}'
    if 'period' in found:
        makespan = window = idle = '-'
    gain = '-' if found['gain'] is None else f'{found["gain"]:.1%}'
    most = number(units.scaled(max(found['peak_activations'])))
    return found['name'], makespan, gain, idle, window, f'{found["bubble"]:.2%}', most


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
    """Print that a training reverses the ranks, if it does."""
    if placement.is_one_way and placement.num_ranks > 1 and placement.only_route[-1] == 0:
        print('Megatron wants the loss on its last rank: it runs this with the ranks reversed')


def print_summary(found: dict, units: Units = UNITS) -> None:
    """Print the facts of one schedule."""
    print(f'makespan {number(found["makespan"])}{"" if "period" in found else gained(found)}')
    print(idle_text(found['idle_all_ranks'], found['idle_parts']))
    bubble = '' if 'period' in found else f', bubble {found["bubble"]:.2%}'
    print(f'window {number(found["window"])}{bubble}')
    print(peak_text(found, units))
    print(MEANING)
    if 'period' in found:
        print_asynchronous(found)


def peak_text(found: dict, units: Units) -> str:
    """Return the peak memory of the fullest rank, as text."""
    most = number(units.scaled(max(found['peak_activations'])))
    return f'peak memory {most} GiB' if units.memory == BYTES else f'peak activations {most}'


def print_asynchronous(found: dict) -> None:
    """Print the time of a call and the delays of gradients: another model is trained."""
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
    """Return the time saved against the rival, as text; empty: the schedule has no rival."""
    rival = found['against'] or {'name': '', 'makespan': None}
    return gain_text(found.get('period', found['makespan']), rival['makespan'], rival['name'])


def idle_text(share: float, parts: Mapping[str, float]) -> str:
    """Return the share of all GPU time that is idle, and its causes."""
    told = ', '.join(
        f'{cause.replace("_", " ")} {part:.2%}' for cause, part in parts.items() if part >= 5e-5
    )
    return f'idle GPU time {share:.2%}{f": {told}" if told else ""}'


def gib(amount: float) -> str:
    """Return bytes as text in GiB."""
    return f'{amount / 2**30:.2f} GiB'


def say(text: str) -> None:
    """Print a line on stderr."""
    print(f'zbpp: {text}', file=sys.stderr)


def print_json(value: dict) -> None:
    """Print one JSON object."""
    print(json.dumps(value))


def print_wrapped(text: str) -> None:
    """Print lines of at most 80 columns, the later ones indented by four more than the first."""
    indent = ' ' * (len(text) - len(text.lstrip()) + 4)
    print(textwrap.fill(text, 80, subsequent_indent=indent, break_on_hyphens=False))


def picture_format(path: str | None, title: str | None, saves: str = '') -> str | None:
    """Return the format of a picture by the suffix of its path; None: no picture."""
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


def draw(path: str, to: str, title: str | None, shown: Mapping[str, Case], heading: str) -> None:
    """Write the picture of schedules in format `to`, headed by `title`, if there is one."""
    costs = {name: case.costs for name, case in shown.items()}
    timelines = {name: case.timeline for name, case in shown.items()}
    unit = next(iter(shown.values())).units.time
    named: dict[str, Any] = {'title': title} if title else {}
    if to == 'perfetto':
        return write(path, perfetto(timelines, costs))
    if to in ('png', 'pdf'):
        return timeline_png(timelines, path, unit, heading=heading, **named)
    picture: Callable[..., str] = {'html': html, 'svg': svg}[to]
    write(path, picture(timelines, costs, heading=f'{heading}, time in {unit}', **named))


def write(path: str, text: str) -> None:
    """Write a file of text."""
    Path(path).write_text(text, encoding='utf-8')


def print_table(heads: Sequence[str], rows: Lines) -> None:
    """Print a table; with `--table` it is kept for that."""
    found = _found.get()
    if found is None:
        print(FORMATS['text'](heads, rows))
    else:
        found.append((heads, rows))


@contextmanager
def alone(to: str | None) -> Iterator[None]:
    """Print the tables of what runs inside, and nothing else of it; None: all, as it is."""
    if to is None:
        yield
        return
    found: list[tuple[Sequence[str], Lines]] = []
    token = _found.set(found)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        _found.reset(token)
    if not found:
        raise ValueError(f'--table {to}: with these options there is no table: leave it out')
    sys.stdout.write('\n\n'.join(FORMATS[to](heads, rows) for heads, rows in found) + '\n')


def now(text: str) -> None:
    """Show the activity of a command on stderr, in place of the last one; empty: none."""
    if sys.stderr.isatty():
        print(f'\r\x1b[K{text}', end='', file=sys.stderr, flush=True)


@contextmanager
def progress(text: str, unit: str, total: int) -> Iterator[Callable[[float], None]]:
    """Show a bar on a terminal while the block runs; yields a function of the share done."""
    if not sys.stderr.isatty():
        yield lambda share: None
        return
    from tqdm import tqdm

    with tqdm(desc=text, unit=unit, total=total, leave=False) as bar:

        def show(share: float) -> None:
            bar.update(round(total * share) - bar.n)

        yield show


def searched(
    doing: str, what: str, search: Callable[[Callable[[float], None]], Found]
) -> tuple[Found, int]:
    """Return the result of a search, and the exit status: 0, or 130 where Ctrl-C ended it.

    What a search raises at Ctrl-C has the `best` that it knew.
    """
    try:
        with progress(doing, '%', 100) as done:
            return search(done), 0
    except KeyboardInterrupt as interruption:
        if (found := getattr(interruption, 'best', None)) is None:
            raise
    say(f'interrupted: {what} by then')
    return found, 128 + signal.SIGINT
