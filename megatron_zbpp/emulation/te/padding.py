"""Rows added to each expert's tokens, whose number FP8's products want to be a multiple."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_zbpp.emulation.te.extension import kernel


@kernel
def fused_multi_row_padding(
    x: torch.Tensor, out: torch.Tensor, splits: Sequence[int], padded_splits: Sequence[int]
) -> None:
    """Put the parts of `x` into those of `out`, which are longer: zeros below each."""
    out.zero_()
    _copy_parts(x.split(list(splits)), out.split(list(padded_splits)))


@kernel
def fused_multi_row_unpadding(
    x: torch.Tensor, out: torch.Tensor, padded_splits: Sequence[int], splits: Sequence[int]
) -> None:
    """Put the upper rows of the parts of `x` into those of `out`, which are shorter."""
    _copy_parts(x.split(list(padded_splits)), out.split(list(splits)))


def _copy_parts(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        rows = min(len(source), len(target))
        target[:rows] = source[:rows]
