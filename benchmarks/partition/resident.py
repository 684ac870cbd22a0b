"""Memory of the ranks that train a GPT: planned from its shape, and resident on this machine."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.common.spawning import joined, spawned
from benchmarks.partition.cases import Entry
from benchmarks.partition.measured import Gpt
from benchmarks.partition.run import Job, runner_of
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.partitioning.shapes import Block
from megatron_zbpp.techniques.vocabulary.graph import HIDDEN, S, T

_FLOAT = 4  # bytes
_WEIGHT = 2 * _FLOAT  # and its gradient; there is no optimizer


def planned(gpt: Gpt, entry: Entry) -> list[float]:
    """Return the bytes of weights, gradients and activations of each rank at their peak.

    One gradient more is counted, of the largest weight: autograd makes it, then adds it.
    """
    placement, p = entry.schedule.placement, gpt.num_ranks
    kinds = _kinds(gpt, entry)
    by_rank = []
    for rank in range(p):
        letters = ''.join(kinds[stage] for stage in placement.stages(rank))
        weights = [_parameters(gpt, kind, entry) for kind in letters]
        largest = [gpt.words * gpt.hidden * (kind != 't') for kind in letters]
        if entry.shard is not None:
            shard = gpt.words * gpt.hidden / p
            # tied: gradients of the embedding's passes and of T are summed apart
            weights.append(shard * (1.5 if gpt.tied else 1))
            largest = [each * (not gpt.tied) for each in largest] + [shard]
        by_rank.append(sum(weights) * _WEIGHT + max(*largest, 4 * gpt.hidden**2) * _FLOAT)
    activations = peak(entry.schedule, _costs(gpt, entry, kinds))
    return [sum(both) for both in zip(by_rank, activations, strict=True)]


def _kinds(gpt: Gpt, entry: Entry) -> list[str]:
    """Return the letters of the layers of each stage; of what is on all ranks, none."""
    letters = 'E' + 't' * gpt.layers + ('L' if entry.shard is None else '')
    return [letters[a:b] for a, b in pairwise(accumulate(entry.cuts, initial=0))]


def _parameters(gpt: Gpt, kind: str, entry: Entry) -> float:
    h, rows = gpt.hidden, gpt.words * gpt.hidden
    if kind == 't':
        return 12 * h * h + 13 * h
    if kind == 'L':
        return rows + 2 * h  # with the last norm; a tied one is a copy
    shared = entry.shard is not None and gpt.tied
    return gpt.sequence * h + (0 if shared else rows)


def _costs(gpt: Gpt, entry: Entry, kinds: Sequence[str]) -> Costs:
    """Return what passes hold, in bytes, by their shapes."""
    h, tokens = gpt.hidden, gpt.sequence
    values = Block.attention(h, h, 2 * h).part() + Block.mlp(h, 4 * h, gated=False).part()
    of_kind = {
        'E': 0.0,
        't': values.retained * tokens * _FLOAT,  # without dropout nothing else is held
        'L': tokens * (gpt.words + h) * _FLOAT,
    }
    activation = [sum(of_kind[kind] for kind in own) for own in kinds]
    ones = [1.0] * len(kinds)
    if entry.shard is None:
        return Costs.of(ones, ones, ones, amounts={'activation': activation})
    p = gpt.num_ranks
    sites = [0.0] * len(kinds) + [1.0] * p
    of_shard = {
        'logits': tokens * gpt.words / p * _FLOAT,
        HIDDEN: tokens * (h + _FLOAT) * _FLOAT,  # and of each row target and gradient
        'gradient_part': tokens * 2 * h * _FLOAT,
    }
    own = {name: [each * size for each in sites] for name, size in of_shard.items()}
    amounts = {'activation': activation, **own}
    return Costs.of(ones, ones, ones, amounts=amounts, times={S: sites, T: sites})


def resident(job: Job) -> list[list[float]]:
    """Return by entry the bytes by which each rank's process grows, at its peak.

    Each entry has processes of its own, which have run a tiny model before; their allocator gives
    back what is freed. The peak is that of a second iteration.

    Raises:
        RuntimeError: a rank failed.
    """
    found = []
    for entry in job.entries:
        by_rank = [0.0] * len(job.factors)
        with mock.patch.dict(os.environ, {'MALLOC_MMAP_THRESHOLD_': str(2**18)}):
            for rank, grown in spawned(_rank, len(by_rank), (job, entry)):
                by_rank[rank] = grown
        found.append(by_rank)
    return found


def _rank(rank: int, given: tuple[Job, Entry], port: int, queue: Any) -> None:
    job, entry = given
    p = len(job.factors)
    with joined(rank, p, job.place.enter(rank, p, port), pipeline_model_parallel_size=p):
        assert job.gpt is not None, 'of real passes'
        tiny = replace(job.gpt, hidden=64, sequence=16, words=64 * p)
        _iterate(runner_of(entry, replace(job, gpt=tiny), 1.0))
        before = _status('VmRSS')
        _iterate(runner_of(entry, job, 1.0))
        queue.put((rank, _status('VmHWM') - before))


def _iterate(runner: Any) -> None:
    """Run two iterations; the process's peak begins anew before the second, with what is in use."""
    with runner.ready():
        runner.iterate()
        ctypes.CDLL(None).malloc_trim(0)
        Path('/proc/self/clear_refs').write_text('5')
        runner.iterate()


def _status(name: str) -> float:
    found = re.search(rf'^{name}:\s*(\d+) kB', Path('/proc/self/status').read_text(), re.M)
    assert found is not None, 'Linux has it'
    return 1024 * float(found[1])
