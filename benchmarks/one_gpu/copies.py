"""What copies to the host and back cost: by one stream and by two, beside matrix products.

    python -m benchmarks.one_gpu.copies [--mib 1024]

An offload has a stream for each direction, so that both go at once. Each figure is the median of
seven; the bytes lie in page-locked memory of the host.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch

from benchmarks.one_gpu import REHEARSAL
from benchmarks.one_gpu.spinning import products

SHAPE = (8192, 4096, 4096)


class Copies:
    """As many bytes to the host as come back from it.

    Args:
        nbytes: each way.
        device: that they are copied from, and to.
    """

    def __init__(self, nbytes: int, device: str) -> None:
        self._real = device == 'cuda'
        there, here = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
        hosts = [torch.zeros(nbytes, dtype=torch.uint8, pin_memory=self._real) for _ in range(2)]
        self._out, self._back = (hosts[0], there), (here, hosts[1])
        self._streams = [torch.cuda.Stream() for _ in range(2)] if self._real else []

    def out(self) -> None:
        self._copy(self._out, 0)

    def back(self) -> None:
        self._copy(self._back, 0)

    def one_stream(self) -> None:
        """Copy both ways, one after the other."""
        self._copy(self._out, 0)
        self._copy(self._back, 0)

    def two_streams(self) -> None:
        """Copy both ways at once, where the link can."""
        self._copy(self._out, 0)
        self._copy(self._back, 1)

    def _copy(self, pair: tuple[torch.Tensor, torch.Tensor], stream: int) -> None:
        to, source = pair
        if not self._real:
            to.copy_(source)
            return
        with torch.cuda.stream(self._streams[stream]):
            to.copy_(source, non_blocking=True)


def seconds(run: Callable[[], None], beside: Callable[[], None] | None, real: bool) -> float:
    """Return the median time until `run`, and what runs beside it, have ended."""
    taken = []
    for _ in range(7):
        if real:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        if beside is not None:
            beside()
        if real:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def main(argv: list[str] | None = None) -> int:
    """Print a table; it has no right or wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--mib', type=int, default=1024, help='each way (default: 1024)')
    args = parser.parse_args(argv)
    if args.mib < 1:
        parser.error(f'--mib {args.mib}: give at least 1')
    real = torch.cuda.is_available()
    device = 'cuda' if real else 'cpu'
    print(torch.cuda.get_device_name() if real else REHEARSAL, flush=True)
    copies = Copies(args.mib << 20, device)
    run = products(SHAPE if real else (64, 64, 64), 20, device)
    print(f'{args.mib} MiB each way; 20 products alone {seconds(run, None, real) * 1e3:.1f} ms')
    for name in ('out', 'back', 'one_stream', 'two_streams'):
        copy = getattr(copies, name)
        alone, beside = seconds(copy, None, real), seconds(copy, run, real)
        words = name.replace('_', ' ')
        print(f'{words}: {alone * 1e3:.1f} ms, with products {beside * 1e3:.1f} ms', flush=True)
    return 0


if __name__ == '__main__':
    sys.exit(main())
