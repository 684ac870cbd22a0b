"""Schedules as drawings and files: `zbpp show`, `zbpp convert` and `zbpp page`."""

from __future__ import annotations

import json
import shutil
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from megatron_zbpp.cli import arguments, values
from megatron_zbpp.cli.arguments import case_request
from megatron_zbpp.cli.printing import (
    PICTURES,
    draw,
    gained,
    idle_text,
    legend,
    peak_text,
    print_asynchronous,
    print_headline,
    print_json,
    print_reversed,
    print_wrapped,
    progress,
    takes_colours,
    write,
)
from megatron_zbpp.ir import formats
from megatron_zbpp.ir.grid import grid
from megatron_zbpp.planner.cases import Case
from megatron_zbpp.planner.figures import facts, shape
from megatron_zbpp.render.planner_page import Sizes, planner_page
from megatron_zbpp.render.scene import number
from megatron_zbpp.render.text import time_shown, timeline_text

_MOST_PAGE_RANKS = 64  # of a page: more are narrower than their labels
# Formats that `convert` writes, and how names of their files end; of one end the first is meant.
FORMATS = {
    'json': '.json',
    'torch-csv': '.csv',
    'html': '.html',
    'svg': '.svg',
    'png': '.png',
    'pdf': '.pdf',
    'perfetto': '.json',
}


def add_show(parser: ArgumentParser) -> None:
    """Add what `zbpp show` takes beside a schedule and costs."""
    parser.add_argument('--order', action='store_true', help='orders only, also of an invalid file')
    parser.add_argument(
        '--width', type=values.whole, help='columns; 0: all it takes. Default: the terminal'
    )
    arguments.add_against(parser)
    arguments.add_vocabulary(parser)


def show(args: Namespace) -> None:
    """Print a schedule: to scale, or with `--order` its orders as they stand, unchecked."""
    width = shutil.get_terminal_size((120, 24)).columns if args.width is None else args.width
    if args.order:
        schedule = formats.load(args.file) if args.file else case_request(args).case().schedule
        drawing = grid(schedule, width=width or sys.maxsize, height=sys.maxsize)
        return print_json({'order': drawing.splitlines()}) if args.json else print(drawing)
    case = case_request(args).case()
    timeline = case.timeline
    if args.json:
        spans = [
            [[str(p), *span] for p, span in zip(*rank, strict=True)]
            for rank in zip(case.schedule.passes, timeline.spans, strict=True)
        ]
        return print_json({'schedule': json.loads(case.schedule.to_json()), 'timeline': spans})
    print_headline(case.schedule)
    print(timeline_text(timeline, width, colours=takes_colours(sys.stdout)))
    shown = time_shown(timeline, width)
    if shown < timeline.makespan:
        units = f'{number(shown, 3)} of {number(timeline.makespan)}'
        print(f'… {units} time units shown: --width 0 shows all')
    print_wrapped(legend(timeline, width))
    print_reversed(case.schedule.placement)
    found = facts(case, timeline, args.against)
    print(
        f'makespan {number(timeline.makespan)}{"" if "period" in found else gained(found)}, '
        f'{peak_text(found, case.units)}'
    )
    print(idle_text(found['idle_all_ranks'], found['idle_parts']))
    if 'period' in found:
        print_asynchronous(found)


def add_convert(parser: ArgumentParser) -> None:
    """Add what `zbpp convert` takes beside a schedule and costs."""
    arguments.add_vocabulary(parser)
    parser.add_argument(
        '--to', choices=[*FORMATS], help='format; default: as the name of the file ends'
    )
    parser.add_argument(
        '-o', '--output', type=values.path, metavar='FILE', required=True, help='where to'
    )
    arguments.add_title(parser)
    parser.add_argument(
        '--dialect',
        choices=formats.DIALECTS,
        default='new',
        help='of torch-csv: new (since 2.6) has I and B where old has B and BW; default new',
    )


def convert(args: Namespace) -> None:
    """Write a schedule in another format."""
    to = _format(args.output, args.to)
    if args.title is not None and to not in PICTURES:
        raise ValueError(f'--title {args.title!r} heads a picture, which {to} is not: leave it out')
    asked = case_request(args)
    case = asked.case()
    if to == 'json':
        write(args.output, _kept(args.file, case))
    elif to == 'torch-csv':
        write(args.output, formats.to_torch_csv(case.schedule, args.dialect))
    else:
        name = case.schedule.name
        draw(args.output, to, args.title, {name: case}, asked.heading(case))
    if args.json:
        return print_json({'written': args.output, 'to': to, **shape(case.schedule)})
    print(f'wrote {args.output}')


def _kept(file: str | None, case: Case) -> str:
    """Return the schedule as JSON; of a plan with all that its file has."""
    fields = formats.load_plan(file).fields if file else {}
    if 'costs' not in fields:
        return case.schedule.to_json()
    now = formats.memory_of_plan(case.costs, case.units)
    return json.dumps({**fields, 'schedule': json.loads(case.schedule.to_json()), **now}, indent=1)


def _format(file: str, asked: str | None) -> str:
    suffix = Path(file).suffix.lower()
    said = next((name for name, ends in FORMATS.items() if ends == suffix), None)
    to = asked or said
    if to is None:
        known = ', '.join(dict.fromkeys(FORMATS.values()))
        raise ValueError(f'{file} does not say its format: end it in {known}, or give --to')
    if said is not None and FORMATS[to] != suffix:
        raise ValueError(f'{file} is no name for --to {to}: end it in {FORMATS[to]}, or drop --to')
    return to


def add_page(parser: ArgumentParser) -> None:
    """Add the sizes of the page, and where to write it."""
    usual = Sizes()
    for name, field, metavar, read, text in (
        ('--pp', 'ranks', 'P,...', _ranks, 'ranks to choose from'),
        ('--microbatches', 'microbatches', 'M,...', values.counts, 'microbatches to choose from'),
        ('--vpp', 'chunks', 'V,...', values.counts, 'chunks per rank, where a schedule takes any'),
    ):
        default = getattr(usual, field)
        parser.add_argument(
            name,
            dest=field,
            type=read,
            default=default,
            metavar=metavar,
            help=f'{text}; default {",".join(map(str, default))}',
        )
    parser.add_argument(
        '-o',
        '--output',
        type=_page,
        required=True,
        metavar='FILE',
        help='where to write the page: .html',
    )


def write_page(args: Namespace) -> None:
    """Write the page, with the schedules of all sizes that are asked for."""
    sizes = Sizes(args.ranks, args.microbatches, args.chunks)
    if not Path(args.output).parent.is_dir():
        raise ValueError(f'{args.output} is in no folder that is there: give another path')
    with progress('orders', 'it', 100) as done:
        page = planner_page(sizes, done)
    write(args.output, page)
    size = len(page.encode())
    if args.json:
        return print_json({'written': args.output, 'bytes': size, **sizes._asdict()})
    print(f'wrote {args.output}, {size} bytes: open it in a browser')


def _ranks(text: str) -> list[int]:
    found = values.counts(text)
    values.require(text, max(found) <= _MOST_PAGE_RANKS, f'give at most {_MOST_PAGE_RANKS} ranks')
    return found


def _page(text: str) -> str:
    right = values.path(text).lower().endswith('.html')
    values.require(text, right, 'give the path of a page, which ends in .html')
    return text
