"""`zbpp page`: the planner page, one file without a server."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from megatron_zbpp.cli import values
from megatron_zbpp.cli.printing import print_json, write
from megatron_zbpp.cli.progress import progress
from megatron_zbpp.render.planner_page import Sizes, planner_page

_MOST_RANKS = 64  # of a page: more are narrower than their labels


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
    values.require(text, max(found) <= _MOST_RANKS, f'give at most {_MOST_RANKS} ranks')
    return found


def _page(text: str) -> str:
    right = values.path(text).lower().endswith('.html')
    values.require(text, right, 'give the path of a page, which ends in .html')
    return text
