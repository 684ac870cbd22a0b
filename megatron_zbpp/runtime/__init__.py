"""Runs programs of passes on torch. Knows no Megatron.

Settings of messages stand here, which need no torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MessageKernels:
    """The kernels by which NCCL carries messages between stages."""

    # most thread blocks of a send or a receive, which spins until its message comes: each takes a
    # processor of the GPU from passes that run meanwhile
    ctas: int = 2
    # whether they start before kernels of passes that are queued at the same time; else as those of
    # the pipeline's group
    high_priority: bool = True
