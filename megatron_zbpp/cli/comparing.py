"""`zbpp compare`: schedules at given costs, or on partitions of a model at several latencies."""

from __future__ import annotations

import csv
from argparse import ArgumentParser
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_zbpp.analysis.gain import RIVAL
from megatron_zbpp.cli import arguments, printing
from megatron_zbpp.cli.arguments import add_options
from megatron_zbpp.cli.partitioning import limit_of
from megatron_zbpp.cli.printing import print_json, print_table, print_wrapped
from megatron_zbpp.ir.formats import MANY
from megatron_zbpp.ir.timeline import MEANING
from megatron_zbpp.partitioning import comparison
from megatron_zbpp.planner.cost_sources import NO_TIMES, PlanCosts
from megatron_zbpp.planner.figures import facts
from megatron_zbpp.planner.limits import Bytes
from megatron_zbpp.render.scene import number
from megatron_zbpp.schedules import names
from megatron_zbpp.techniques.composition import OUTPUT
from megatron_zbpp.techniques.vocabulary.place import WHOLE, has_shards


def add_compare(command: ArgumentParser) -> None:
    """Add the arguments of `zbpp compare`, also over layers, partitions and latencies."""
    add_options(
        command,
        """
        --schedules NAME,...  names  default: all that can be built
        --file FILE  path  a plan beside them, whose sizes and costs they take; or another schedule
        """,
    )
    arguments.add_shape(command)
    arguments.add_costs(command, layers=False)  # its own compares partitions
    arguments.add_vocabulary(command)
    add_options(
        command,
        arguments.AGAINST,
        f"""
        -o --output FILE  path  picture: .html, .svg, .png, .pdf
        {arguments.TITLE}
        --layers-file (--layers) FILE  path as layers  of a model, as for zbpp partition: compare on
            partitions of it, not on --times
        --devices FILE  path  with --layers-file: as for zbpp partition
        --latencies C,...  amounts  with --layers-file: times of a message; default 0
        --csv FILE  path  with --layers-file: where to write the rows
        """,
    )


def compare(
    schedules: list[str] | None,
    against: str,
    output: str | None,
    title: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Print a table, and draw a picture, of the named schedules or of all that can be built."""
    if options['layers']:
        given = {**options, 'against': against, 'output': output, 'title': title}
        return _compare_partitions(given, schedules or names(), as_json)
    for name in ('devices', 'latencies', 'csv'):
        if options[name] is not None:
            raise ValueError(f"--{name} goes with --layers-file: name the file of a model's layers")
    for name in ('num_ranks', 'num_microbatches'):
        if options[name] is None and options['file'] is None:
            raise ValueError(
                f'{arguments.flag(name)} is missing: give a number from 1 up, or --file of a plan'
            )
    picture = printing.picture_format(output, title)
    with printing.progress('schedules', 'it', len(schedules or names())) as done:
        asked, found, skipped = arguments.case_request(options).cases(schedules or (), done)
    known = {name: facts(case, case.timeline, against) for name, case in found.items()}
    in_turn = sorted(known, key=lambda name: known[name].get('period', known[name]['makespan']))
    if output and picture:
        shown = {name: found[name] for name in in_turn}
        printing.draw(output, picture, title, shown, asked.heading())
    found_facts = [known[name] for name in in_turn]
    if as_json:
        left_out = [{'name': name, 'reason': reason} for name, reason in skipped.items()]
        return print_json({'schedules': found_facts, 'skipped': left_out, 'picture': output})
    print_table(*printing.rows(found_facts, asked.units))
    if isinstance(asked.costs, PlanCosts):
        print_wrapped('other schedules: stages of the plan joined, or cut into equal parts')
    rival = against + WHOLE * any(has_shards(case.schedule) for case in found.values())
    print_wrapped(f'gain: time saved against {rival}; {MEANING}')
    if more := [f'{each["name"]} {each["copies"]}' for each in found_facts if each['copies'] > 1]:
        print_wrapped(f'copies of the weights, of a stage at most: {", ".join(more)}')
    if late := [each['name'] for each in found_facts if 'period' in each]:
        print_wrapped(
            f'asynchronous, train another model: {", ".join(late)}; period: time of a call of '
            f'{asked.num_microbatches} microbatches once the pipeline is full, and bubble that of '
            'it'
        )
    for name, reason in skipped.items():
        print(f'without {name}: {reason}')
    if output:
        print(f'wrote {output}')


def _compare_partitions(
    options: Mapping[str, Any], schedules: Iterable[str], as_json: bool
) -> None:
    """Print which schedule is best on which partition at which latency; write the CSV."""
    _require_read(options)
    file, m, limit = (options[name] for name in ('layers', 'num_microbatches', 'memory_limit'))
    layers = arguments.load_layers(file)
    devices = arguments.load_devices(options['devices'], options['num_ranks'])
    wanted, latencies = list(schedules), options['latencies'] or [0.0]
    limit = limit_of(limit and [limit], layers, file)
    _, skipped = comparison.comparable(wanted, layers, len(devices), m)
    rows: list[comparison.Row] = []
    with printing.progress('comparing', 'it', len(latencies)) as done:
        for at, latency in enumerate(latencies, 1):
            rows += comparison.compared(layers, devices, m, wanted, [latency], memory_limit=limit)
            done(at / len(latencies))
    for row in (each for each in rows if not each.fits):
        name = f'{row.schedule}, {row.partition}, at {row.latency:g}'
        found = ', and no partition was found that fits' * (row.partition == comparison.BEST)
        held = f'{Bytes(row.memory) if row.memory >= MANY else row.memory:g}'
        skipped[name] = f'a rank holds {held}, above its memory{found}'
    rows = [row for row in rows if row.fits]
    reasons = [f'without {name}: {why}' for name, why in skipped.items()]
    if not rows:
        raise ValueError(f'no schedule fits: {"; ".join(reasons)}')
    if options['csv']:
        with Path(options['csv']).open('w', newline='', encoding='utf-8') as file:
            writer = csv.writer(file)
            writer.writerow(comparison.Row._fields)
            writer.writerows(rows)
    best = comparison.winners(rows)
    if as_json:
        return print_json(
            {
                'rows': [row._asdict() for row in rows],
                'best': [row._asdict() for row in best.values()],
                'skipped': [{'name': name, 'reason': why} for name, why in skipped.items()],
            }
        )
    _print(rows, latencies)
    for kind in comparison.PARTITIONS:
        at_each = ((at, best.get((kind, at))) for at in latencies)
        said = [
            f'{row.schedule} at {at:g} (gain {row.gain:.1%})' if row else f'none at {at:g}'
            for at, row in at_each
        ]
        print(f'shortest on the {kind} partition: {", ".join(said)}')
    print(f'gain: time saved against {RIVAL} on the even partition')
    print(*reasons, sep='\n', end='\n' * bool(reasons))
    if options['csv']:
        print(f'wrote {options["csv"]}')


def _require_read(given: Mapping[str, Any]) -> None:
    for name in ('num_ranks', 'num_microbatches'):
        if given[name] is None:
            raise ValueError(f'--layers-file needs {arguments.flag(name)}: give a number from 1 up')
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
            raise ValueError(
                f'{arguments.flag(name)} does not go with --layers-file: {cure}; leave it out'
            )


def _print(rows: list[comparison.Row], latencies: list[float]) -> None:
    """Print makespans: a line a schedule and partition, a column a latency; of one, the gain."""
    lines: dict[tuple[str, str], dict[float, comparison.Row]] = {}
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
