"""The result of the GPT benchmark: a file that grows by a row at a time, and a table."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.common.tables import aligned
from benchmarks.gpt.jobs import MEGATRON, STAGE, Job
from benchmarks.gpt.predict import Pipeline
from benchmarks.gpt.worker import Row
from megatron_zbpp.ir import strict_json

MEASURED, PREDICTED, FAILED = 'measured', 'predicted', 'failed'
_PACKAGES = ('torch', 'megatron-core', 'megatron_zbpp', 'transformer-engine', 'apex')
_HEADS = 'kind|model|schedule|p|t|m|v|tokens/s/GPU|TFLOP/s|MFU|memory|idle, busiest rank'.split('|')
_HEADS += ['idle GPU time']
_STAGE_HEADS = 'model|layers|F|B|W|split/fused|held to B|held to W|optimizer|TFLOP/s|MFU'.split('|')


class Results:
    """Rows in a file, written whole after each.

    Args:
        path: of the file; what it holds from an earlier run is kept.
        peak_tflops: of one GPU, for MFU, where the table of `device` is not to be used.

    Raises:
        ValueError: the file is there and is something else.
    """

    def __init__(self, path: Path, peak_tflops: float | None = None) -> None:
        self._path, self._peak = path, peak_tflops
        self.rows: list[Row] = []
        if path.exists():
            try:
                self.rows = _rows(path.read_text(encoding='utf-8'))
            except ValueError as error:
                raise ValueError(
                    f'{path} is not a result of this benchmark ({error}): give another --json'
                ) from error

    def has(self, job: Job, retry_failed: bool = False) -> bool:
        """Whether the row of `job` is there."""
        return any(
            row['kind'] in (MEASURED, FAILED)
            and Job.of_row(row) == job
            and not (retry_failed and row['kind'] == FAILED)
            for row in self.rows
        )

    def add(self, job: Job, found: Row) -> Row:
        """Write what came of `job`; an earlier failure of it makes room."""
        kind = FAILED if 'error' in found else MEASURED
        self.rows = [r for r in self.rows if r['kind'] == PREDICTED or Job.of_row(r) != job]
        row = {'kind': kind, **job.as_row(), **found}
        self.rows.append(self._with_mfu(row))
        self._write()
        return row

    def predicts(self, pipeline: Pipeline, stages: Iterable[Row]) -> bool:
        """Whether that is there for all of `stages`, as they are measured now."""
        known = {_prediction(row) for row in self.rows if row['kind'] == PREDICTED}
        own = (pipeline.runner, pipeline.schedule, pipeline.p, pipeline.m)
        rest = (pipeline.chunks, pipeline.link)
        return all((s['model'], *own, *rest, s['f_seconds']) in known for s in stages)

    def predict(self, rows: Iterable[Row]) -> None:
        """Write predictions, in place of those of the same things."""
        new = [self._with_mfu({'kind': PREDICTED, **row}) for row in rows]
        names = {_prediction(row)[:5] for row in new}
        self.rows = [
            r for r in self.rows if r['kind'] != PREDICTED or _prediction(r)[:5] not in names
        ] + new
        self._write()

    def _with_mfu(self, row: Row) -> Row:
        peak = self._peak or row.get('device_peak_tflops')
        return row | {'mfu': row['tflops_per_gpu'] / peak if peak and 'error' not in row else None}

    def _write(self) -> None:
        """In one step: a run that is ended meanwhile leaves the file as it was."""
        whole = {
            'rows': self.rows,
            'date': time.strftime('%Y-%m-%d'),
            'host': {'cores': os.cpu_count(), 'python': platform.python_version()},
            'versions': versions(),
        }
        beside = self._path.with_name(self._path.name + '.part')
        beside.write_text(json.dumps(whole, indent=1) + '\n')
        beside.replace(self._path)


def _rows(text: str) -> list[Row]:
    """Return the rows that a file holds."""
    rest = ('date', 'host', 'versions')
    data: Any = strict_json.loads(text)
    strict_json.require(
        data,
        {'rows': strict_json.list_of(_row, 'rows')},
        dict.fromkeys(rest, strict_json.anything),
    )
    return data['rows']


def _row(value: Any) -> str | None:
    kinds = (MEASURED, PREDICTED, FAILED)
    return None if strict_json.is_object(value) and value.get('kind') in kinds else 'a row'


def _prediction(row: Row) -> tuple:
    """Return what a predicted row is of (the first five), and what it was made from."""
    names = ('model', 'runner', 'schedule', 'p', 'm', 'chunks', 'link_bytes_per_second')
    return (*(row[name] for name in names), row['stage_f_seconds'])


def versions() -> dict[str, str]:
    """Of the packages that matter and are here."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def table(rows: Iterable[Row]) -> str:
    """Stages, then throughput, then what failed and why."""
    rows = list(rows)
    stages = [r for r in rows if r['kind'] == MEASURED and r['schedule'] == STAGE]
    runs = [r for r in rows if r['kind'] != FAILED and r['schedule'] != STAGE]
    parts = []
    if stages:
        parts.append(aligned([_STAGE_HEADS, *map(_stage_cells, stages)], 1))
    if runs:
        runs.sort(key=lambda r: (r['kind'], r['model'], r['p'], r['m'], -_speed(r)))
        parts.append(aligned([_HEADS, *map(_cells, runs)], 3))
    parts += [f'failed: {Job.of_row(r).title}: {r["error"]}' for r in rows if r['kind'] == FAILED]
    return '\n\n'.join(parts)


def _speed(row: Row) -> float:
    return row.get('tokens_per_second_per_gpu', 0.0)


def title(row: Row) -> str:
    """Return the schedule's name; of Megatron's own with the library."""
    return f'{MEGATRON}:{row["schedule"]}' if row['runner'] == MEGATRON else row['schedule']


def _cells(row: Row) -> list[str]:
    sizes = [str(row[name]) for name in ('p', 't', 'm', 'chunks')]
    return [
        row['kind'],
        row['model'],
        title(row),
        *sizes,
        f'{_speed(row):.0f}',
        f'{row["tflops_per_gpu"]:.4g}',
        _share(row['mfu']),
        f'{row["peak_bytes"] / 2**30:.1f} GiB',
        _share(row['bubble']),
        _share(row.get('idle_all_ranks')),  # rows of an earlier release lack it
    ]


def _stage_cells(row: Row) -> list[str]:
    times = [f'{1e3 * row[f"{name}_seconds"]:.3f} ms' for name in ('f', 'b', 'w')]
    held = [f'{row[name] / 2**20:.1f} MiB' for name in ('b_bytes', 'w_bytes')]
    return [
        row['model'],
        str(row['layers']),
        *times,
        f'{row["split_over_fused"]:.3f}',
        *held,
        f'{1e3 * row["optimizer_seconds"]:.3f} ms',
        f'{row["tflops_per_gpu"]:.4g}',
        _share(row['mfu']),
    ]


def _share(value: float | None) -> str:
    return '-' if value is None else f'{value:.1%}'
