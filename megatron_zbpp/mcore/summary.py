"""A training in one line, at its end: idle time, gain over 1F1B, early steps."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_zbpp.analysis.fit_costs import measured_costs
from megatron_zbpp.analysis.gain import RIVAL, gain_text, makespan_of
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir.timeline import Timeline
from megatron_zbpp.mcore.session import Session


@dataclass(frozen=True)
class Summary:
    """A training of one pipeline.

    Attributes:
        iterations: that the mean is of.
        idle: share of all ranks' time in the longest window that no pass takes: the mean.
        seconds: of an iteration, simulated with the times that the latest one took; None: of an
            asynchronous schedule, which trains another model than 1F1B.
        rival: seconds of 1F1B, simulated with the same times; None: they are not those of its
            stages, as where all ranks share the output layer.
        early_steps: optimizer steps taken before all ranks had agreed; None: none could be.
        taken_back: how many of them did not stand.
    """

    iterations: int
    idle: float
    seconds: float | None = None
    rival: float | None = None
    early_steps: int | None = None
    taken_back: int = 0

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
    """Return what has been trained so far: a collective of the pipeline.

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
        if session.endless is None:
            measured = interval.latest.gather().timeline
    taken, back = map(max, zip(*steps, strict=True))
    seconds, rival = (None, None) if measured is None else _simulated(measured, session.overlaps)
    if not all(face.comparable for face in session.faces):
        rival = None
    mean = interval.idle / interval.iterations
    found = taken if early else None
    return Summary(interval.iterations, mean, seconds, rival, found, back)


def _simulated(measured: Timeline, overlaps: bool) -> tuple[float, float | None]:
    """Return seconds of an iteration and of 1F1B's, which is never validated later."""
    costs = measured_costs(measured)
    ours = simulate(measured.schedule, costs).value('window' if overlaps else 'makespan')
    return ours, makespan_of(RIVAL, measured.schedule, costs)
