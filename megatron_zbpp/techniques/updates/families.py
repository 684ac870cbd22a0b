"""Asynchronous schedules by their names: PipeDream, 2BW, PACI, PipeMare and WPipe.

They never drain: a schedule is several calls of m microbatches, of which the last ones show how it
goes on. So bubbles are those of a call in the middle.
"""

from __future__ import annotations

from megatron_zbpp.ir import Schedule
from megatron_zbpp.ir.graph import Graph, chain
from megatron_zbpp.schedules.registry import TWO, Formula, family
from megatron_zbpp.techniques.updates.graph import CORRECTED, NEWEST, updating
from megatron_zbpp.techniques.updates.orders import in_joint_calls, in_two_groups, without_flush

_FULL = Formula('0 of a call', lambda at: 0)
_MEMORY = Formula('p', lambda at: at.p)


@family(
    'pipedream',
    summary='1F1B that never drains: each rank steps by itself, and keeps old weights',
    bubble=_FULL,
    memory=_MEMORY,
    source='PipeDream, arXiv 1806.03377, section 3',
    asynchronous=True,
)
def pipedream(num_ranks: int, num_microbatches: int) -> Schedule:
    """PipeDream: a backward uses the weights of its forward, which the rank has kept (stash).

    Narayanan et al., arXiv 1806.03377; with gradients of m microbatches added up for each step.

        >>> print(grid(pipedream(2, 2), width=76))
        rank 0   0F0   0F1   0BW0  0F2   0BW1  0U1   0F3   0BW2  0F4   0BW3  0U3…
        rank 1   1F0   1BW0  1F1   1BW1  1U1   1F2   1BW2  1F3   1BW3  1U3   1F4…

    - Bubble: none, once the pipeline is full.
    - Peak memory: p activations on rank 0, p-s on rank s; ceil((p-1-s)/m)+1 copies of the weights.
    - When: to compare. It trains another model: gradients of rank s are (p-1-s)/m steps late.
    """
    graph = updating(chain(num_ranks), num_microbatches)
    return without_flush('pipedream', graph, num_microbatches)


@family(
    'pipedream-2bw',
    summary='1F1B that never drains, all gradients one step late, two copies of the weights',
    bubble=_FULL,
    memory=_MEMORY,
    source='PipeDream-2BW, arXiv 2006.09503',
    aliases=('2bw',),
    asynchronous=True,
)
def pipedream_2bw(num_ranks: int, num_microbatches: int) -> Schedule:
    """PipeDream-2BW: every forward and backward of batch b uses the weights of b-1 steps.

    Narayanan et al., arXiv 2006.09503: W[b+1] = W[b] - lr grad f(W[b-1]). The version that is one
    step old is there in time where m >= p-1.

        >>> print(grid(pipedream_2bw(2, 2), width=76))
        rank 0   0F0   0F1   0BW0  0F2   0BW1  0U1   0F3   0BW2  0F4   0BW3  0U3…
        rank 1   1F0   1BW0  1F1   1BW1  1U1   1F2   1BW2  1F3   1BW3  1U3   1F4…

    - Bubble: none, once the pipeline is full.
    - Peak memory: p activations on rank 0, p-s on rank s; two copies of the weights.
    - When: m is about p and cannot grow. From 2p microbatches on `zb-v` with post-validation has no
      bubble either, and trains the same model as Megatron.

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


@family(
    'paci',
    summary='1F1B that never drains, with one copy of the weights: backwards use the newest',
    bubble=_FULL,
    memory=_MEMORY,
    source='PACI, arXiv 2606.07881',
    asynchronous=True,
)
def paci(num_ranks: int, num_microbatches: int) -> Schedule:
    """PACI: PipeDream's order without a stash; gradients of m microbatches bound what weights move.

    arXiv 2606.07881. Forward and backward of a microbatch may use other weights: with m >= p-1
    those of two versions that follow each other.

        >>> print(grid(paci(2, 2), width=76))
        rank 0   0F0   0F1   0BW0  0F2   0BW1  0U1   0F3   0BW2  0F4   0BW3  0U3…
        rank 1   1F0   1BW0  1F1   1BW1  1U1   1F2   1BW2  1F3   1BW3  1U3   1F4…

    - Bubble: none, once the pipeline is full.
    - Peak memory: p activations on rank 0, p-s on rank s; one copy of the weights.
    - When: to compare. It trains another model: forwards of rank s are (p-1-s)/m steps late.
    """
    graph = updating(chain(num_ranks), num_microbatches, backward=NEWEST)
    return without_flush('paci', graph, num_microbatches)


@family(
    'pipemare',
    summary='PACI whose backwards correct the newest weights towards those of their forwards',
    bubble=_FULL,
    memory=_MEMORY,
    source='PipeMare, arXiv 1910.05124',
    asynchronous=True,
)
def pipemare(num_ranks: int, num_microbatches: int) -> Schedule:
    """PipeMare: backwards use w - tau d, with d the moving average of steps and tau the delay (T2).

    Yang et al., arXiv 1910.05124; tau = (p-1-s)/m on rank s, as this order has it.

        >>> print(grid(pipemare(2, 2), width=76))
        rank 0   0F0   0F1   0BW0  0F2   0BW1  0U1   0F3   0BW2  0F4   0BW3  0U3…
        rank 1   1F0   1BW0  1F1   1BW1  1U1   1F2   1BW2  1F3   1BW3  1U3   1F4…

    - Bubble: none, once the pipeline is full.
    - Peak memory: p activations on rank 0, p-s on rank s; the weights and the corrected ones, and d
      in 4 bytes a parameter; none of these on the last rank, which has no delay.
    - When: to compare. It trains another model: forwards of rank s are (p-1-s)/m steps late.
    """
    graph = updating(chain(num_ranks), num_microbatches, backward=CORRECTED)
    return without_flush('pipemare', graph, num_microbatches)


@family(
    'wpipe',
    summary='two chunks a rank: the first half of the model one step late, the second not at all',
    bubble=Formula('little of a call, by list scheduling', lambda at: 0),
    memory=Formula('at most 2p', lambda at: 2 * at.p),
    source='WPipe, ICLR 2022',
    chunks=TWO,
    asynchronous=True,
)
def wpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """WPipe: forwards of the first half of the model run a batch ahead of the second half.

    Yang et al., Group-based Interleaved Pipeline Parallelism for Large-scale DNN Training, ICLR
    2022. Weights of the first half are two copies, one step late; those of the second are one, as
    in a synchronous schedule. The order is ours, by list scheduling.

        >>> print(grid(wpipe(2, 2), width=76))
        rank 0   0F0    0F1    2F0    2F1    0F2    0F3    2BW0   2BW1   2U1…
        rank 1   1F0    1F1    3F0    3F1    3BW0   3BW1   3U1    1F2    1F3…

    - Bubble where F=B=W: 0.5F of a call where p = m = 4, 2.5F where p = m = 8; from 2p microbatches
      on 1.4 % and less.
    - Peak memory: at most 2p activations; two copies of the weights of the first half, one of the
      second.
    - When: to compare. It trains another model, of which half has no delay; by `wpipe-joint`, since
      Megatron's optimizer steps both halves at once.
    """
    graph = _of_two_groups(num_ranks, num_microbatches)
    return in_two_groups('wpipe', graph, num_ranks, num_microbatches)


@family(
    'wpipe-joint',
    summary='wpipe whose halves step at once, as optimizers of Megatron do: trains the same',
    bubble=Formula('a fifth of a call at m = p, by list scheduling', lambda at: 0),
    memory=Formula('at most 3.5p', lambda at: 3.5 * at.p),
    source='WPipe, ICLR 2022; the order is ours',
    chunks=TWO,
    asynchronous=True,
)
def wpipe_joint(num_ranks: int, num_microbatches: int) -> Schedule:
    """WPipe with one step a rank and call, behind the last backwards of both halves of the model.

    Weights, delays and copies are those of `wpipe`, and so is what it trains.

        >>> print(grid(wpipe_joint(2, 2), width=76))
        rank 0   0F0    0F1    2F0    2F1    0F2    0F3    2BW0   2BW1   0BW0…
        rank 1   1F0    1F1    3F0    3BW0   3F1    3BW1   1BW0   1BW1   1F2…

    - Bubble where F=B=W: 2.5F of a call where p = m = 4, 6.5F where p = m = 8; from 2p microbatches
      on 7 % and less.
    - Peak memory: at most 3.5p activations, where m is 4p; two copies of the weights of the first
      half, one of the second.
    - When: to compare. It trains another model, of which half has no delay.
    """
    graph = _of_two_groups(num_ranks, num_microbatches)
    return in_joint_calls('wpipe-joint', graph, num_ranks, num_microbatches)


def _of_two_groups(p: int, m: int) -> Graph:
    """Return the graph of two stages a rank, the first of them one step late."""
    return updating(chain(2 * p), m, delays=(1,) * p + (0,) * p)
