"""Dry runs: schedule, layers, bubble, memory and refusals of a launch line."""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_zbpp.analysis.gain import RIVAL, gain_text, makespan_of, megatron_refuses
from megatron_zbpp.analysis.memory import live, peak
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.emulation import te
from megatron_zbpp.ir import Placement
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.graph import HOST
from megatron_zbpp.ir.layout import layers_per_stage
from megatron_zbpp.ir.timeline import MEANING
from megatron_zbpp.mcore import layout, model_settings, preflight, replicas
from megatron_zbpp.mcore.command_line import flags, plan_layout, sizes
from megatron_zbpp.mcore.command_line.advise import LinePrediction
from megatron_zbpp.mcore.command_line.arguments import lacks_compiler
from megatron_zbpp.mcore.command_line.launch_line import LaunchLine
from megatron_zbpp.mcore.command_line.layer_memory import LayerMemory, layer_memory
from megatron_zbpp.mcore.command_line.naming import by_flags, renaming
from megatron_zbpp.mcore.command_line.own_checks import require_possible, require_sizes
from megatron_zbpp.mcore.iteration.announcement import asynchrony
from megatron_zbpp.mcore.job.rules import Refusal
from megatron_zbpp.mcore.programs import Programs
from megatron_zbpp.mcore.settings import Settings
from megatron_zbpp.mcore.start.scratch_losses import losses_from_scratch
from megatron_zbpp.post_validation.speculative_step import BUFFER_BYTES, KEPT_BYTES
from megatron_zbpp.schedules import build
from megatron_zbpp.techniques import find as find_technique
from megatron_zbpp.techniques.vocabulary.place import (
    USUAL_SHARE,
    WHOLE,
    has_shards,
    rival_costs,
    with_usual_share,
)

_LITTLE = 0.9  # of what is held without: more than that is little gain
_NO_PIPELINE = 'one pipeline rank has no pipeline: --pipeline-schedule changes nothing'

_CONNECTIONS = (
    '--overlap-moe-expert-parallel-comm needs CUDA_DEVICE_MAX_CONNECTIONS above 1, such as 32: '
    'with 1, what experts send waits for the products that it should run beside'
)

_NO_SCHEDULE = (
    'no --pipeline-schedule is given: for one of ours write -m megatron_zbpp.launch before the '
    'script, and --pipeline-schedule zb-v behind it'
)


@dataclass(frozen=True)
class Simulated:
    """An iteration where F, B and W of a rank with the mean of layers take 1 each.

    Stages take as long as they have layers; messages take nothing. Or by the costs of a plan.

    Attributes:
        microbatches: of the iteration.
        makespan: first start to last end.
        idle_busiest_rank: share of it in which even the busiest rank idles.
        window: the longest of a rank.
        bubble: the same share of that.
        idle_all_ranks: share of all ranks' time that no pass takes.
        rival: makespan of 1F1B for the same model; None: it has none.
        peaks: most activations of each rank, in those of one microbatch on a full rank.
        planned: whether by the costs of the plan that is run, in its units.
        in_shards: whether the output layer is on all ranks; the rival's is whole.
    """

    microbatches: int
    makespan: float
    idle_busiest_rank: float
    window: float
    bubble: float
    idle_all_ranks: float
    rival: float | None
    peaks: tuple[float, ...]
    planned: bool = False
    in_shards: bool = False


@dataclass(frozen=True)
class DryRun:
    """A dry run: what a job would run.

    Attributes:
        parallel: GPUs, and ranks by kind of parallelism.
        schedule: in words; None: Megatron's own.
        placement: its name.
        stages: of each pipeline rank, in model order.
        layers: transformer layers of each stage; none where they cannot be placed.
        iterations: one for each number of microbatches that training has.
        layer: what a dense layer holds; None: they are not dense, or of unknown size.
        refused: what does not work, why, and what to do.
        notes: what else to know.
        predicted: time and memory as `zbpp advise` predicts them; None: it is refused.
    """

    parallel: dict[str, int]
    schedule: str | None = None
    placement: str | None = None
    stages: tuple[tuple[int, ...], ...] = ()
    layers: tuple[int, ...] = ()
    iterations: tuple[Simulated, ...] = ()
    layer: LayerMemory | None = None
    refused: tuple[Refusal, ...] = ()
    notes: tuple[str, ...] = ()
    predicted: LinePrediction | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        refused = [{**asdict(r), 'value': str(r.value)} for r in self.refused]
        iterations = [
            # with earlier names of two figures
            {**asdict(i), 'bubble_window': i.bubble, 'bubble_makespan': i.idle_busiest_rank}
            for i in self.iterations
        ]
        return {**asdict(self), 'refused': refused, 'iterations': iterations}

    def lines(self) -> list[str]:
        """Return it for people."""
        sizes = ', '.join(f'{name} {size}' for name, size in self.parallel.items())
        own = "Megatron's own"
        predicted = self.predicted or LinePrediction()
        found = [f'refused: {refusal}' for refusal in self.refused]
        found += [f'schedule: {self.schedule or own}', f'parallel: {sizes}']
        of_layers = ' on a mean rank, by layers' if len({*self.layers}) > 1 else ''
        for each in self.iterations:
            rival = None if predicted.seconds else each.rival  # one line has one gain
            gained = gain_text(each.makespan, rival, RIVAL + each.in_shards * WHOLE)
            times = 'costs of the plan' if each.planned else f'F = B = W = 1{of_layers}'
            times += f', shards {USUAL_SHARE}' * (each.in_shards and not each.planned)
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


@renaming(by_flags)
def dry_run_of(line: LaunchLine, rates: Mapping[str, Any] = {}) -> DryRun:
    """Return the schedule, sizes and refusals of a launch line.

    Raises:
        ValueError: a value that cannot work, with the cure.
        OSError: the file of its schedule cannot be read.
    """
    only = 'only sizes, parallelism and our flags were read'
    notes = [*filter(None, [f'{line.lacks}; {only}' if line.lacks else lacks_compiler()])]
    if line.unknown:
        words = ' '.join(line.unknown)
        notes.append(f'no flags of Megatron, unless the script adds them: {words}')
    args = line.args
    require_possible(args)
    as_given = replace(line, args=copy.copy(args))  # layers are placed in the others
    given = flags.read(args)
    parallel = _parallel(line)
    if given is None or parallel['pipeline'] == 1:
        if given is not None:
            plan_layout.require_values(given)
        predicted = LinePrediction.of(line, rates)
        others = [] if predicted.seconds else _others(line, parallel)
        others = [_NO_PIPELINE] if given is not None else [_NO_SCHEDULE, *others]
        others += filter(None, [require_sizes(line)])
        return DryRun(parallel, notes=(*notes, *others), predicted=predicted)
    sizes.require_plain(args)
    machine = {'on_cpu': line.on_cpu, 'with_te': not te.missing()}
    settings, _ = plan_layout.settings_of(args, given, machine)
    programs = Programs(settings)
    replicas.require_pairs(programs, parallel['data'])
    placement = programs.placement(parallel['pipeline'])
    programs.join(getattr(args, model_settings.OVERLAP, False))
    counts = _microbatches(line, parallel['data'])
    notes += preflight.take_back(args)
    if programs.runs_ahead:
        sizes.disable_rerun_checks(args, line.words)
    refused = preflight.refused(args, programs, placement.num_ranks, **machine)
    if not refused:
        settings, found = preflight.with_slices(settings, args, placement.num_ranks, counts)
        programs = Programs(settings) if found else programs
        notes += [found] if found else []
    sizes.require_every_size(args, line.world_size, programs)
    notes += _consequences(line, settings, programs, placement, counts)
    ends = sizes.counted_ends(args)  # before layers are placed, which takes them into the layout
    layers = _layers(args, placement)
    notes += filter(None, [] if refused else [require_sizes(line)])
    counted = [*layers]
    for stage, counts_as_layer in zip((0, -1), ends, strict=True):
        counted[stage] += counts_as_layer
    return DryRun(
        parallel,
        programs.key,
        placement.name,
        tuple(map(placement.stages, range(placement.num_ranks))),
        tuple(layers),
        tuple(
            _simulated(programs, placement.num_ranks, count, counted)
            for count in counts
            if not programs.asynchronous  # see `zbpp simulate`
        ),
        layer_memory(args),
        refused,
        tuple(notes),
        None if refused else LinePrediction.of(as_given, rates),
    )


def _consequences(
    line: LaunchLine,
    settings: Settings,
    programs: Programs,
    placement: Placement,
    counts: list[int],
) -> list[str]:
    found: list[str] = []
    if not programs.asynchronous:
        found.append(_first_iteration(settings.prewarm, line.on_cpu))
    found.append(losses_from_scratch(settings, placement, line.args))
    found += [_CONNECTIONS] if getattr(line.args, model_settings.OVERLAP, False) else []
    for count in counts if programs.asynchronous else ():
        lowered = programs.lowered(placement.num_ranks, count, forward_only=False)
        late = asynchrony(lowered.schedule)
        found += [f'{count} microbatches: {late[1]}'] if late else []
    found += filter(None, (megatron_refuses(placement, count) for count in counts))
    found += [
        _of_copies(name, programs, placement.num_ranks, counts[-1])
        for name in settings.amounts
        if counts and find_technique(name).moves
    ]
    if programs.runs_ahead:
        found += [f'all ranks wait: {each}' for each in preflight.barriers(line.args, placement)]
    if settings.post_validation is not None:
        found.append(
            f'an early step takes {(KEPT_BYTES + BUFFER_BYTES) >> 20} MiB more on each rank, and '
            'more for its optimizer state where memory is free then, up to '
            '--optimizer-post-validation-kept-gib'
        )
    return found


def _first_iteration(prewarm: bool | None, on_cpu: bool) -> str:
    if prewarm or (prewarm is None and not on_cpu):
        return 'the first iteration is prepared on all ranks at the same time (--pipeline-prewarm)'
    cure = 'drop --no-pipeline-prewarm' if prewarm is False else 'give --pipeline-prewarm'
    return f'the first iteration is prepared rank after rank: {cure} for all at the same time'


def _parallel(line: LaunchLine) -> dict[str, int]:
    """Return ranks by kind."""
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
    """Return numbers of microbatches that training has."""
    micro, whole = line.args.micro_batch_size, line.args.global_batch_size
    if micro is None:
        raise ValueError('--micro-batch-size is missing: give how many samples a microbatch has')
    step = micro * replicas
    if (whole or step) % step and not getattr(line.args, 'decrease_batch_size_if_needed', False):
        raise ValueError(
            f'--global-batch-size {whole} does not divide by {step} (--micro-batch-size {micro} x '
            f'{replicas} data parallel): give a multiple'
        )
    return sorted(sizes.microbatches(line.args, line.world_size))


def _layers(args: Namespace, placement: Placement) -> list[int]:
    """Return transformer layers of each stage."""
    embedding = args.account_for_embedding_in_pipeline_split
    loss = args.account_for_loss_in_pipeline_split
    fixed = sizes.fixed_layers(args, placement)
    sizes.place_layers(args, placement)
    segments = sizes.hybrid_layers(args)
    if segments is not None:
        even = [sum(segments) // placement.num_stages] * placement.num_stages
        return segments if len(segments) > 1 else even
    if args.pipeline_model_parallel_layout is not None:
        return layout.StageLayout(placement, args.pipeline_model_parallel_layout).num_layers
    return layers_per_stage(args.num_layers, placement, embedding, loss, fixed)


def _others(line: LaunchLine, parallel: dict[str, int]) -> list[str]:
    """Return the idle GPU time of our schedules beside that of Megatron's own, where that runs."""
    ranks = parallel['pipeline']
    if ranks == 1 or not line.args.micro_batch_size:
        return []
    try:
        chunks, counts = sizes.num_chunks(line.args) or 1, _microbatches(line, parallel['data'])
    except ValueError as error:  # of a line that is Megatron's to refuse
        return [f'what another schedule would gain is not known: {error}']
    own, *ours = ('interleaved' if chunks > 1 else RIVAL), 'zb-h1', 'zb-v'
    m = counts[-1]
    runs = [
        simulate(made, Costs.uniform(made.placement))
        for made in (build(own, ranks, m, num_chunks=chunks), *(build(n, ranks, m) for n in ours))
    ]
    first, *others = (run.makespan for run in runs)
    gains = (
        f'{name} {runs[k].idle_all_ranks:.1%}{gain_text(span, first, "that")}'
        for k, (name, span) in enumerate(zip(ours, others, strict=True), 1)
    )
    return [
        f"idle GPU time, simulated with F = B = W of {m} microbatches: Megatron's own "
        f'{runs[0].idle_all_ranks:.1%}; --pipeline-schedule {"; ".join(gains)}'
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
    if programs.splits(num_ranks):
        return f'{found}: W needs most until it has run; po and gis have it right behind B'
    return f'{found}: there is little time between F and B'


def _simulated(
    programs: Programs, num_ranks: int, num_microbatches: int, layers: list[int]
) -> Simulated:
    schedule = programs.lowered(num_ranks, num_microbatches, forward_only=False).schedule
    costs = with_usual_share(schedule, Costs.known(schedule, layers))
    timeline = simulate(schedule, costs)
    return Simulated(
        num_microbatches,
        timeline.makespan,
        timeline.idle_busiest_rank,
        max(timeline.windows),
        timeline.bubble,
        timeline.idle_all_ranks,
        makespan_of(RIVAL, schedule, rival_costs(schedule, costs)),
        peak(schedule, costs),
        schedule.costs is not None,
        has_shards(schedule),
    )
