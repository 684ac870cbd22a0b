"""Asynchronous schedules by their names: PipeDream, 2BW, PACI, PipeMare and WPipe.

They never drain: a schedule is several calls of m microbatches, of which the last ones show how it
goes on. So bubbles are those of a call in the middle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from megatron_zbpp.ir import BW, F, Graph, Pass, Placement, Schedule, chain
from megatron_zbpp.schedules.construct.draft import Draft
from megatron_zbpp.techniques.updates.versions import CORRECTED, NEWEST, UPDATE, updating


def pipedream(num_ranks: int, num_microbatches: int) -> Schedule:
    """PipeDream: a backward uses the weights of its forward, which the rank has kept (stash).

    Narayanan et al., arXiv 1806.03377; with gradients of m microbatches added up for each step.

        >>> print(grid(pipedream(2, 2), width=76))
        rank 0   0F0   0F1   0BW0  0F2   0BW1  0U1   0F3   0BW2  0F4   0BW3  0U3…
        rank 1   1F0   1BW0  1F1   1BW1  1U1   1F2   1BW2  1F3   1BW3  1U3   1F4…

    - Peak memory: p activations on rank 0, p-s on rank s; ceil((p-1-s)/m)+1 copies of the weights.
    """
    graph = updating(chain(num_ranks), num_microbatches)
    return without_flush('pipedream', graph, num_microbatches)


def pipedream_2bw(num_ranks: int, num_microbatches: int) -> Schedule:
    """PipeDream-2BW: every forward and backward of batch b uses the weights of b-1 steps.

    Narayanan et al., arXiv 2006.09503: W[b+1] = W[b] - lr grad f(W[b-1]). The version that is one
    step old is there in time where m >= p-1.

        >>> print(grid(pipedream_2bw(2, 2), width=76))
        rank 0   0F0   0F1   0BW0  0F2   0BW1  0U1   0F3   0BW2  0F4   0BW3  0U3…
        rank 1   1F0   1BW0  1F1   1BW1  1U1   1F2   1BW2  1F3   1BW3  1U3   1F4…

    - Peak memory: p activations on rank 0, p-s on rank s; two copies of the weights.

    Raises:
        ValueError: fewer than p-1 microbatches.
    """
    if num_microbatches < num_ranks - 1:
        raise ValueError(
            f'pipedream-2bw with {num_microbatches} microbatches on {num_ranks} ranks needs '
            f'weights before they are made: give at least {num_ranks - 1}, or take pipedream or '
            'paci'
        )
    graph = updating(chain(num_ranks), num_microbatches, delays=(1,) * num_ranks)
    return without_flush('pipedream-2bw', graph, num_microbatches)


def paci(num_ranks: int, num_microbatches: int) -> Schedule:
    """PACI: PipeDream's order without a stash; gradients of m microbatches bound what weights move.

    arXiv 2606.07881. Forward and backward of a microbatch may use other weights: with m >= p-1
    those of two versions that follow each other.

        >>> print(grid(paci(2, 2), width=76))
        rank 0   0F0   0F1   0BW0  0F2   0BW1  0U1   0F3   0BW2  0F4   0BW3  0U3…
        rank 1   1F0   1BW0  1F1   1BW1  1U1   1F2   1BW2  1F3   1BW3  1U3   1F4…

    - Peak memory: p activations on rank 0, p-s on rank s; one copy of the weights.
    """
    graph = updating(chain(num_ranks), num_microbatches, backward=NEWEST)
    return without_flush('paci', graph, num_microbatches)


def pipemare(num_ranks: int, num_microbatches: int) -> Schedule:
    """PipeMare: backwards use w - tau d, with d the moving average of steps and tau the delay (T2).

    Yang et al., arXiv 1910.05124; tau = (p-1-s)/m on rank s, as this order has it.

        >>> print(grid(pipemare(2, 2), width=76))
        rank 0   0F0   0F1   0BW0  0F2   0BW1  0U1   0F3   0BW2  0F4   0BW3  0U3…
        rank 1   1F0   1BW0  1F1   1BW1  1U1   1F2   1BW2  1F3   1BW3  1U3   1F4…

    - Peak memory: p activations on rank 0, p-s on rank s; the weights and the corrected ones, and d
      in 4 bytes a parameter; none of these on the last rank, which has no delay.
    """
    graph = updating(chain(num_ranks), num_microbatches, backward=CORRECTED)
    return without_flush('pipemare', graph, num_microbatches)


def wpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """WPipe: forwards of the first half of the model run a batch ahead of the second half.

    Yang et al., Group-based Interleaved Pipeline Parallelism for Large-scale DNN Training, ICLR
    2022. Weights of the first half are two copies, one step late; those of the second are one, as
    in a synchronous schedule. The order is ours, by list scheduling: a free rank takes the first of
    these that is ready: a forward of its second chunk, a backward of it, a forward of its first, a
    backward of it. A forward waits for the version of its weights, and of a chunk at most p
    microbatches are between F and BW: of the first, which waits for the second, 3p.

        >>> print(grid(wpipe(2, 2), width=76))
        rank 0   0F0    0F1    2F0    2F1    0F2    0F3    2BW0   2BW1   2U1…
        rank 1   1F0    1F1    3F0    3F1    3BW0   3BW1   3U1    1F2    1F3…

    - Bubble where F=B=W: 0.5F of a call where p = m = 4, 2.5F where p = m = 8; from 2p microbatches
      on 1.4 % and less.
    - Peak memory: at most 2p activations; two copies of the weights of the first half, one of the
      second.
    """
    draft = _Draft(num_ranks, num_microbatches, num_calls(num_ranks, num_microbatches) + 10)
    draft.fill(draft.choose)
    return draft.schedule('wpipe')


def wpipe_joint(num_ranks: int, num_microbatches: int) -> Schedule:
    """WPipe with one step a rank and call, behind the last backwards of both halves of the model.

    Weights, delays and copies are those of `wpipe`, and so is what it trains. Each call has one
    order, repeated: behind the forwards of its second chunk a rank runs those of its first for the
    next batch (of more than 4p, the first 2p). Of what is ready it takes first a backward of its
    second chunk, then a forward of it, a backward of its first, a forward of that.

        >>> print(grid(wpipe_joint(2, 2), width=76))
        rank 0   0F0    0F1    2F0    2F1    0F2    0F3    2BW0   2BW1   0BW0…
        rank 1   1F0    1F1    3F0    3BW0   3F1    3BW1   1BW0   1BW1   1F2…

    - Bubble where F=B=W: 2.5F of a call where p = m = 4, 6.5F where p = m = 8; from 2p microbatches
      on 7 % and less.
    - Peak memory: at most 3.5p activations, where m is 4p; two copies of the weights of the first
      half, one of the second.
    """
    p, m = num_ranks, num_microbatches
    ahead, calls = m if m <= 4 * p else 2 * p, num_calls(p, m) + 2
    orders: list[list[Pass]] = []
    draft = _JointDraft(p, m, ahead)
    draft.fill(draft.choose)
    for rank, drafted in enumerate(draft.orders):
        order = [Pass(F, rank, j) for j in range(ahead)]
        at = [i for i, each in enumerate(drafted) if each.kind == UPDATE and each.stage >= p]
        steady = drafted[at[_STEADY - 1] + 1 : at[_STEADY] + 1]
        for later in range(-_STEADY * m, (calls - _STEADY) * m, m):
            moved = (each._replace(microbatch=each.microbatch + later) for each in steady)
            order += [each for each in moved if each.microbatch < calls * m]
        orders.append(order)
    return Schedule.of('wpipe-joint', draft.placement, calls * m, orders, draft.graph)


_STEADY = 4  # a call of a draft behind which its calls are taken to repeat


def num_calls(num_ranks: int, num_microbatches: int) -> int:
    """Return so many calls that three run all their forwards, however far a rank runs ahead."""
    return 2 * -(-(num_ranks - 1) // num_microbatches) + 3


def without_flush(name: str, graph: Graph, num_microbatches: int) -> Schedule:
    """Return 1F1B that goes on from batch to batch, with a step behind each (PipeDream).

    Rank s runs p-1-s forwards, and then forwards and backwards by turns (arXiv 1806.03377).
    """
    p, m = graph.num_stages, num_microbatches
    total = num_calls(p, m) * m
    orders = (_order(stage, p - 1 - stage, m, total) for stage in range(p))
    return Schedule.of(name, Placement.loop(p), total, orders, graph)


def _order(stage: int, ahead: int, m: int, total: int) -> Iterator[Pass]:
    yield from (Pass(F, stage, j) for j in range(ahead))
    for j in range(total):
        if j + ahead < total:
            yield Pass(F, stage, j + ahead)
        yield Pass(BW, stage, j)
        if (j + 1) % m == 0:
            yield Pass(UPDATE, stage, j)


class _Draft(Draft):
    """Runs two chunks a rank against the clock."""

    turns = tuple((half, kind) for half in (1, 0) for kind in (F, BW))  # what comes first

    def __init__(self, num_ranks: int, num_microbatches: int, calls: int) -> None:
        p, m = self._p, self._m = num_ranks, num_microbatches
        # weights of the first group are one step late
        graph = updating(chain(2 * p), m, delays=(1,) * p + (0,) * p)
        super().__init__(Placement.loop(p, 2), calls * m, graph=graph)
        self._begun = Counter[tuple[str, int]]()  # by kind and stage
        self._due: list[list[Pass]] = [[] for _ in range(p)]  # steps behind what a rank runs

    def choose(self, rank: int, now: float) -> Pass | None:
        if self._due[rank]:
            return self._due[rank].pop(0)
        for half, kind in self.turns:
            stage = rank + half * self._p
            p = Pass(kind, stage, self._begun[kind, stage])
            comes = p.microbatch < self.num_microbatches and self._has_room(p)
            if comes and self.arrival(p) <= now:
                self._begun[kind, stage] += 1
                self._due[rank] += self._steps(rank, p)
                return p
        return None

    def _steps(self, rank: int, taken: Pass) -> list[Pass]:
        last = taken.kind == BW and (taken.microbatch + 1) % self._m == 0
        return [taken._replace(kind=UPDATE)] if last else []

    def _has_room(self, p: Pass) -> bool:
        held = p.microbatch - self._begun[BW, p.stage]
        return p.kind != F or held < (3 * self._p if p.stage < self._p else self._p)


class _JointDraft(_Draft):
    """Runs calls that each end with the steps of both chunks of a rank."""

    turns = (1, BW), (1, F), (0, BW), (0, F)

    def __init__(self, num_ranks: int, num_microbatches: int, ahead: int) -> None:
        super().__init__(num_ranks, num_microbatches, _STEADY + 3)
        self._ahead = ahead  # forwards of the first chunk that a call runs for the next one
        self._calls = [0] * num_ranks  # that have ended

    def _steps(self, rank: int, taken: Pass) -> list[Pass]:
        stages, end = (rank, rank + self._p), (self._calls[rank] + 1) * self._m
        run = [self._begun[kind, stage] for kind in (F, BW) for stage in stages]
        if min(run) < end or run[0] < end + self._ahead:
            return []
        self._calls[rank] += 1
        return [Pass(UPDATE, stage, end - 1) for stage in stages]

    def _has_room(self, p: Pass) -> bool:
        end = (self._calls[p.stage % self._p] + 1) * self._m
        if p.kind == F and p.stage < self._p and self._begun[F, p.stage + self._p] >= end:
            end += self._ahead
        return p.microbatch < end
