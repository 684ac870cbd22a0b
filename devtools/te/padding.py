"""Rows added: to an expert's tokens for FP8's products, to packed sequences for a batch of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from devtools.te.extension import kernel


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


@kernel
def convert_thd_to_bshd(
    packed: torch.Tensor, ends: torch.Tensor, batch: int, longest: int
) -> torch.Tensor:
    """Return [batch, longest, ...] of sequences that follow each other; zeros behind each."""
    out = packed.new_zeros((batch, longest, *packed.shape[1:]))
    _copy_parts(packed.split(ends.diff().tolist()), out.unbind())
    return out


@kernel
def convert_bshd_to_thd(padded: torch.Tensor, ends: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return [tokens, ...], the upper rows of each sequence behind each other."""
    out = padded.new_empty((tokens, *padded.shape[2:]))
    _copy_parts(padded.unbind(), out.split(ends.diff().tolist()))
    return out


def _copy_parts(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        rows = min(len(source), len(target))
        target[:rows] = source[:rows]
