"""Limits of a side task: random states are put back, memory of its steps is counted."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron_zbpp.guests.measurements import USABLE
from megatron_zbpp.runtime.clock import never_needed


def on_cuda() -> bool:
    """Return whether this process computes on a GPU."""
    return torch.cuda.is_initialized()


@contextmanager
def kept_random_states() -> Iterator[None]:
    """Leave random numbers of Python, numpy, and torch's host and device as they would have been.

    What Megatron keeps in states of its own is for who knows Megatron to put back.
    """
    numpy = sys.modules.get('numpy')
    own, host = random.getstate(), torch.get_rng_state()
    numbers = None if numpy is None else numpy.random.get_state()
    device = torch.cuda.get_rng_state() if on_cuda() else None
    try:
        yield
    finally:
        random.setstate(own)
        torch.set_rng_state(host)
        if numpy is not None:
            numpy.random.set_state(numbers)
        if device is not None:
            torch.cuda.set_rng_state(device)


class MemoryBudget:
    """Bytes of the device that steps may take; counted on a GPU only.

    Args:
        most: bytes; None: of what was never needed before the first step, the usable share.

    Attributes:
        most: the same, once it is known.
        held: by what steps have left allocated.
        peak: the most that a step went beyond what was ever allocated before it.
    """

    def __init__(self, most: int | None) -> None:
        self.most, self.held, self.peak = most, 0, 0

    @property
    def exceeded(self) -> bool:
        """True once steps have taken more than they may."""
        return self.most is not None and max(self.held, self.peak) > self.most

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what is allocated within."""
        if not on_cuda():
            yield
            return
        if self.most is None:
            self.most = int(USABLE * never_needed())
        before, highest = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        try:
            yield
        finally:
            self.held += torch.cuda.memory_allocated() - before
            self.peak = max(self.peak, torch.cuda.max_memory_allocated() - highest)

    def __str__(self) -> str:
        most = 0 if self.most is None else self.most
        return f'{max(self.held, self.peak) / 2**20:.0f} MiB of {most / 2**20:.0f} MiB'
