"""Lines of NVIDIA's training loop: figures of the pipeline, the last line, the report of memory.

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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_zbpp.analysis.gain import RIVAL, gain_text, makespan_of
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.mcore.session import Session
from megatron_zbpp.runtime.log import rank_log


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
