"""A real GPT on the CPU, trained by several schedules in turn: time, and what the split costs.

Each rank is a process with one thread. All schedules take turns in the same processes, so what else
the machine does hits all alike. Weights differ between them: that all leave the same is tested, not
measured.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common.overhead import spans
from benchmarks.common.spawning import collected, joined, spawned
from benchmarks.common.tables import aligned
from megatron_zbpp.analysis.fit_costs import measured_costs, middle
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import BW, B, F, Schedule, W
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.schedules import build

STOCK, FUSED = 'megatron', '1f1b'  # what the others are compared with: iterations, backwards
HEAD = 64  # size of an attention head


@dataclass(frozen=True)
class Job:
    """What to measure.

    Attributes:
        schedules: `STOCK` for Megatron's own 1F1B, or ours by name.
        num_ranks, num_microbatches: p and m; a microbatch is one sample.
        layers, hidden, sequence: of the model.
        rounds: iterations of each, after one that does not count.
    """

    schedules: tuple[str, ...]
    num_ranks: int
    num_microbatches: int
    layers: int
    hidden: int
    sequence: int
    rounds: int


@dataclass(frozen=True)
class Sample:
    """One iteration.

    Attributes:
        seconds: of the slowest rank.
        passes: seconds of each pass of any rank, by kind; of ours only.
        makespan: seconds of the passes, from the first to the last; of ours only.
        costs: as its passes took; of ours only.
        memory: by rank, bytes that it held at most, measured and planned; of one of ours only.
    """

    seconds: float
    passes: dict[str, list[float]]
    makespan: float | None = None
    costs: Costs | None = None
    memory: tuple[tuple[float, float], ...] = ()


def _rank(rank: int, job: Job, port: int, queue: Any) -> None:
    """All schedules on one rank; rank 0 reports (index of the schedule, its sample)."""
    with joined(rank, job.num_ranks, port, pipeline_model_parallel_size=job.num_ranks):
        runners = [_runner(name, job) for name in job.schedules]
        for number in range(job.rounds + 1):
            for index, runner in enumerate(runners):
                sample = _sample(runner, job)
                if number == job.rounds:
                    sample = replace(sample, memory=_memory(job.schedules[index], runner, job))
                if rank == 0:
                    queue.put((index, sample if number else None))


def _runner(name: str, job: Job) -> Any:
    """Return what trains by this schedule."""
    from benchmarks.pipelines.runners import MegatronRunner, ZbppRunner
    from benchmarks.training.model import Gpt

    schedule = _schedule(name, job)
    model = Gpt(job.layers, job.hidden, HEAD, job.sequence)
    if name == STOCK:
        return MegatronRunner(schedule, model, optimizer=True)
    return ZbppRunner(schedule, name, model, optimizer=True)


def _sample(runner: Any, job: Job) -> Sample:
    """One iteration; the same on all ranks."""
    import torch.distributed as dist

    with runner.ready():
        dist.barrier()
        start = time.perf_counter()
        runner.iterate()
        seconds = time.perf_counter() - start
    plugin = getattr(runner, 'plugin', None)  # Megatron's own schedule has none
    passes, makespan, costs = {}, None, None
    if plugin is not None:
        timeline = plugin.latest.gather().timeline
        makespan, costs = timeline.makespan, measured_costs(timeline)
        passes = spans(plugin.latest.record)
    gathered: list[Any] = [None] * job.num_ranks
    dist.all_gather_object(gathered, (seconds, passes))
    times, by_rank = zip(*gathered, strict=True)
    return Sample(max(times), _together(by_rank), makespan, costs)


def _memory(name: str, runner: Any, job: Job) -> tuple[tuple[float, float], ...]:
    """Return what each rank holds in one more iteration, and what was planned; alike on all."""
    if name == STOCK:
        return ()
    import torch.distributed as dist

    from benchmarks.training.memory import peaks, resident

    with runner.ready():
        own = resident(runner)
    gathered: list[Any] = [None] * job.num_ranks
    dist.all_gather_object(gathered, own)
    layers = job.layers / job.num_ranks
    return tuple(peaks(_schedule(name, job), gathered, 2 * 4 * layers * job.sequence * job.hidden))


def _together(ranks: Sequence[dict[str, list[float]]]) -> dict[str, list[float]]:
    kinds = sorted({kind for passes in ranks for kind in passes})
    return {kind: [s for passes in ranks for s in passes.get(kind, [])] for kind in kinds}


def rows(job: Job, samples: Sequence[Sequence[Sample]]) -> list[dict[str, Any]]:
    """One for each schedule, for JSON; ratios are medians of those of each round."""
    stock, fused = (samples[job.schedules.index(name)] for name in (STOCK, FUSED))
    return [
        {
            'schedule': name,
            'ms_per_iteration': [1e3 * sample.seconds for sample in taken],
            'ratio_to_stock': median(
                a.seconds / b.seconds for a, b in zip(taken, stock, strict=True)
            ),
            'pass_ms': {
                kind: 1e3 * median(s for sample in taken for s in sample.passes[kind])
                for kind in taken[0].passes
            },
            'backward_to_fused': _to_fused((B, W, BW), taken, fused),
            'passes_to_fused': _to_fused((F, B, W, BW), taken, fused),
            'to_simulated': _to_simulated(name, job, taken),
            'simulated_live': _live(_schedule(name, job)),
            'resident': [held for held, _ in taken[-1].memory],
            'planned': [held for _, held in taken[-1].memory],
        }
        for name, taken in zip(job.schedules, samples, strict=True)
    ]


def _schedule(name: str, job: Job) -> Schedule:
    return build(FUSED if name == STOCK else name, job.num_ranks, job.num_microbatches)


def _live(schedule: Schedule) -> float:
    """Return most activations that a rank holds, of one microbatch on a full rank."""
    return max(peak(schedule, Costs.uniform(schedule.placement)))


def _to_fused(kinds: Sequence[str], taken: Sequence[Sample], fused: Sequence[Sample]) -> float:
    """Return seconds of all passes of these kinds of all ranks over those of our 1f1b."""

    def total(sample: Sample) -> float:
        return sum(sum(sample.passes.get(kind, [])) for kind in kinds)

    return median(total(a) / total(b) for a, b in zip(taken, fused, strict=True))


def _to_simulated(name: str, job: Job, taken: Sequence[Sample]) -> float | None:
    """Return the median makespan over that of a simulation by what passes took in the middle."""
    costs = [sample.costs for sample in taken if sample.costs is not None]
    if not costs:
        return None
    measured = median(sample.makespan for sample in taken if sample.makespan is not None)
    return measured / simulate(_schedule(name, job), middle(costs)).makespan


def table(found: Sequence[dict[str, Any]]) -> str:
    """In the order of the schedules."""
    heads = ('schedule', 'ms/iteration', 'to stock 1F1B', F, B, W, BW, 'backward to fused')
    heads += ('passes to fused', 'to simulated', 'live', 'resident, MiB', 'planned, MiB')
    cells = [
        (
            row['schedule'],
            f'{median(row["ms_per_iteration"]):.0f}',
            f'{row["ratio_to_stock"]:.3f}',
            *(f'{row["pass_ms"][k]:.1f}' if k in row['pass_ms'] else '' for k in (F, B, W, BW)),
            *(
                f'{row[name]:.3f}' if row['pass_ms'] else ''
                for name in ('backward_to_fused', 'passes_to_fused', 'to_simulated')
            ),
            f'{row["simulated_live"]:g}',
            *(', '.join(f'{held / 2**20:.0f}' for held in row[k]) for k in ('resident', 'planned')),
        )
        for row in found
    ]
    return aligned([heads, *cells], left=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        job = _job(args)
    except ValueError as error:
        parser.error(str(error))
    samples = collected(spawned(_rank, job.num_ranks, job), job.schedules, job.rounds)
    found = rows(job, samples)
    print(table(found))
    if args.json:
        args.json.write_text(json.dumps({'rows': found}, indent=1) + '\n')
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="columns: median of the iterations; ratio to Megatron-Core's own 1F1B; median "
        'milliseconds of a pass (schedules with two chunks a rank have half as large ones); all B '
        'and W together over the fused backwards of our 1f1b, and all passes over all of it: '
        'slices compute fewer masked pairs; makespan over that simulated by what passes took; most '
        'activations of a microbatch that a rank holds, simulated; most that the resident set of '
        'each rank grows in an iteration, and what is planned by what the first passes hold.',
    )
    add = parser.add_argument
    add('--pp', type=int, default=2, metavar='P', help='ranks, a process each (default: 2)')
    add('--microbatches', type=int, default=8, metavar='M', help='(default: 8)')
    add('--layers', type=int, default=4, help='(default: 4)')
    add('--hidden-size', type=int, default=1024, help='(default: 1024)')
    add('--seq-length', type=int, default=256, help='(default: 256)')
    add('--schedules', default='zb-h1,zb-v', metavar='NAME,...', help='(default: %(default)s)')
    add('--rounds', type=int, default=7, help='iterations of each (default: 7)')
    add('--json', type=Path, metavar='FILE', help='takes all samples')
    return parser


def _job(args: argparse.Namespace) -> Job:
    """Return what to measure.

    Raises:
        ValueError: a value that makes no sense.
    """
    least = {'pp': 2, 'microbatches': 1, 'hidden_size': HEAD, 'seq_length': 2, 'rounds': 1}
    for name, smallest in least.items():
        if getattr(args, name) < smallest:
            flag = '--' + name.replace('_', '-')
            raise ValueError(f'{flag} {getattr(args, name)} is too small: give at least {smallest}')
    if args.hidden_size % HEAD:
        raise ValueError(f'--hidden-size {args.hidden_size} is no multiple of a head, {HEAD}')
    names = tuple(dict.fromkeys([STOCK, FUSED, *args.schedules.split(',')]))
    for name in names[1:]:
        stages = build(name, args.pp, args.microbatches).num_stages
        if stages > args.layers:
            raise ValueError(
                f'--layers {args.layers} is too small: {name} has {stages} stages, with a layer '
                'each at least'
            )
    shape = args.layers, args.hidden_size, args.seq_length
    return Job(names, args.pp, args.microbatches, *shape, args.rounds)
