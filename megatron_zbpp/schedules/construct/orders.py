"""The orders that most families are made of: 1F1B with a whole backward, and with a split one."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_zbpp.ir import Phase
from megatron_zbpp.schedules.construct.phases import phases


def one_forward_one_backward(
    stages: Sequence[int], groups: Sequence[int], ahead: int
) -> list[Phase]:
    """Return a rank's order of 1F1B: a warm-up, F and BW by turns, and the backwards left.

        >>> for label, passes in one_forward_one_backward([0, 2], groups=[2], ahead=1):
        ...     print(f'{label:10}', *passes)
        warm-up    0F0 0F1 2F0
        steady     2F1 2BW0
        cool-down  2BW1 0BW0 0BW1

    Args:
        stages: of the rank, in model order.
        groups: sizes of the groups in which microbatches go chunk by chunk, the largest first.
        ahead: forwards in the warm-up beyond those of all chunks but the last.
    """
    warmup, count = _sizes(stages, groups, ahead)
    table = [
        (warmup, 'F', 'warm-up'),
        (count - warmup, 'F BW', 'steady'),
        (warmup, 'BW', 'cool-down'),
    ]
    return phases(stages, sum(groups), table, groups)


def split_one_forward_one_backward(
    stages: Sequence[int], groups: Sequence[int], ahead: int, defer: int
) -> list[Phase]:
    """Return a rank's order of 1F1B with B and W, where W follows B once `defer` others wait.

        >>> for label, passes in split_one_forward_one_backward([0], [4], ahead=1, defer=1):
        ...     print(f'{label:10}', *passes)
        warm-up    0F0
        W deferred 0F1 0B0
        steady     0F2 0B1 0W0 0F3 0B2 0W1
        cool-down  0B3 0W2
        W left     0W3

    Args:
        stages: of the rank, in model order.
        groups: sizes of the groups in which microbatches go chunk by chunk, the largest first.
        ahead: forwards in the warm-up beyond those of all chunks but the last.
        defer: Bs that have no W yet when W begins.
    """
    warmup, count = _sizes(stages, groups, ahead)
    table = [
        (warmup, 'F', 'warm-up'),
        (defer, 'F B', 'W deferred'),
        (count - warmup - defer, 'F B W', 'steady'),
        (warmup, 'B W', 'cool-down'),
        (defer, 'W', 'W left'),
    ]
    return phases(stages, sum(groups), table, groups)


def _sizes(stages: Sequence[int], groups: Sequence[int], ahead: int) -> tuple[int, int]:
    """Return forwards in the warm-up, and in all."""
    return (len(stages) - 1) * groups[0] + ahead, len(stages) * sum(groups)
