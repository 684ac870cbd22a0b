"""Schedules as drawings and files: `zbpp show`, `zbpp convert` and `zbpp page`."""

from __future__ import annotations

import json
import shutil
import sys
from argparse import ArgumentParser
from pathlib import Path

from megatron_zbpp.cli import arguments, printing
from megatron_zbpp.cli.arguments import add_options
from megatron_zbpp.ir import formats
from megatron_zbpp.ir.schedule import grid
from megatron_zbpp.planner.cases import Case, CaseRequest
from megatron_zbpp.planner.figures import facts, shape
from megatron_zbpp.render.drawing import time_shown, timeline_text
from megatron_zbpp.render.planner_page import Sizes, planner_page
from megatron_zbpp.render.scene import number

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


SHOW = """
    --order  switch  orders only, also of an invalid file
    --width  whole  columns; 0: all it takes. Default: the terminal
"""  # beside a schedule and costs


def show(request: CaseRequest, order: bool, width: int | None, against: str, as_json: bool) -> None:
    """Print a schedule: to scale, or with `--order` its orders as they stand, unchecked."""
    width = shutil.get_terminal_size((120, 24)).columns if width is None else width
    if order:
        schedule = formats.load(request.file) if request.file else request.case().schedule
        drawing = grid(schedule, width=width or sys.maxsize, height=sys.maxsize)
        return printing.print_json({'order': drawing.splitlines()}) if as_json else print(drawing)
    case = request.case()
    timeline = case.timeline
    if as_json:
        spans = [
            [[str(p), *span] for p, span in zip(*rank, strict=True)]
            for rank in zip(case.schedule.passes, timeline.spans, strict=True)
        ]
        return printing.print_json(
            {'schedule': json.loads(case.schedule.to_json()), 'timeline': spans}
        )
    printing.print_headline(case.schedule)
    print(timeline_text(timeline, width, colours=printing.takes_colours(sys.stdout)))
    shown = time_shown(timeline, width)
    if shown < timeline.makespan:
        units = f'{number(shown, 3)} of {number(timeline.makespan)}'
        print(f'… {units} time units shown: --width 0 shows all')
    printing.print_wrapped(printing.legend(timeline, width))
    printing.print_reversed(case.schedule.placement)
    found = facts(case, timeline, against)
    gained = '' if 'period' in found else printing.gained(found)
    most = printing.peak_text(found, case.units)
    print(f'makespan {number(timeline.makespan)}{gained}, {most}')
    print(printing.idle_text(found['idle_all_ranks'], found['idle_parts']))
    if 'period' in found:
        printing.print_asynchronous(found)


def add_convert(parser: ArgumentParser) -> None:
    """Add the arguments of `zbpp convert` beside a schedule and costs."""
    arguments.add_vocabulary(parser)
    add_options(
        parser,
        """
        --to  formats  format; default: as the name of the file ends
        -o --output FILE  path!  where to
        """,
        formats=[*FORMATS],
    )
    add_options(parser, arguments.TITLE)
    add_options(
        parser,
        """
        --dialect  dialects = new  of torch-csv: new (since 2.6) has I and B where old has B and BW;
            default new
        """,
        dialects=formats.DIALECTS,
    )


def convert(
    request: CaseRequest,
    output: str,
    to: str | None,
    title: str | None,
    dialect: str,
    as_json: bool,
) -> None:
    """Write a schedule in another format."""
    suffix = Path(output).suffix.lower()
    said = next((name for name, ends in FORMATS.items() if ends == suffix), None)
    to = to or said
    if to is None:
        known = ', '.join(dict.fromkeys(FORMATS.values()))
        raise ValueError(f'{output} does not say its format: end it in {known}, or give --to')
    if said is not None and FORMATS[to] != suffix:
        raise ValueError(
            f'{output} is no name for --to {to}: end it in {FORMATS[to]}, or drop --to'
        )
    if title is not None and to not in printing.PICTURES:
        raise ValueError(f'--title {title!r} heads a picture, which {to} is not: leave it out')
    case = request.case()
    if to == 'json':
        printing.write(output, _kept(request.file, case))
    elif to == 'torch-csv':
        printing.write(output, formats.to_torch_csv(case.schedule, dialect))
    else:
        name = case.schedule.name
        printing.draw(output, to, title, {name: case}, request.heading(case))
    if as_json:
        return printing.print_json({'written': output, 'to': to, **shape(case.schedule)})
    print(f'wrote {output}')


def _kept(file: str | None, case: Case) -> str:
    """Return the schedule as JSON; of a plan with all that its file has."""
    fields = formats.load_plan(file).fields if file else {}
    if 'costs' not in fields:
        return case.schedule.to_json()
    now = formats.memory_of_plan(case.costs, case.units)
    return json.dumps({**fields, 'schedule': json.loads(case.schedule.to_json()), **now}, indent=1)


def add_page(parser: ArgumentParser) -> None:
    """Add the sizes of the page, and where to write it."""
    p, m, v = (','.join(map(str, each)) for each in Sizes())
    add_options(
        parser,
        f"""
        --pp P,...  page_ranks as ranks = {p}  ranks to choose from; default {p}
        --microbatches M,...  counts = {m}  microbatches to choose from; default {m}
        --vpp V,...  counts as chunks = {v}  chunks per rank, where a schedule takes any; default
            {v}
        -o --output FILE  page!  where to write the page: .html
        """,
        page_ranks=arguments.checked(
            arguments.counts,
            lambda counts: max(counts) <= _MOST_PAGE_RANKS,
            f'give at most {_MOST_PAGE_RANKS} ranks',
        ),
        page=arguments.checked(
            arguments.path,
            lambda path: path.lower().endswith('.html'),
            'give the path of a page, which ends in .html',
        ),
    )


def write_page(
    ranks: list[int], microbatches: list[int], chunks: list[int], output: str, as_json: bool
) -> None:
    """Write the page, with the schedules of all sizes that are asked for."""
    sizes = Sizes(ranks, microbatches, chunks)
    if not Path(output).parent.is_dir():
        raise ValueError(f'{output} is in no folder that is there: give another path')
    with printing.progress('orders', 'it', 100) as done:
        page = planner_page(sizes, done)
    printing.write(output, page)
    size = len(page.encode())
    if as_json:
        return printing.print_json({'written': output, 'bytes': size, **sizes._asdict()})
    print(f'wrote {output}, {size} bytes: open it in a browser')
