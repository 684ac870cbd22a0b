"""The key of what a forward leaves for the passes behind it."""

from __future__ import annotations

from megatron_zbpp.ir import Pass

Key = tuple[int, int, int]  # (stage, microbatch, slice)


def key_of(p: Pass) -> Key:
    """Return the key of what `p` leaves, or takes."""
    return p.stage, p.microbatch, p.slice
