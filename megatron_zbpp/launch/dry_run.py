"""Dry runs: schedule, layers, bubble, memory and refusals of a launch line."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_zbpp.analysis.gain import RIVAL, gain_text, megatron_refuses
from megatron_zbpp.analysis.memory import live, peak
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.emulation import te
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.graph import HOST
from megatron_zbpp.ir.timeline import MEANING
from megatron_zbpp.launch import flags
from megatron_zbpp.launch.advise import LinePrediction
from megatron_zbpp.launch.launch_line import LaunchLine, require_possible, require_sizes
from megatron_zbpp.mcore import model_settings
from megatron_zbpp.mcore.job.model_shape import LayerMemory, layer_memory
from megatron_zbpp.mcore.job.resolve import Facts, Job, resolve
from megatron_zbpp.mcore.job.rules import Refusal
from megatron_zbpp.mcore.programs import Programs
from megatron_zbpp.mcore.training_log import Simulated, asynchrony, losses_from_scratch
from megatron_zbpp.post_validation.speculative_step import BUFFER_BYTES, KEPT_BYTES
from megatron_zbpp.schedules import build
from megatron_zbpp.techniques import find as find_technique

_LITTLE = 0.9  # of what is held without: more than that is little gain
_CONNECTIONS = (
    '--overlap-moe-expert-parallel-comm needs CUDA_DEVICE_MAX_CONNECTIONS above 1, such as 32: '
    'with 1, what experts send waits for the products that it should run beside'
)

_NO_SCHEDULE = (
    'no --pipeline-schedule is given: for one of ours write -m megatron_zbpp.launch before the '
    'script, and --pipeline-schedule zb-v behind it'
)


@dataclass(frozen=True)
class DryRun:
    """A dry run: what a job would run."""

    parallel: dict[str, int]  # GPUs, and ranks by kind of parallelism
    schedule: str | None = None  # in words; None: Megatron's own
    placement: str | None = None  # its name
    stages: tuple[tuple[int, ...], ...] = ()  # of each pipeline rank, in model order
    # transformer layers of each stage; none where they cannot be placed
    layers: tuple[int, ...] = ()
    iterations: tuple[Simulated, ...] = ()  # one for each number of microbatches that training has
    # what a dense layer holds; None: they are not dense, or of unknown size
    layer: LayerMemory | None = None
    refused: tuple[Refusal, ...] = ()  # what does not work, why, and what to do
    notes: tuple[str, ...] = ()  # what else to know
    # time and memory as `zbpp advise` predicts them; None: it is refused
    predicted: LinePrediction | None = None

    def to_dict(self) -> dict[str, Any]:
        refused = [{**asdict(r), 'value': str(r.value)} for r in self.refused]
        iterations = [
            # with earlier names of two figures
            {**asdict(i), 'bubble_window': i.bubble, 'bubble_makespan': i.idle_busiest_rank}
            for i in self.iterations
        ]
        return {**asdict(self), 'refused': refused, 'iterations': iterations}

    def lines(self) -> list[str]:
        sizes = ', '.join(f'{name} {size}' for name, size in self.parallel.items())
        own = "Megatron's own"
        predicted = self.predicted or LinePrediction()
        found = [f'refused: {refusal}' for refusal in self.refused]
        found += [f'schedule: {self.schedule or own}', f'parallel: {sizes}']
        of_layers = ' on a mean rank, by layers' if len({*self.layers}) > 1 else ''
        for each in self.iterations:
            gained = '' if predicted.seconds else each.gained()  # one line has one gain
            times = each.times(f'F = B = W = 1{of_layers}')
            found.append(
                f'{each.microbatches} microbatches ({times}, simulated): makespan '
                f'{each.makespan:g}{gained}, idle GPU time {each.idle_all_ranks:.1%}; window '
                f'{each.window:g}, bubble {each.bubble:.1%}; peak activations '
                f'{max(each.peaks):g}'
            )
        found += [MEANING] if self.iterations else []
        found += [*predicted.lines(), *([] if self.layer is None else [str(self.layer)])]
        if self.schedule is not None:
            found.append(f'placement: {self.placement}; layers of each stage by pipeline rank:')
            for rank, stages in enumerate(self.stages):
                held = [
                    f'stage {s}' + (f': {self.layers[s]}' if self.layers else '') for s in stages
                ]
                found.append(f'  rank {rank}: {", ".join(held)}')
        return found + [f'note: {note}' for note in (*self.notes, *predicted.notes)]


def dry_run_of(line: LaunchLine, rates: Mapping[str, Any] = {}) -> DryRun:
    """Return the schedule, sizes and refusals of a launch line."""
    only = 'only sizes, parallelism and our flags were read'
    notes = [*filter(None, [f'{line.lacks}; {only}' if line.lacks else flags.lacks_compiler()])]
    if line.unknown:
        words = ' '.join(line.unknown)
        notes.append(f'no flags of Megatron, unless the script adds them: {words}')
    require_possible(line)
    as_given = replace(line, args=copy.copy(line.args))  # layers are placed in the others
    request, parallel = flags.read(vars(line.args)), _parallel(line)
    if request is None or parallel['pipeline'] == 1:
        predicted = LinePrediction.of(line, rates)
        others = [_NO_SCHEDULE, *([] if predicted.seconds else _others(line, parallel))]
        if request is not None:
            job = resolve(request, Facts())
            job.require()
            others = job.notes
        others += filter(None, [require_sizes(line)])
        return DryRun(parallel, notes=(*notes, *others), predicted=predicted)
    machine = {'on_cpu': line.on_cpu, 'with_te': not te.missing()}
    job = resolve(request, Facts(line.args, line.world_size, machine, flags.names_in(line.words)))
    with job.checks.one('micro_batch_size'):
        _microbatches(line, parallel['data'])
    if job.checks.problems:
        job.require()
    programs, placement = job.programs, job.placement
    assert programs is not None and placement is not None
    notes += _consequences(line, job)
    (first, last), layers = line.sizes.counted_ends, line.sizes.with_(job.writes).layers(placement)
    vars(line.args).update(job.writes)
    notes += filter(None, [] if job.refused else [require_sizes(line)])
    counted = [*layers]
    counted[0] += first
    counted[-1] += last
    return DryRun(
        parallel,
        programs.key,
        placement.name,
        tuple(map(placement.stages, range(placement.num_ranks))),
        tuple(layers),
        tuple(
            Simulated.of(programs.lowered(placement.num_ranks, m, False).schedule, counted, m)
            for m in job.counts
            if not programs.asynchronous  # see `zbpp simulate`
        ),
        layer_memory(line.args),
        job.refused,
        tuple(notes),
        None if job.refused else LinePrediction.of(as_given, rates),
    )


def _consequences(line: LaunchLine, job: Job) -> list[str]:
    settings, programs, placement, counts = job.settings, job.programs, job.placement, job.counts
    assert settings is not None and programs is not None and placement is not None
    notes, prewarm = [*job.notes], settings.prewarm
    together = 'is prepared on all ranks at the same time (--pipeline-prewarm)'
    if not (prewarm or (prewarm is None and not line.on_cpu)):
        cure = 'drop --no-pipeline-prewarm' if prewarm is False else 'give --pipeline-prewarm'
        together = f'is prepared rank after rank: {cure} for all at the same time'
    if not programs.asynchronous:
        notes.append(f'the first iteration {together}')
    notes.append(losses_from_scratch(settings, placement, line.args))
    notes += [_CONNECTIONS] if getattr(line.args, model_settings.OVERLAP, False) else []
    for count in counts if programs.asynchronous else ():
        late = asynchrony(programs.lowered(placement.num_ranks, count, forward_only=False).schedule)
        notes += [f'{count} microbatches: {late[1]}'] if late else []
    notes += filter(None, (megatron_refuses(placement, count) for count in counts))
    moving = [name for name in settings.amounts if counts and find_technique(name).moves]
    notes += [_of_copies(name, programs, placement.num_ranks, counts[-1]) for name in moving]
    if settings.post_validation is not None:
        notes.append(
            f'an early step takes {(KEPT_BYTES + BUFFER_BYTES) >> 20} MiB more on each rank, and '
            'more for its optimizer state where memory is free then, up to '
            '--optimizer-post-validation-kept-gib'
        )
    return notes


def _parallel(line: LaunchLine) -> dict[str, int]:
    sizes = {
        'tensor': line.args.tensor_model_parallel_size,
        'context': line.args.context_parallel_size,
        'pipeline': line.args.pipeline_model_parallel_size,
    }
    ranks = sizes['tensor'] * sizes['context'] * sizes['pipeline']
    if min(sizes.values()) < 1 or line.world_size % ranks:
        shape = ' x '.join(f'{name} {size}' for name, size in sizes.items())
        raise ValueError(
            f'{line.world_size} GPUs do not divide by {shape} parallel: change a size, or --gpus'
        )
    return {'GPUs': line.world_size, **sizes, 'data': line.world_size // ranks}


def _microbatches(line: LaunchLine, replicas: int) -> list[int]:
    micro, whole = line.args.micro_batch_size, line.args.global_batch_size
    if micro is None:
        raise ValueError('--micro-batch-size is missing: give how many samples a microbatch has')
    step = micro * replicas
    if (whole or step) % step and not getattr(line.args, 'decrease_batch_size_if_needed', False):
        raise ValueError(
            f'--global-batch-size {whole} does not divide by {step} (--micro-batch-size {micro} x '
            f'{replicas} data parallel): give a multiple'
        )
    return line.sizes.microbatches(line.world_size)


def _others(line: LaunchLine, parallel: dict[str, int]) -> list[str]:
    """Return the idle GPU time of our schedules beside that of Megatron's own, where that runs."""
    ranks = parallel['pipeline']
    if ranks == 1 or not line.args.micro_batch_size:
        return []
    try:
        chunks, counts = line.sizes.num_chunks() or 1, _microbatches(line, parallel['data'])
    except ValueError as error:  # of a line that is Megatron's to refuse
        return [f'what another schedule would gain is not known: {error}']
    own, *ours = ('interleaved' if chunks > 1 else RIVAL), 'zb-h1', 'zb-v'
    m = counts[-1]
    plain = build(own, ranks, m, num_chunks=chunks)
    first, *runs = (
        simulate(made, Costs.uniform(made.placement))
        for made in (plain, *(build(name, ranks, m) for name in ours))
    )
    gains = (
        f'{name} {run.idle_all_ranks:.1%}{gain_text(run.makespan, first.makespan, "that")}'
        for name, run in zip(ours, runs, strict=True)
    )
    return [
        f"idle GPU time, simulated with F = B = W of {m} microbatches: Megatron's own "
        f'{first.idle_all_ranks:.1%}; --pipeline-schedule {"; ".join(gains)}'
    ]


def _of_copies(name: str, programs: Programs, num_ranks: int, num_microbatches: int) -> str:
    lowered = programs.lowered(num_ranks, num_microbatches, forward_only=False)
    schedule, plain = lowered.schedule, programs.without_copies(num_ranks, num_microbatches)
    costs = Costs.uniform(schedule.placement)
    held, without = (max(peak(each, Costs.uniform(each.placement))) for each in (schedule, plain))
    hosted = max(max(on_host, default=0.0) for on_host in live(schedule, costs, HOST))
    found = (
        f'{name}: {held:g} activations at most on a rank, {without:g} without it, and {hosted:g} '
        'on the host'
    )
    if held <= _LITTLE * without:
        return found
    if programs.traits(num_ranks).splits:
        return f'{found}: W needs most until it has run; po and gis have it right behind B'
    return f'{found}: there is little time between F and B'
