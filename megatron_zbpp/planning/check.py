"""The proof that a schedule may run: whatever lacks it is refused, with the place in the grid.

What `check` demands, and why:

- Each stage does each microbatch's forward, input gradient and weight gradient exactly once, on
  the rank that holds it. A schedule without any B, W or BW is one for evaluation: forwards only.
- Of one stage, forwards, input gradients and weight gradients each come in microbatch order:
  dropout draws and gradients then add up bit for bit as in Megatron's 1F1B.
- B and BW come after their F, W after its B, and no ranks wait for each other in a circle.
- The programs that the runtime will issue, messages included, neither deadlock, whatever the
  backend makes wait, nor receive in another order than was sent (`prove`).

Allowed on purpose: a microbatch may be split into B and W on one stage and fused into BW on
another. Both send the gradient of their input when they end; the neighbour sees no difference.
Messages of several stages between the same two ranks may be used in another order than they were
sent: `lower` posts their receives in the order of the sends.
"""

from __future__ import annotations

from megatron_zbpp.ir import BW, KINDS, B, F, Pass, Schedule, W
from megatron_zbpp.planning.costs import Costs
from megatron_zbpp.planning.errors import ScheduleError
from megatron_zbpp.planning.lower import lower
from megatron_zbpp.planning.memory import RESOLUTION, highest
from megatron_zbpp.planning.prove import DeadlockError
from megatron_zbpp.planning.simulate import simulate

__all__ = ['ScheduleError', 'check']

_JOBS = ('forward', 'input gradient', 'weight gradient')
_JOBS_OF = {F: (0,), B: (1,), W: (2,), BW: (1, 2)}
_KINDS_FOR = ((F,), (B, BW), (W, BW))
_AFTER = {B: 0, BW: 0, W: 1}  # which job of the same stage and microbatch must come first


def check(
    schedule: Schedule, *, memory_limit: float | None = None, costs: Costs | None = None
) -> None:
    """Returns if `schedule` may run; see the module's text for what that takes.

    Args:
        schedule: any.
        memory_limit: activations that a rank may hold, in the unit of `costs.activation`.
        costs: whose activations count against the limit. Default: a full rank holds 1 a microbatch.

    Raises:
        ScheduleError: it may not; the message names what, where and the cure, and shows the grid.
        ValueError: `memory_limit` or `costs` makes no sense.
    """
    _check_shape(schedule)
    trains = any(p.kind != F for _, p in schedule)
    for rank in range(schedule.num_ranks):
        _check_rank(schedule, rank, trains)
    costs = costs or Costs.uniform(schedule.placement)
    simulate(schedule, costs)
    _check_programs(schedule)
    if memory_limit is not None:
        _check_memory(schedule, memory_limit, costs)


def _check_shape(schedule: Schedule) -> None:
    if schedule.num_microbatches < 1:
        raise ScheduleError(
            f'{schedule.num_microbatches} microbatches: a schedule needs at least 1', schedule
        )
    if len(schedule.passes) != schedule.num_ranks:
        raise ScheduleError(
            f'passes of {len(schedule.passes)} ranks on a placement of {schedule.num_ranks}: '
            'give one order per rank',
            schedule,
        )


def _check_rank(schedule: Schedule, rank: int, trains: bool) -> None:
    """Each job of each of the rank's stages once per microbatch, in order, after what it needs."""
    m = schedule.num_microbatches
    done = {stage: [0, 0, 0] for stage in schedule.placement.stages(rank)}
    for at, p in enumerate(schedule.passes[rank]):
        kind, stage, microbatch = p
        if kind not in KINDS or stage not in done or not 0 <= microbatch < m:
            raise _foreign(schedule, rank, at)
        jobs = done[stage]
        for job in _JOBS_OF[kind]:
            if jobs[job] != microbatch:
                raise _out_of_turn(schedule, rank, at, job, jobs[job])
        if kind != F and jobs[_AFTER[kind]] <= microbatch:
            raise _too_early(schedule, rank, at)
        for job in _JOBS_OF[kind]:
            jobs[job] += 1
    for stage, jobs in done.items():
        for job in range(3 if trains else 1):
            if jobs[job] < m:
                raise _missing(schedule, rank, job, stage, jobs[job])


def _foreign(schedule: Schedule, rank: int, at: int) -> ScheduleError:
    """The error for a pass that has no business on this rank."""
    p = schedule.passes[rank][at]
    if p.kind not in KINDS:
        why = f'its kind {p.kind!r} is none of {", ".join(KINDS)}'
    elif p.stage not in range(schedule.num_stages):
        why = f'there are stages 0 to {schedule.num_stages - 1} only'
    elif p.stage not in schedule.placement.stages(rank):
        why = f'its stage is on rank {schedule.placement.ranks[p.stage]}'
    else:
        why = f'there are microbatches 0 to {schedule.num_microbatches - 1} only'
    return ScheduleError(f'{p} does not belong on rank {rank}: {why}', schedule, [(rank, at)])


def _out_of_turn(schedule: Schedule, rank: int, at: int, job: int, turn: int) -> ScheduleError:
    """The error for a pass that does its stage's `job` when it is the turn of microbatch `turn`."""
    order = schedule.passes[rank]
    p = order[at]
    if p.microbatch < turn:
        first = next(q for q in order if _does(q, job, p.stage, p.microbatch))
        what = (
            f'{p} on rank {rank} repeats the {_JOBS[job]} that {first} has done: keep one of them'
        )
        return ScheduleError(what, schedule, [(rank, at)])
    later = next((q for q in order[at:] if _does(q, job, p.stage, turn)), None)
    if later is None:
        return _missing(schedule, rank, job, p.stage, turn, at)
    what = (
        f'{p} on rank {rank} comes before {later}: each {_JOBS[job]} of a stage must come in '
        'microbatch order, or results differ from 1F1B in the last bits'
    )
    return ScheduleError(what, schedule, [(rank, at)])


def _too_early(schedule: Schedule, rank: int, at: int) -> ScheduleError:
    """The error for a pass that comes before the pass of its own stage that it needs."""
    p, job = schedule.passes[rank][at], _AFTER[schedule.passes[rank][at].kind]
    needed = next((q for q in schedule.passes[rank] if _does(q, job, p.stage, p.microbatch)), None)
    if needed is None:
        return _missing(schedule, rank, job, p.stage, p.microbatch, at)
    what = f'{p} on rank {rank} comes before {needed}, which it needs: move it behind'
    return ScheduleError(what, schedule, [(rank, at)])


def _missing(
    schedule: Schedule, rank: int, job: int, stage: int, microbatch: int, at: int | None = None
) -> ScheduleError:
    """The error for a job that no pass on its rank does; noticed at cell `at`, else at the end."""
    order = schedule.passes[rank]
    split = not {Pass(B, stage, microbatch), Pass(W, stage, microbatch)}.isdisjoint(order)
    cures = [Pass(k, stage, microbatch) for k in _KINDS_FOR[job] if not (split and k == BW)]
    what = (
        f'rank {rank} never does the {_JOBS[job]} of microbatch {microbatch} on stage {stage}: '
        f'add {" or ".join(map(str, cures))}'
    )
    return ScheduleError(what, schedule, [(rank, len(order) if at is None else at)])


def _does(p: Pass, job: int, stage: int, microbatch: int) -> bool:
    """Whether `p` does this job."""
    return p.stage == stage and p.microbatch == microbatch and p.kind in _KINDS_FOR[job]


def _check_programs(schedule: Schedule) -> None:
    """The instructions that the runtime will issue end, and receive in the order of the sends."""
    try:
        lower(schedule)
    except DeadlockError as error:
        raise ScheduleError(str(error), schedule, error.cells) from error


def _check_memory(schedule: Schedule, limit: float, costs: Costs) -> None:
    """No rank ever holds more than `limit`, at the end of an F, of a B, or within a BW."""
    if not limit >= 0:
        raise ValueError(f'memory limit {limit} is not an amount: give a number from 0 up')
    for rank, held in enumerate(highest(schedule, costs)):
        at = next((i for i, amount in enumerate(held) if amount > limit + RESOLUTION), None)
        if at is not None:
            what = (
                f'rank {rank} holds activations of {held[at]:g} at {schedule.passes[rank][at]}, '
                f'{max(held):g} at its peak, above the limit of {limit:g}: raise the limit, or '
                'take a schedule that holds less'
            )
            raise ScheduleError(what, schedule, [(rank, at)])
