"""Lines in the log of a training: the schedule at its start, figures of the pipeline, a summary.

    ... | number of nan iterations:   0 | idle GPU time: 4.0% | pipeline bubble: 3.1% | live ...

All ranks come to the line of an iteration, where Megatron gathers its timers: there figures of all
iterations since the last line are gathered, too. Between lines no rank waits for them. Where all
ranks meet because training is done, or a limit or a signal ends it, it is summed up in one line.
Megatron's report of memory knows 1F1B, and interleaved 1F1B wherever a rank has several chunks. So
it is asked about 1F1B, and a line behind it tells what another schedule holds.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_zbpp.analysis.gain import RIVAL, gain_text, makespan_of, megatron_refuses
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import Placement, Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.mcore.session import Session
from megatron_zbpp.mcore.settings import AUTO, OPTIONS, Settings
from megatron_zbpp.runtime.log import rank_log
from megatron_zbpp.schedules import find
from megatron_zbpp.techniques.composition import VOCABULARY, techniques_of
from megatron_zbpp.techniques.slices.graph import parts_in_words
from megatron_zbpp.version import __version__


@dataclass(frozen=True)
class Simulated:
    """An iteration where F, B and W of a rank with the mean of layers take 1 each.

    Stages take as long as they have layers; messages take nothing. Or by the costs of a plan.
    """

    microbatches: int  # of the iteration
    makespan: float  # first start to last end
    idle_busiest_rank: float  # share of it in which even the busiest rank idles
    window: float  # the longest of a rank
    bubble: float  # the same share of that
    idle_all_ranks: float  # share of all ranks' time that no pass takes
    rival: float | None  # makespan of 1F1B for the same model; None: it has none
    # most activations of each rank, in those of one microbatch on a full rank
    peaks: tuple[float, ...]
    planned: bool = False  # whether by the costs of the plan that is run, in its units
    in_shards: bool = False  # whether the output layer is on all ranks; the rival's is whole

    @classmethod
    def of(cls, schedule: Schedule, layers: Sequence[int], microbatches: int) -> Simulated:
        """Simulate a schedule; `layers`: of each stage, in model order; none: all have as many."""
        costs = alike = Costs.known(schedule, layers)
        if in_shards := VOCABULARY in techniques_of(schedule):
            from megatron_zbpp.techniques.vocabulary.place import rival_costs, with_usual_share

            costs = with_usual_share(schedule, costs)
            alike = rival_costs(schedule, costs)
        timeline = simulate(schedule, costs)
        return cls(
            microbatches,
            timeline.makespan,
            timeline.idle_busiest_rank,
            max(timeline.windows),
            timeline.bubble,
            timeline.idle_all_ranks,
            makespan_of(RIVAL, schedule, alike),
            peak(schedule, costs),
            schedule.costs is not None,
            in_shards,
        )

    def times(self, even: str) -> str:
        """Return the times that passes take, in words; `even` are those without a plan."""
        if self.planned or not self.in_shards:
            return 'costs of the plan' if self.planned else even
        from megatron_zbpp.techniques.vocabulary.place import USUAL_SHARE

        return f'{even}, shards {USUAL_SHARE}'

    def gained(self) -> str:
        """Return the gain over 1F1B, in words."""
        rival = RIVAL
        if self.in_shards:
            from megatron_zbpp.techniques.vocabulary.place import WHOLE

            rival += WHOLE
        return gain_text(self.makespan, self.rival, rival)


def lines(schedule: Schedule, config: Any) -> list[str]:
    """Return schedule and sizes, layers of each rank, simulated bubble, simulated memory."""
    placement = schedule.placement
    layout = getattr(config, 'pipeline_model_parallel_layout', None)
    by_stage: list[int] | None = getattr(layout, 'num_layers', None)  # in model order
    by_layers = ', by layers' if by_stage and len({*by_stage}) > 1 else ''
    late = asynchrony(schedule)
    m = late[0] if late else schedule.num_microbatches
    run = Simulated.of(schedule, by_stage or (), m)
    times = 'the ' * run.planned + run.times(f'F = B = W{by_layers}')
    if by_stage is not None:
        held = map(placement.stages, range(placement.num_ranks))
        layers = ', '.join('+'.join(str(by_stage[stage]) for stage in own) for own in held)
    else:
        total = getattr(config, 'num_layers', None)
        layers = 'as the model has them' if not total else f'{total} in all, divided by Megatron'
    most = max(run.peaks)
    memory = f'{most:.1f} activations of a microbatch on a full rank'
    found = [
        f'version {__version__}: {schedule.name} on {schedule.num_ranks} ranks x '
        f'{placement.num_chunks} chunks, {m} microbatches{parts_in_words(schedule.graph)}',
        f'layers of each rank, by chunk: {layers}',
        late[1]
        if late
        else f'simulated with {times}: idle GPU time {run.idle_all_ranks:.1%}{run.gained()}',
        f'simulated memory: {f"{most:.4g} in the unit of the plan" if schedule.costs else memory}',
    ]
    if refused := megatron_refuses(placement, m):
        found.append(refused)
    return found


def asynchrony(schedule: Schedule) -> tuple[int, str] | None:
    """Return the microbatches of a call, and how it differs from training with Megatron's own.

    None: the schedule is synchronous.
    """
    if not any(kind.of_weights for kind in schedule.graph.kinds.values()):
        return None
    from megatron_zbpp.runtime.endless import steps_late
    from megatron_zbpp.techniques.updates.versions import copies, delays, updates_of

    updates = updates_of(schedule.graph)
    assert updates is not None, 'of our own families'
    late = ' '.join(f'{each.mean:g}' for each in delays(schedule))
    kept = ' '.join(map(str, copies(schedule)))
    steps = 'each step makes the weights of the next forward'
    if steps_late(updates):
        steps = 'steps are taken within the next call, once the norm of all gradients is there, so '
        steps += 'that norm and success in the log are of the step before'
    return updates.every, (
        f'asynchronous, trains another model than 1F1B: weights of forwards are {late} steps old '
        f'in the mean of each stage, of which there are {kept} copies; {steps}'
    )


# settings by which a forward of Megatron's layers draws random numbers
DRAWING = (
    'hidden_dropout',
    'attention_dropout',
    'moe_input_jitter_eps',
    'moe_router_force_load_balancing',
    'moe_router_force_biased',  # from 0.17 on
    'mtp_hsm',  # from 0.20 on
)


def losses_from_scratch(settings: Settings, placement: Placement, config: Any) -> str:
    """Return one line: losses from scratch are stock Megatron's, or the reasons why they differ."""
    reasons = '; '.join(_reasons(settings, placement, config))
    if reasons:
        return f"losses from scratch differ from stock Megatron's: {reasons}"
    clipped = '' if placement.is_loop else '; steps that are clipped differ in the last bits'
    return f"losses from scratch are stock Megatron's{clipped}"


def _reasons(settings: Settings, placement: Placement, config: Any) -> Iterator[str]:
    if not settings.same_start and not placement.is_loop:
        yield 'other ranks draw the initial weights (--no-pipeline-same-start)'
    drawn = [f'{name} {value}' for name in DRAWING if (value := getattr(config, name, None))]
    if drawn and settings.dropout_seeds:
        yield (
            f'random numbers of {", ".join(drawn)} are seeded by layer and microbatch '
            '(--pipeline-dropout-seeds), as by 1f1b with that flag'
        )
    elif drawn and placement != Placement.loop(placement.num_ranks):
        yield (
            f'other ranks draw the random numbers of {", ".join(drawn)} (zb-h1 keeps them; all '
            'schedules draw the same with --pipeline-dropout-seeds)'
        )
    if getattr(config, 'fp4', None) and settings.schedule != '1f1b':
        yield 'backwards round gradients of fp4 at random, in the order of passes'
    name = settings.schedule
    if isinstance(name, str) and name != AUTO and find(name).asynchronous:
        yield f'{name} is asynchronous: gradients are of older weights'
    for name, option in OPTIONS.items():
        if option.differs and getattr(settings, name) is not None:
            yield option.differs


@dataclass(frozen=True)
class Summary:
    """A training of one pipeline."""

    iterations: int  # that the mean is of
    idle: float  # share of all ranks' time in the longest window that no pass takes: the mean
    # of an iteration, simulated with the times that the latest one took; None: of an asynchronous
    # schedule, which trains another model than 1F1B
    seconds: float | None = None
    # of 1F1B, simulated with the same times; None: they are not those of its stages, as where all
    # ranks share the output layer
    rival: float | None = None
    early_steps: int | None = None  # taken before all ranks had agreed; None: none could be
    taken_back: int = 0  # early steps that did not stand

    def __str__(self) -> str:
        mean = f'{self.idle:.1%} idle GPU time in the mean of {self.iterations} iterations'
        parts = [f'training ends: {mean}']
        if self.seconds is not None:
            parts.append(
                f'simulated with the times of the latest: {self.seconds * 1e3:.4g} ms'
                f'{gain_text(self.seconds, self.rival, RIVAL)}'
            )
        if self.early_steps is not None:
            parts.append(f'early steps: {self.early_steps}, taken back: {self.taken_back}')
        return '; '.join(parts)


def summarise(session: Session) -> Summary | None:
    """Return the summary of the training so far: a collective of the pipeline.

    None where no iteration of training has ended.
    """
    session.figures()  # of those since the last line
    interval, early = session.interval, session.post_validation
    if interval.latest is None:
        return None
    counts = (early.early, early.taken_back) if early else (0, 0)
    measured = None
    with session.collective('summary of the training'):
        (steps,) = interval.latest.from_all((counts,))
        if all(face.simulated for face in session.faces):
            measured = interval.latest.gather().timeline
    taken, back = map(max, zip(*steps, strict=True))
    seconds = rival = None
    if measured is not None:
        from megatron_zbpp.analysis.fit_costs import measured_costs

        schedule, costs = measured.schedule, measured_costs(measured)
        # 1F1B is never validated later
        seconds = simulate(schedule, costs).value('window' if session.overlaps else 'makespan')
        if all(face.comparable for face in session.faces):
            rival = makespan_of(RIVAL, schedule, costs)
    mean = interval.idle / interval.iterations
    return Summary(interval.iterations, mean, seconds, rival, taken if early else None, back)


_TRAINING = 'megatron.training.training'
_LINE = re.compile(r' \[.*?\] iteration +(\d+)/.*\|$')
_SCALARS = {
    'pipeline/bubble': 'bubble',
    'pipeline/idle-all-ranks': 'idle',
    'pipeline/live-activations': 'live',
}
_EARLY = {'pipeline/early-steps': 'early_steps', 'pipeline/steps-taken-back': 'taken_back'}


def with_metrics(session: Session, original: Callable, message: str) -> None:
    """Print a line of an iteration, in place of `print_rank_last`, with figures of the pipeline."""
    line = _LINE.match(str(message))
    figures = None if line is None else session.figures()
    if line is None or figures is None:
        original(message)
        return
    original(f'{message} {figures}')
    module, iteration = sys.modules[_TRAINING], int(line[1])
    # to TensorBoard and Weights & Biases, where the rank has them, as Megatron does
    writer, wandb = module.get_tensorboard_writer(), module.get_wandb_writer()
    if not writer or iteration % module.get_args().tensorboard_log_interval:
        return
    early = {} if figures.early_steps is None else _EARLY
    for name, attribute in (_SCALARS | early).items():
        value = getattr(figures, attribute)
        writer.add_scalar(name, value, iteration)
        if wandb:
            wandb.log({name: value}, iteration)


def with_schedule(
    session: Session,
    original: Callable,
    args: Any,
    num_microbatches: int | None = None,
    verbose: bool = False,
) -> Any:
    """Report memory, in place of `report_theoretical_memory`, and what the schedule holds."""
    ranks = args.pipeline_model_parallel_size
    if session.latest is None or num_microbatches is None or ranks == 1:
        return original(args, num_microbatches, verbose)
    by_1f1b = copy.copy(args)
    by_1f1b.virtual_pipeline_model_parallel_size = None
    found = original(by_1f1b, num_microbatches, verbose)
    schedule = session.programs.lowered(ranks, num_microbatches, forward_only=False).schedule
    most = max(peak(schedule, Costs.uniform(schedule.placement)))
    if found is None or most == min(ranks, num_microbatches):
        return found
    weights, activation, _ = found
    activation *= most / min(ranks, num_microbatches)
    rank_log.info(
        f'that is of 1F1B; {schedule.name} has {most:g} microbatches in flight: '
        f'activation={activation:.2f} MB, total={weights + activation:.2f} MB'
    )
    return weights, activation, weights + activation
