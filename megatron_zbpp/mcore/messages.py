"""Messages to the user of a run."""

from __future__ import annotations

import sys

import torch.distributed as dist


def say(message: str) -> None:
    """Print a message, once for all ranks."""
    if dist.get_rank() == 0:
        print(f'megatron_zbpp: {message}', file=sys.stderr, flush=True)
