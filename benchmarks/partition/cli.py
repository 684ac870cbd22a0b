"""The command line of scripts/benchmark_partition.py."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common.spawning import collected
from benchmarks.common.tables import aligned
from benchmarks.partition import measured
from benchmarks.partition.cases import Entry, entries, gpt, machines, scaled, worst
from benchmarks.partition.run import Job, Sample, alike, measure
from benchmarks.partition.two_hosts import network
from megatron_zbpp.partitioning.fitting import fit_layers
from megatron_zbpp.partitioning.layers import Layers
from megatron_zbpp.partitioning.shapes import Shape, layers_of

_ABOUT = """\
From the costs of layers to a partition to measured iterations, without a GPU: the even split by
Megatron's own 1F1B and by zb-v, the layout that is best for Megatron's 1F1B, and the best plan of
all take turns. Passes sleep for the times of their layers around a tiny real product.
"""
_MORE = """\
a GPT whose head takes as long as three layers:

    python scripts/benchmark_partition.py --head 3

the costs measured on a real GPT with 40,000 words, by least squares, beside those of its shape:

    python scripts/benchmark_partition.py --measure --hidden-size 1024 --words 40000

a rank that takes half as long again; two hosts with a link of 20 Mbit/s (Linux, as root):

    python scripts/benchmark_partition.py --head 3 --slow 2:1.5 --busy
    python scripts/benchmark_partition.py --head 3 --link-mbit 20

columns: median of the iterations; what the simulator predicts, and how far that is off; ratio to
the even split with Megatron's 1F1B; layers of each stage.
"""
_BYTES = 64  # of a row of a message


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, plan, measure, report; the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        slow = _slow(args)
        layers, found = _layers(args)
        size = float(_BYTES * args.rows)
        layers = scaled(layers, args.seconds_per_microbatch, size)
        linked = args.link_mbit is not None
        bandwidth = 1e6 * args.link_mbit / 8 if linked else 0.0
        devices = machines(args.pp, slow, 2 if linked else 1, bandwidth)
        chosen = entries(layers, devices, args.microbatches, args.planning)
        with network(args.link_mbit) if linked else nullcontext() as made:
            job = Job(
                tuple(chosen),
                layers,
                tuple(device.factors[0] for device in devices.devices),
                args.microbatches,
                args.rows,
                args.rounds,
                args.realtime,
                made,
                args.busy,
            )
            samples = collected(measure(job), [each.title for each in chosen], args.rounds)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    rows = _rows(chosen, samples)
    print(_table(rows))
    if not alike(samples):
        print('gradients differ: they did not do the same work')
        return 1
    print('all did the same work: gradients are equal to the bit')
    if args.json:
        args.json.write_text(json.dumps({'rows': rows, **found}, indent=1) + '\n')
    return 0


def _layers(args: argparse.Namespace) -> tuple[Layers, dict[str, Any]]:
    """Return the costs of the layers, and what is to be said of them."""
    if not args.measure:
        return gpt(args.layers, args.head), {}
    model = measured.Gpt(
        args.pp, args.layers, args.hidden_size, args.seq_length, args.words, args.samples
    )
    layout, costs = measured.stages(model)
    layers, error = fit_layers([(layout, costs)])
    shape = Shape(
        'gpt',
        args.layers,
        hidden=args.hidden_size,
        heads=args.hidden_size // measured.HEAD,
        vocab=args.words,
        seq=args.seq_length,
        tflops=1.0,
    )
    known = layers_of(shape)
    cuts = tuple(map(len, layout.split('|')))
    by_shape = [sum(layer.time for layer in own) for own in known.stages(cuts)]
    times = [sum(each) for each in zip(costs.forward, costs.backward, costs.weight, strict=True)]
    rate = sum(by_shape) / sum(times)  # the one number that a shape does not tell
    off = worst(times, [each / rate for each in by_shape])
    print(f'measured stages {layout}: {", ".join(f"{1e3 * t:.0f}" for t in times)} ms')
    print(f'least squares over the layers: a stage is off by {error:.1%} at most')
    print(f'by its shape at {1e3 * rate:.3g} GFLOP/s: a stage is off by {off:.1%} at most')
    return layers, {'layout': layout, 'stages_s': times, 'fit_error': error, 'shape_error': off}


def _rows(chosen: Sequence[Entry], samples: Sequence[Sequence[Sample]]) -> list[dict[str, Any]]:
    reference = median(sample.seconds for sample in samples[0])
    rows = []
    for entry, own in zip(chosen, samples, strict=True):
        seconds = median(sample.seconds for sample in own)
        rows.append(
            {
                'runner': entry.runner,
                'name': entry.name,
                'layout': entry.layout,
                'ms': [1e3 * sample.seconds for sample in own],
                'median_ms': 1e3 * seconds,
                'predicted_ms': 1e3 * entry.predicted,
                'off': seconds / entry.predicted - 1,
                'ratio': seconds / reference,
            }
        )
    return rows


def _table(rows: Sequence[dict[str, Any]]) -> str:
    heads = ('runner', 'schedule', 'layout', 'ms/iteration', 'predicted', 'off', 'to even 1F1B')
    lines = [
        (
            row['runner'],
            row['name'],
            row['layout'],
            f'{row["median_ms"]:.0f}',
            f'{row["predicted_ms"]:.0f}',
            f'{row["off"]:+.1%}',
            f'{row["ratio"]:.3f}',
        )
        for row in rows
    ]
    return aligned([heads, *lines], left=3)


def _slow(args: argparse.Namespace) -> tuple[int, float] | None:
    """Return the slow rank and its factor.

    Raises:
        ValueError: a value that makes no sense.
    """
    for name, least in (('pp', 2), ('microbatches', 1), ('layers', 2 * args.pp), ('rounds', 1)):
        if getattr(args, name) < least:
            raise ValueError(f'--{name} {getattr(args, name)} is too small: give at least {least}')
    if args.slow is None:
        if args.busy:
            raise ValueError('--busy is about the rank of --slow: give that, such as 2:1.5')
        return None
    rank, colon, factor = args.slow.partition(':')
    if not colon or not rank.isdigit() or int(rank) >= args.pp:
        raise ValueError(f'--slow {args.slow}: give RANK:FACTOR, such as 2:1.5')
    return int(rank), float(factor)


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
    add('--measure', action='store_true', help='the costs, on a real GPT')
    add('--hidden-size', type=int, default=1024, help='of --measure (default: 1024)')
    add('--seq-length', type=int, default=128, help='of --measure (default: 128)')
    add('--words', type=int, default=40000, help='of --measure (default: 40000)')
    add('--samples', type=int, default=5, help='of --measure (default: 5)')
    add('--seconds-per-microbatch', type=float, default=0.4, metavar='S', help='F, B and W of all '
        'layers, to which times are scaled (default: 0.4)')  # fmt: skip
    add('--slow', metavar='RANK:FACTOR', help='a rank whose passes take so many times as long')
    add('--busy', action='store_true', help='that rank keeps a processor busy, instead of sleeping')
    add('--link-mbit', type=float, metavar='RATE', help='two hosts, with that between them')
    add('--rows', type=int, default=4, help='of a message, of 64 bytes each (default: 4)')
    add('--planning', type=float, default=10.0, metavar='S', help='seconds (default: 10)')
    add('--rounds', type=int, default=5, help='samples of each (default: 5)')
    add('--realtime', action='store_true', help='ranks come before other programs; Linux, as root')
    add('--json', type=Path, metavar='FILE', help='takes all samples')
    return parser
