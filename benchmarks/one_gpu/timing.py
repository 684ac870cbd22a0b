"""Times of what runs alone on a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def milliseconds(run: Callable[[], Any], real: bool) -> float:
    """Return the median of five, after one that does not count."""
    taken = []
    for _ in range(6):
        begin = time.perf_counter()
        run()
        if real:
            torch.cuda.synchronize()
        taken.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(taken[1:])
