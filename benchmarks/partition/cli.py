"""The command line of scripts/benchmark_partition.py."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.common.spawning import collected
from benchmarks.common.tables import aligned
from benchmarks.partition import profiles
from benchmarks.partition.cases import (
    MEGATRON,
    Entry,
    Known,
    entries,
    gpt,
    machines,
    scaled,
    sharded,
)
from benchmarks.partition.measured import Gpt
from benchmarks.partition.place import Place, made
from benchmarks.partition.resident import planned, resident
from benchmarks.partition.run import Job, Sample, alike, measure
from megatron_zbpp.analysis.fit_costs import middle
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.partitioning.layers import Devices

_ABOUT = """\
From the costs of layers to a partition to measured iterations, without a GPU: the even split by
Megatron's own 1F1B and by zb-v, the layout that is best for Megatron's 1F1B, and the best plan of
all take turns. Passes sleep for the times of their layers around a tiny real product; with --real
they are those of Megatron's GPT, profiled while all ranks train.
"""
_MORE = """\
a GPT whose head takes as long as three layers:

    python scripts/benchmark_partition.py --head 3

the costs measured on a real GPT with 40,000 words, by least squares, beside those of its shape:

    python scripts/benchmark_partition.py --measure --hidden-size 1024 --words 40000

the output layer on all ranks, beside the even split and the best layout of stock 1F1B:

    python scripts/benchmark_partition.py --pp 8 --layers 32 --microbatches 32 --head 16 \\
        --shards 1f1b,zb-v

a rank that takes half as long again; two hosts with a link of 20 Mbit/s (Linux, as root):

    python scripts/benchmark_partition.py --head 3 --slow 2:1.5 --busy
    python scripts/benchmark_partition.py --head 3 --link-mbit 20

real passes, four ranks that each have 0.45 of one of two processors (Linux, as root):

    python scripts/benchmark_partition.py --real --share 0.45 --seq-length 64

the same with real passes of a head of 64k words:

    python scripts/benchmark_partition.py --real --share 0.35 --hidden-size 512 --layers 16 \\
        --seq-length 256 --words 65536 --shards 1f1b,zb-v [--tied] [--memory]

columns: layers of each stage; median of the iterations; what the simulator predicted, and how far
that is off; what it says by the times that passes and collectives of these very iterations took,
and how far that is off (Megatron's own do not tell theirs); ratio to the even split with Megatron's
1F1B. Real passes are predicted by those of 1f1b and zb-h1, which take turns with all others.
"""
_BYTES = 64  # of a row of a message


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, plan, measure, report; the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        _check(args)
        slow = _slow(args.slow, args.pp)
        linked = args.link_mbit is not None
        bandwidth = 1e6 * args.link_mbit / 8 if linked else 0.0
        devices = machines(args.pp, slow, 2 if linked else 1, bandwidth)
        with made(args.link_mbit, _shares(args, devices)) as place:
            gpt = _gpt(args, args.microbatches) if args.real else None
            if gpt:
                known, fused, found = profiles.beside(gpt, place, devices)
            else:
                known, found = _emulated(args, devices)
                fused = known
            chosen = _chosen(args, known, fused)
            profiled = profiles.beside_all(known, fused, gpt, bool(args.shards)) if gpt else {}
            job = Job(
                (*chosen, *profiled.values()),
                known.layers,
                tuple(device.factors[0] for device in devices.devices),
                args.microbatches,
                args.rows,
                args.rounds,
                place,
                args.realtime,
                args.busy,
                gpt,
            )
            samples = collected(measure(job), [each.title for each in job.entries], args.rounds)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    own, beside = samples[: len(chosen)], samples[len(chosen) :]
    predicted = [each.predicted for each in chosen]
    if gpt:
        predicted = profiles.forecasts(gpt, chosen, profiled, beside, devices)
    rows = _rows(chosen, own, predicted)
    print(_table(rows))
    what = 'losses' if args.real else 'gradients'
    # with shards the loss is another one, of a small output layer
    with_shards = [entry.shard is not None for entry in job.entries]
    without = [not each for each in with_shards]
    if not all(alike([*compress(samples, which)]) for which in (with_shards, without)):
        print(f'{what} differ: they did not do the same work')
        return 1
    print(f'all did the same work: {what} are equal to the bit')
    if args.real and not args.tied:  # which step by an optimizer alone
        first, last = (fmean(map(float.fromhex, samples[0][at].work)) for at in (0, -1))
        print(f'loss of the first round: {first:.4f}; of the last: {last:.4f}')
    if args.memory:
        held = _memory(replace(job, entries=tuple(chosen)))
        rows = [row | of_ranks for row, of_ranks in zip(rows, held, strict=True)]
        print(_memory_table(rows))
    if args.json:
        args.json.write_text(json.dumps({'rows': rows, **found}, indent=1) + '\n')
    return 0


def _chosen(args: argparse.Namespace, known: Known, fused: Known) -> list[Entry]:
    """Return what is to be measured.

    Args:
        args: of the command line.
        known: of layers and ranks.
        fused: the same of backwards that are not split.
    """
    found = entries(known, args.microbatches, args.planning, fused)
    if not args.shards:
        return found
    shards = [
        sharded(fused if name == profiles.FUSED else known, args.microbatches, name, args.tied)
        for name in args.shards.split(',')
    ]
    return [*(each for each in found if each.runner == MEGATRON), *shards]


def _emulated(args: argparse.Namespace, devices: Devices) -> tuple[Known, dict[str, Any]]:
    """Return the layers, scaled, and what else is to be told of them."""
    if args.measure:
        layers, found = profiles.alone(_gpt(args, 1), Place())
    else:
        layers, found = gpt(args.layers, args.head), {}
    size = float(_BYTES * args.rows)
    return Known(scaled(layers, args.seconds_per_microbatch, size), devices), found


def _gpt(args: argparse.Namespace, m: int) -> Gpt:
    sizes = args.pp, args.layers, args.hidden_size, args.seq_length, args.words
    return Gpt(*sizes, iterations=args.samples, num_microbatches=m, tied=args.tied)


def _shares(args: argparse.Namespace, devices: Devices) -> list[float] | None:
    """Return how much of a processor each rank has; None: that is left to the system."""
    if args.share is None:
        return None
    return [args.share / device.factors[0] for device in devices.devices]


def _rows(
    chosen: Sequence[Entry], samples: Sequence[Sequence[Sample]], predicted: Sequence[float]
) -> list[dict[str, Any]]:
    reference = median(sample.seconds for sample in samples[0])
    rows = []
    for entry, own, forecast in zip(chosen, samples, predicted, strict=True):
        seconds = median(sample.seconds for sample in own)
        rows.append(
            {
                'runner': entry.runner,
                'name': entry.name,
                'layout': entry.layout,
                'ms': [1e3 * sample.seconds for sample in own],
                'median_ms': 1e3 * seconds,
                'predicted_ms': 1e3 * forecast,
                'off': seconds / forecast - 1,
                'ratio': seconds / reference,
                **_simulated(entry, own, seconds),
            }
        )
    return rows


def _simulated(entry: Entry, own: Sequence[Sample], seconds: float) -> dict[str, Any]:
    """Return what the simulator says by the times that the passes of these iterations took."""
    costs = [sample.costs for sample in own if sample.costs is not None]
    if not costs:
        return {}
    taken = middle(costs)
    simulated = simulate(entry.schedule, taken).makespan
    return {
        'simulated_ms': 1e3 * simulated,
        'off_simulated': seconds / simulated - 1,
        'collectives_ms': {name: 1e3 * time for name, time in taken.collectives.items()},
    }


def _memory(job: Job) -> list[dict[str, list[float]]]:
    """Return bytes by rank, planned and resident, of each entry."""
    assert job.gpt is not None, 'checked'
    found = resident(job)
    return [
        {'planned_bytes': planned(job.gpt, entry), 'resident_bytes': own}
        for entry, own in zip(job.entries, found, strict=True)
    ]


def _memory_table(rows: Sequence[dict[str, Any]]) -> str:
    heads = ('runner', 'schedule', 'MiB of each rank: resident', 'planned')
    lines = [
        (row['runner'], row['name'], *(_mib(row[of]) for of in ('resident_bytes', 'planned_bytes')))
        for row in rows
    ]
    return aligned([heads, *lines], left=4)


def _mib(amounts: Sequence[float]) -> str:
    return ' '.join(f'{each / 2**20:4.0f}' for each in amounts)


def _table(rows: Sequence[dict[str, Any]]) -> str:
    heads = (
        *('runner', 'schedule', 'layout', 'ms/iteration', 'predicted', 'off'),
        *('by own passes', 'off', 'to even 1F1B'),
    )
    lines = [
        (
            row['runner'],
            row['name'],
            row['layout'],
            f'{row["median_ms"]:.0f}',
            f'{row["predicted_ms"]:.0f}',
            f'{row["off"]:+.1%}',
            f'{row["simulated_ms"]:.0f}' if 'simulated_ms' in row else '-',
            f'{row["off_simulated"]:+.1%}' if 'simulated_ms' in row else '-',
            f'{row["ratio"]:.3f}',
        )
        for row in rows
    ]
    return aligned([heads, *lines], left=3)


def _slow(words: str | None, num_ranks: int) -> tuple[int, float] | None:
    """Return the slow rank and its factor.

    Raises:
        ValueError: it is none of the ranks, or no factor.
    """
    if words is None:
        return None
    rank, colon, factor = words.partition(':')
    if not colon or not rank.isdigit() or int(rank) >= num_ranks:
        raise ValueError(f'--slow {words}: give RANK:FACTOR, such as 2:1.5')
    return int(rank), float(factor)


def _check(args: argparse.Namespace) -> None:
    """Return if flags make sense together.

    Raises:
        ValueError: one does not.
    """
    for name, least in (('pp', 2), ('microbatches', 1), ('layers', 2 * args.pp), ('rounds', 1)):
        if getattr(args, name) < least:
            raise ValueError(f'--{name} {getattr(args, name)} is too small: give at least {least}')
    if args.slow is None and args.busy:
        raise ValueError('--busy is about the rank of --slow: give that, such as 2:1.5')
    _check_real(args)


def _check_real(args: argparse.Namespace) -> None:
    """Return if flags are for the passes that run.

    Raises:
        ValueError: one is not.
    """
    if not args.real:
        for name, given in (
            ('tied', args.tied),
            ('share', args.share is not None),
            ('memory', args.memory),
        ):
            if given:
                raise ValueError(f'--{name} is of real passes: give --real')
        return
    for name in ('measure', 'busy'):
        if getattr(args, name):
            raise ValueError(f'--{name} is of emulated passes: leave it or --real out')
    if args.share is not None:
        if args.realtime:
            raise ValueError('--share makes ranks come first, too: leave --realtime out')
        return
    if args.slow is not None:
        raise ValueError('with --real a slow rank has a smaller share: give --share')
    processors = os.cpu_count() or 1
    if args.pp > processors:
        raise ValueError(
            f'{args.pp} ranks on {processors} processors would take their time from each other: '
            f'give --share {0.9 * processors / args.pp:.2f}, or --pp {processors}'
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=_ABOUT,
        epilog=_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add('--pp', type=int, default=4, metavar='P', help='ranks, a process each (default: 4)')
    add('--microbatches', type=int, default=8, metavar='M', help='(default: 8)')
    add('--layers', type=int, default=8, help='(default: 8)')
    add('--head', type=float, default=3.0, metavar='N', help='layers that the output layer takes '
        'as long as (default: 3)')  # fmt: skip
    add('--shards', metavar='NAME,...', help='these with the output layer on all ranks, in place '
        'of zb-v and the plan')  # fmt: skip
    add('--tied', action='store_true', help='of --real: the output layer is the embedding; both '
        'are on all ranks with --shards')  # fmt: skip
    add('--memory', action='store_true', help='of --real: what ranks hold, too, each entry in '
        'processes of its own (Linux)')  # fmt: skip
    add('--measure', action='store_true', help='the costs, on a real GPT')
    add('--real', action='store_true', help='profile, partition and train that GPT: real passes')
    add('--share', type=float, metavar='S', help='of --real: of a processor, for each rank: a '
        'control group (Linux, as root)')  # fmt: skip
    add('--hidden-size', type=int, default=1024, help='of that GPT (default: 1024)')
    add('--seq-length', type=int, default=128, help='of that GPT (default: 128)')
    add('--words', type=int, default=40000, help='of that GPT (default: 40000)')
    add('--samples', type=int, default=5, help='of its costs (default: 5)')
    add('--seconds-per-microbatch', type=float, default=0.4, metavar='S', help='F, B and W of all '
        'layers, to which times are scaled (default: 0.4)')  # fmt: skip
    add('--slow', metavar='RANK:FACTOR', help='a rank whose passes take so many times as long; '
        'with --real its share is so much less')  # fmt: skip
    add('--busy', action='store_true', help='that rank keeps a processor busy, instead of sleeping')
    add('--link-mbit', type=float, metavar='RATE', help='two hosts, with that between them')
    add('--rows', type=int, default=4, help='of a message, of 64 bytes each (default: 4)')
    add('--planning', type=float, default=10.0, metavar='S', help='seconds (default: 10)')
    add('--rounds', type=int, default=5, help='samples of each (default: 5)')
    add('--realtime', action='store_true', help='ranks come before other programs; Linux, as root')
    add('--json', type=Path, metavar='FILE', help='takes all samples')
    return parser
