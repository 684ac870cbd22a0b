"""Schedules of slices by the names that papers give them: Seq1F1B and its kin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_zbpp.ir import Placement, Schedule
from megatron_zbpp.schedules.construct.phases import even_groups
from megatron_zbpp.schedules.loops import in_groups
from megatron_zbpp.schedules.whole_backwards import one_f_one_b
from megatron_zbpp.schedules.zb_h import zb_h1
from megatron_zbpp.schedules.zb_v import closed_form, filled
from megatron_zbpp.techniques.slices.place import by_rule, cut

SLICES = 4  # where the caller names no number


def seq1f1b(num_ranks: int, num_microbatches: int, num_slices: int = SLICES) -> Schedule:
    """Seq1F1B: 1F1B whose unit is a slice of a sequence; backwards take the last slice first.

    Sun et al., Seq1F1B, arXiv 2406.03488. A slice attends to the slices before it, whose keys and
    values are kept; so the first backward waits for n-1 further forwards. The same as `1f1b` with
    `--slices n`.

        >>> print(grid(seq1f1b(2, 2, num_slices=2), width=90))
        rank 0   0F0     0F0.1   0F1     0BW0.1  0F1.1   0BW0    0BW1.1  0BW1
        rank 1   1F0     1F0.1   1BW0.1  1F1     1BW0    1F1.1   1BW1.1  1BW1

    - Bubble: (p-1)(F+B+W)/n, where slices take equal times.
    - Peak memory: (p+n-1)/n activations on rank 0, beside keys and values.
    """
    units = one_f_one_b(num_ranks, num_microbatches * num_slices)
    return replace(by_rule(units, num_slices), name='seq1f1b')


def seq1f1b_zb(num_ranks: int, num_microbatches: int, num_slices: int = SLICES) -> Schedule:
    """Seq1F1B-ZB: ZB-H1 whose unit is a slice of a sequence; backwards take the last slice first.

    Sun et al., Seq1F1B, arXiv 2406.03488, with the order of Qi et al., arXiv 2401.10241. The same
    as `zb-h1` with `--slices n`.

        >>> print(grid(seq1f1b_zb(2, 2, num_slices=2), width=90))
        rank 0   0F0    0F0.1  0F1    0B0.1  0W0.1  0F1.1  0B0    0W0    0B1.1  0W1.1  0B1…
        rank 1   1F0    1F0.1  1B0.1  1F1    1B0    1W0.1  1F1.1  1B1.1  1W0    1B1    1W1.1…

    - Bubble: (p-1)(F+B-W)/n for mn >= 2p-2+n, where slices take equal times.
    - Peak memory: (p+n-1)/n activations on every rank, beside keys and values.
    """
    units = zb_h1(num_ranks, num_microbatches * num_slices)
    return replace(by_rule(units, num_slices), name='seq1f1b-zb')


def seq_zb_v(num_ranks: int, num_microbatches: int, num_slices: int = SLICES) -> Schedule:
    """Seq-ZB-V: ZB-V whose unit is a slice of a sequence; backwards take the last slice first.

    ZB-V's closed form (Qi et al., arXiv 2401.10241, section 6) with n-1 further forwards of both
    chunks before the first backward (Sun et al., Seq1F1B, arXiv 2406.03488). Below 2p-2+n units
    Ws come wherever a rank would wait, as in ZB-V below 2p-1 microbatches. The same as `zb-v` with
    `--slices n`.

        >>> print(grid(seq_zb_v(2, 2, num_slices=2), width=76))
        rank 0   0F0    0F0.1  0F1    3F0    0F1.1  3F0.1  3B0.1  3W0.1  3F1…
        rank 1   1F0    2F0    1F0.1  2F0.1  1F1    2F1    2B0.1  2W0.1  1F1.1…

    - Bubble where F=B=W: 0 within each rank's window for mn >= 2p-2+n; makespan (p-1)/(2n) longer.
    - Peak memory: (p+n-1)/n activations on every rank, beside keys and values.
    """
    p, n, units = num_ranks, num_slices, num_microbatches * num_slices
    orders = (closed_form(p, units, rank, ahead=n - 1) for rank in range(p))
    schedule = cut(Schedule.of('seq-zb-v', Placement.v(p), units, orders), n)
    return schedule if units >= 2 * p - 2 + n else filled(schedule, memory_limit=(p + n - 1) / n)


def _groups(num_ranks: int, num_microbatches: int, num_slices: int) -> Sequence[int]:
    """Return sizes of groups in units: of whole microbatches, and p units or more."""
    least = -(-num_ranks // num_slices)
    return [num_slices * size for size in even_groups(num_microbatches, least)]


def seq1f1b_interleaved(
    num_ranks: int, num_microbatches: int, num_chunks: int = 2, num_slices: int = SLICES
) -> Schedule:
    """Seq1F1B-I: interleaved 1F1B whose unit is a slice of a sequence.

    Sun et al., Seq1F1B, arXiv 2406.03488; with n >= p the order that SlimPipe (arXiv 2504.14519)
    describes. Units go chunk by chunk in groups of whole microbatches, of p units or more: so no
    n deadlocks, whether it divides p or not. The same as `interleaved` with `--slices n`.

        >>> print(grid(seq1f1b_interleaved(2, 2, num_slices=2), width=76))
        rank 0   0F0     0F0.1   2F0     2F0.1   0F1     0F1.1   2BW0.1  2F1…
        rank 1   1F0     1F0.1   3F0     3F0.1   3BW0.1  1F1     3BW0    1F1.1…

    - Bubble: (p-1)(F+B+W)/(nv) for mn >= p, where slices take equal times.
    - Peak memory: ((v-1)g + n + 2(p-1))/(nv) activations on rank 0 for groups of up to g units,
      beside keys and values: 1 + 2(p-1)/(nv) for n >= p.
    """
    groups = _groups(num_ranks, num_microbatches, num_slices)
    units = in_groups(num_ranks, num_chunks, groups)
    return replace(by_rule(units, num_slices), name='seq1f1b-interleaved')
