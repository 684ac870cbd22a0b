"""`zbpp compare`: schedules at given costs, or on partitions of a model at several latencies."""

from __future__ import annotations

import csv
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_zbpp.analysis.gain import RIVAL
from megatron_zbpp.cli import values
from megatron_zbpp.cli.arguments import (
    add_against,
    add_costs,
    add_renamed,
    add_shape,
    add_title,
    add_vocabulary,
    case_request,
    flag,
    load_devices,
    load_layers,
)
from megatron_zbpp.cli.partitioning import limit_of
from megatron_zbpp.cli.printing import (
    draw,
    picture_format,
    print_json,
    print_table,
    print_wrapped,
    progress,
    rows,
)
from megatron_zbpp.ir.formats import MANY
from megatron_zbpp.ir.timeline import MEANING
from megatron_zbpp.partitioning.comparison import (
    BEST,
    PARTITIONS,
    Row,
    comparable,
    compared,
    winners,
)
from megatron_zbpp.planner.cost_sources import NO_TIMES, PlanCosts
from megatron_zbpp.planner.figures import facts
from megatron_zbpp.planner.limits import Bytes
from megatron_zbpp.render.scene import number
from megatron_zbpp.schedules import names
from megatron_zbpp.techniques.composition import OUTPUT
from megatron_zbpp.techniques.vocabulary.place import WHOLE, has_shards


def add_compare(command: ArgumentParser) -> None:
    """Add what `zbpp compare` takes, over layers, partitions and latencies, too."""
    command.add_argument(
        '--schedules', type=values.names, metavar='NAME,...', help='default: all that can be built'
    )
    command.add_argument(
        '--file',
        type=values.path,
        metavar='FILE',
        help='a plan beside them, whose sizes and costs they take; or another schedule',
    )
    add_shape(command, required=False)
    add_costs(command, layers=False)  # its own compares partitions
    add_vocabulary(command)
    add_against(command)
    command.add_argument(
        '-o', '--output', type=values.path, metavar='FILE', help='picture: .html, .svg, .png, .pdf'
    )
    add_title(command)
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


def compare(args: Namespace) -> None:
    """Print a table, and draw a picture, of the named schedules or of all that can be built."""
    if args.layers:
        return _compare_partitions(args)
    for name in ('devices', 'latencies', 'csv'):
        if getattr(args, name) is not None:
            raise ValueError(f"--{name} goes with --layers-file: name the file of a model's layers")
    for name in ('num_ranks', 'num_microbatches'):
        if getattr(args, name) is None and args.file is None:
            raise ValueError(
                f'{flag(name)} is missing: give a number from 1 up, or --file of a plan'
            )
    picture = picture_format(args.output, args.title)
    with progress('schedules', 'it', len(args.schedules or names())) as done:
        asked, found, skipped = case_request(args).cases(args.schedules or (), done)
    known = {name: facts(case, case.timeline, args.against) for name, case in found.items()}
    in_turn = sorted(known, key=lambda name: known[name].get('period', known[name]['makespan']))
    if picture:
        shown = {name: found[name] for name in in_turn}
        draw(args.output, picture, args.title, shown, asked.heading())
    schedules = [known[name] for name in in_turn]
    if args.json:
        left_out = [{'name': name, 'reason': reason} for name, reason in skipped.items()]
        return print_json({'schedules': schedules, 'skipped': left_out, 'picture': args.output})
    print_table(*rows(schedules, asked.units))
    if isinstance(asked.costs, PlanCosts):
        print_wrapped('other schedules: stages of the plan joined, or cut into equal parts')
    against = args.against + WHOLE * any(has_shards(case.schedule) for case in found.values())
    print_wrapped(f'gain: time saved against {against}; {MEANING}')
    if more := [f'{each["name"]} {each["copies"]}' for each in schedules if each['copies'] > 1]:
        print_wrapped(f'copies of the weights, of a stage at most: {", ".join(more)}')
    if late := [found['name'] for found in schedules if 'period' in found]:
        print_wrapped(
            f'asynchronous, train another model: {", ".join(late)}; period: time of a call of '
            f'{asked.num_microbatches} microbatches once the pipeline is full, and bubble that of '
            'it'
        )
    for name, reason in skipped.items():
        print(f'without {name}: {reason}')
    if args.output:
        print(f'wrote {args.output}')


def _compare_partitions(args: Namespace) -> None:
    """Print which schedule is best on which partition at which latency; write the CSV."""
    _require_read(vars(args))
    layers, devices = load_layers(args.layers), load_devices(args.devices, args.num_ranks)
    wanted, latencies = list(args.schedules or names()), args.latencies or [0.0]
    given = args.memory_limit and [args.memory_limit]
    limit = limit_of(given, layers, args.layers)
    _, skipped = comparable(wanted, layers, len(devices), args.num_microbatches)
    rows: list[Row] = []
    with progress('comparing', 'it', len(latencies)) as done:
        for at, latency in enumerate(latencies, 1):
            rows += compared(
                layers, devices, args.num_microbatches, wanted, [latency], memory_limit=limit
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


def _require_read(given: Mapping[str, Any]) -> None:
    """Raise ValueError for options that a comparison of partitions does not read."""
    for name in ('num_ranks', 'num_microbatches'):
        if given[name] is None:
            raise ValueError(f'--layers-file needs {flag(name)}: give a number from 1 up')
    cures = {
        'file': 'partitions have their named schedules',
        'costs': 'the file of layers has them',
        'comm': '--latencies says what a message takes',
        'num_chunks': 'schedules have their usual chunks',
        'together': 'passes run apart',
        'slices seq_length attention context_exchange': 'partitions are of whole sequences',
        'vocab_parallel vocab_layers': 'the output layer is one of the layers',
        'against': 'the table has the makespan of each',
        'output title': '--csv has the rows, and no picture is drawn',
    }
    defaults = {'costs': NO_TIMES, 'vocab_layers': OUTPUT, 'against': RIVAL}
    for name, cure in ((each, cure) for dests, cure in cures.items() for each in dests.split()):
        value, default = given[name], defaults.get(name)
        if value is not default and (name == 'costs' or value != default):
            raise ValueError(f'{flag(name)} does not go with --layers-file: {cure}; leave it out')


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
