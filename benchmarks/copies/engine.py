"""A copy engine without a GPU: copies beside the passes, each as long as its bytes take."""

from __future__ import annotations

import mmap
import queue
import threading
import time
from collections.abc import Sequence

import torch

from megatron_zbpp.runtime.activations.copies import Copies


class SleepingCopies(Copies):
    """A thread sleeps for bytes over bandwidth, one copy after the other, whichever way they go.

    The bytes themselves are copied when a copy begins. On the host they are in memory that is
    shared, so that what a process holds by itself is what its device would.

    Args:
        bandwidth: bytes a second, one way; None: copies take no time.
    """

    def __init__(self, bandwidth: float | None) -> None:
        super().__init__(torch.device('cpu'))
        self._bandwidth = bandwidth
        self._begun: queue.SimpleQueue[tuple[float, threading.Event]] = queue.SimpleQueue()
        threading.Thread(target=self._copy, daemon=True).start()

    def out(self, storages: Sequence[torch.UntypedStorage]) -> tuple[torch.Tensor, object]:
        """As `Copies`; the mark is set when the time of these bytes is over."""
        slab, _ = super().out(storages)
        return slab, self._took(sum(storage.nbytes() for storage in storages))

    def back(self, slab: torch.Tensor, storages: Sequence[torch.UntypedStorage]) -> object:
        """As `Copies`; the mark is set when the time of these bytes is over."""
        super().back(slab, storages)
        return self._took(sum(storage.nbytes() for storage in storages))

    def wait(self, mark: object) -> None:
        """Wait as what computes would; copies of the CPU itself have no mark."""
        if mark is not None:
            assert isinstance(mark, threading.Event)
            mark.wait()

    def _new(self, nbytes: int) -> torch.Tensor:
        return torch.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=torch.uint8)[:nbytes]

    def _took(self, nbytes: int) -> threading.Event:
        done = threading.Event()
        seconds = 0.0 if self._bandwidth is None else nbytes / self._bandwidth
        self._begun.put((seconds, done))
        return done

    def _copy(self) -> None:
        free = 0.0  # when the engine has ended the copy before
        while True:
            seconds, done = self._begun.get()
            free = max(free, time.perf_counter()) + seconds
            time.sleep(max(0.0, free - time.perf_counter()))
            done.set()
