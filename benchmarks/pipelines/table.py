"""What was measured, as rows: for JSON, a table, and whoever reads on."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from statistics import median
from typing import Any

from benchmarks.common.tables import aligned
from benchmarks.pipelines.entries import MEGATRON, Entry
from benchmarks.pipelines.measure import Job, Sample

Row = dict[str, Any]
_HEADS = 'runner|schedule|ms/iteration|simulated|to it|bubble|to 1F1B|live'.split('|')
_HEADS += ['overhead', 'core wait']


def rows(job: Job, samples: Sequence[Sequence[Sample]]) -> list[Row]:
    """One row a runner, in the order of `job.entries`, of which the first is stock 1F1B."""
    reference = median(sample.seconds for sample in samples[0])
    return [_row(job, *pair, reference) for pair in zip(job.entries, samples, strict=True)]


def _row(job: Job, entry: Entry, samples: Sequence[Sample], reference: float) -> Row:
    seconds = median(sample.seconds for sample in samples)
    ideal = job.num_microbatches * job.times.total
    passes = entry.passes
    waits = [sample.core_wait for sample in samples]
    return {
        'runner': entry.runner,
        'schedule': entry.name,
        'p': job.num_ranks,
        'm': job.num_microbatches,
        'times_ms': [1e3 * t for t in asdict(job.times).values()],
        'ms_per_iteration': [1e3 * sample.seconds for sample in samples],
        'median_ms': 1e3 * seconds,
        'simulated_ms': 1e3 * entry.simulated,
        'ratio_to_simulated': seconds / entry.simulated,
        'bubble': 1 - ideal / seconds,
        'ratio_to_1f1b': seconds / reference,
        'live_activations': max(sample.live for sample in samples),
        'simulated_live_activations': entry.peak,
        'passes_per_rank': passes,
        'overhead_us_per_pass': 1e6 * median(sample.overhead for sample in samples) / passes,
        'core_wait_us_per_pass': None if None in waits else 1e6 * median(waits) / passes,
        'checksum': samples[-1].checksum,
        'optimizer': job.optimizer and entry.runner in (MEGATRON, 'zbpp'),
        'iterations_per_sample': job.iterations,
        'realtime': job.realtime,
    }


def report(found: Sequence[Row], skipped: dict[str, str]) -> dict[str, Any]:
    """Everything, for JSON."""
    packages = ('torch', 'megatron-core', 'megatron_zbpp')
    return {
        'rows': list(found),
        'skipped': skipped,
        'host': {'cores': os.cpu_count(), 'python': platform.python_version()},
        'versions': {name: version(name) for name in packages},
    }


def table(found: Sequence[Row]) -> str:
    """Fastest first."""
    lines = [_HEADS, *map(_cells, sorted(found, key=lambda row: row['median_ms']))]
    return aligned(lines, left=2)


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row['runner'],
        row['schedule'],
        f'{row["median_ms"]:.1f}',
        f'{row["simulated_ms"]:.1f}',
        f'{row["ratio_to_simulated"]:.3f}',
        f'{row["bubble"]:.1%}',
        f'{row["ratio_to_1f1b"]:.3f}',
        f'{row["live_activations"]:g}',
        f'{row["overhead_us_per_pass"]:.0f} µs',
        '' if row['core_wait_us_per_pass'] is None else f'{row["core_wait_us_per_pass"]:.0f} µs',
    )
