"""`zbpp compare --layers-file`: schedules on partitions and latencies, as a table and a CSV."""

from __future__ import annotations

import csv
from argparse import ArgumentParser, Namespace
from pathlib import Path

from megatron_zbpp.analysis.gain import RIVAL
from megatron_zbpp.cli import values
from megatron_zbpp.cli.arguments import add_renamed
from megatron_zbpp.cli.inputs import NO_TIMES
from megatron_zbpp.cli.layer_costs import load_devices, load_layers
from megatron_zbpp.cli.partitioning import limit_of
from megatron_zbpp.cli.printing import print_json
from megatron_zbpp.cli.progress import progress
from megatron_zbpp.cli.tables import print_table
from megatron_zbpp.ir.formats import MANY
from megatron_zbpp.partitioning.comparison import (
    BEST,
    PARTITIONS,
    Row,
    comparable,
    compared,
    winners,
)
from megatron_zbpp.planner.limits import Bytes
from megatron_zbpp.render.scene import number
from megatron_zbpp.schedules import names
from megatron_zbpp.techniques.composition import OUTPUT


def add_comparison(command: ArgumentParser) -> None:
    """Add what compares over layers, partitions and latencies."""
    add_renamed(
        command,
        '--layers-file',
        '--layers',
        'layers',
        type=values.path,
        metavar='FILE',
        help='of a model, as for zbpp partition: compare on partitions of it, not on --times',
    )
    command.add_argument(
        '--devices',
        type=values.path,
        metavar='FILE',
        help='with --layers-file: as for zbpp partition',
    )
    command.add_argument(
        '--latencies',
        type=values.amounts,
        metavar='C,...',
        help='with --layers-file: times of a message; default 0',
    )
    command.add_argument(
        '--csv',
        type=values.path,
        metavar='FILE',
        help='with --layers-file: where to write the rows',
    )


def compare_partitions(args: Namespace) -> None:
    """Print which schedule is best on which partition at which latency; write the CSV."""
    _refuse_what_is_not_read(args)
    layers, devices = load_layers(args.layers), load_devices(args.devices, args.pp)
    wanted, latencies = list(args.schedules or names()), args.latencies or [0.0]
    given = args.memory_limit and [args.memory_limit]
    limit = limit_of(given, layers, args.layers)
    _, skipped = comparable(wanted, layers, len(devices), args.microbatches)
    rows: list[Row] = []
    with progress('comparing', 'it', len(latencies)) as done:
        for at, latency in enumerate(latencies, 1):
            rows += compared(
                layers,
                devices,
                args.microbatches,
                wanted,
                [latency],
                memory_limit=limit,
            )
            done(at / len(latencies))
    for row in (each for each in rows if not each.fits):
        name = f'{row.schedule}, {row.partition}, at {row.latency:g}'
        found = ', and no partition was found that fits' * (row.partition == BEST)
        skipped[name] = f'a rank holds {_memory(row)}, above its memory{found}'
    rows = [row for row in rows if row.fits]
    if not rows:
        raise ValueError(f'no schedule fits: {"; ".join(_reasons(skipped))}')
    if args.csv:
        with Path(args.csv).open('w', newline='', encoding='utf-8') as file:
            writer = csv.writer(file)
            writer.writerow(Row._fields)
            writer.writerows(rows)
    best = winners(rows)
    if args.json:
        return print_json(
            {
                'rows': [row._asdict() for row in rows],
                'best': [row._asdict() for row in best.values()],
                'skipped': [{'name': name, 'reason': why} for name, why in skipped.items()],
            }
        )
    _print(rows, latencies)
    for kind in PARTITIONS:
        at_each = ((at, best.get((kind, at))) for at in latencies)
        said = [
            f'{row.schedule} at {at:g} (gain {row.gain:.1%})' if row else f'none at {at:g}'
            for at, row in at_each
        ]
        print(f'shortest on the {kind} partition: {", ".join(said)}')
    print(f'gain: time saved against {RIVAL} on the even partition')
    for reason in _reasons(skipped):
        print(reason)
    if args.csv:
        print(f'wrote {args.csv}')


def _memory(row: Row) -> str:
    """Return the most that a rank holds, in GiB where that is in bytes."""
    return f'{Bytes(row.memory) if row.memory >= MANY else row.memory:g}'


def _reasons(skipped: dict[str, str]) -> list[str]:
    return [f'without {name}: {why}' for name, why in skipped.items()]


def _refuse_what_is_not_read(args: Namespace) -> None:
    if args.pp is None or args.microbatches is None:
        missing = '--pp' if args.pp is None else '--microbatches'
        raise ValueError(f'--layers-file needs {missing}: give a number from 1 up')
    cures = {
        'file': 'partitions have their named schedules',
        'times': 'the file of layers has them',
        'comm': '--latencies says what a message takes',
        'vpp': 'schedules have their usual chunks',
        'together': 'passes run apart',
        'slices seq_length attention context_exchange': 'partitions are of whole sequences',
        'vocab_parallel vocab_layers': 'the output layer is one of the layers',
        'against': 'the table has the makespan of each',
        'output title': '--csv has the rows, and no picture is drawn',
    }
    defaults = {'times': NO_TIMES, 'vocab_layers': OUTPUT, 'against': RIVAL}
    for name, cure in ((each, cure) for dests, cure in cures.items() for each in dests.split()):
        given, default = getattr(args, name), defaults.get(name)
        if given is not default and (name == 'times' or given != default):
            flag = '--' + name.replace('_', '-')
            raise ValueError(f'{flag} does not go with --layers-file: {cure}; leave it out')


def _print(rows: list[Row], latencies: list[float]) -> None:
    """Print makespans: a line a schedule and partition, a column a latency; of one, the gain."""
    lines: dict[tuple[str, str], dict[float, Row]] = {}
    for row in rows:
        lines.setdefault((row.schedule, row.partition), {})[row.latency] = row
    in_turn = sorted(
        lines.items(), key=lambda line: min((at, row.makespan) for at, row in line[1].items())
    )
    alone = len(latencies) == 1
    table = [
        (
            f'{name}, {kind}',
            *(number(own[at].makespan) if at in own else '-' for at in latencies),
            *(f'{row.gain:.1%}' for row in own.values() if alone),
        )
        for (name, kind), own in in_turn
    ]
    heads = ('makespan at a latency of', *(f'{at:g}' for at in latencies))
    print_table((*heads, *(['gain'] if alone else [])), table)
