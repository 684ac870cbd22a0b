"""What it costs to notice a program that changes weights between a step and the next iteration.

    python scripts/benchmark_watch.py --hidden 1024 --layers 4 [--tokens 4096]

The linear layers of a pipeline stage run forward and backward, with bias and norm, and are watched
as post-validation does: marks each time; values behind each step of the first ten, and behind each
N-th later. Times are medians; on a CPU, of the time of one core, whatever else it does.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch

import megatron_zbpp

DEVICE = megatron_zbpp.device()  # before megatron.core is imported

from megatron_zbpp.mcore.optimizer.early_steps import EntryState
from megatron_zbpp.mcore.settings import Settings
from megatron_zbpp.post_validation.watch import Watch, Watched
from megatron_zbpp.runtime.compat import unseen_by_autograd

EVERY = Settings().check_interval


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--hidden', type=int, default=1024)
    parser.add_argument('--layers', type=int, default=4, help='of the stage')
    parser.add_argument('--tokens', type=int, default=4096, help='of an iteration, of one replica')
    parser.add_argument('--rounds', type=int, default=5)
    args = parser.parse_args()
    if min(args.hidden, args.layers, args.tokens, args.rounds) < 1:
        parser.error('--hidden, --layers, --tokens and --rounds must be positive')
    if DEVICE.type == 'cpu':
        torch.set_num_threads(1)
    row = measure(args.hidden, args.layers, args.tokens, args.rounds)
    print(f'{row.parameters / 1e6:.1f} million parameters, {args.tokens} tokens, {DEVICE}')
    print(f'iteration              {row.iteration * 1e3:10.2f} ms')
    for name, seconds in (
        ('marks, each step', row.marks),
        ('values, where compared', row.values),
        (f'mean, values each {EVERY}th', row.marks + row.values / EVERY),
    ):
        print(f'{name:23}{seconds * 1e3:10.2f} ms  {seconds / row.iteration:8.3%} of an iteration')


class Row(NamedTuple):
    """Of a stage.

    Attributes:
        parameters: how many there are.
        iteration: seconds of a forward and a backward of all tokens.
        marks: of what is done behind each step.
        values: of what is added where values are compared.
    """

    parameters: int
    iteration: float
    marks: float
    values: float


def measure(hidden: int, layers: int, tokens: int, rounds: int) -> Row:
    """Return medians of so many rounds, after one that does not count."""
    stage = torch.nn.Sequential(*(layer(hidden) for _ in range(layers))).to(DEVICE)
    data = torch.randn(tokens, hidden, device=DEVICE)
    watched = Watched([stage])

    def iteration() -> None:
        stage(data).sum().backward()
        stage.zero_grad(set_to_none=False)  # as DDP's buffers are: there, and zero

    def watch(hashed: bool) -> None:
        watch = Watch(watched, hashed, unseen_by_autograd)
        watch.changes()
        watch.differ()
        EntryState([stage], hashed)

    def timed(function: Callable[[], None]) -> float:
        start = _now()
        function()
        return _now() - start

    times = [
        (timed(iteration), timed(lambda: watch(False)), timed(lambda: watch(True)))
        for _ in range(rounds + 1)
    ]
    whole, marks, both = (median(column) for column in zip(*times[1:], strict=True))
    parameters = sum(p.numel() for p in stage.parameters())
    return Row(parameters, whole, marks, max(0.0, both - marks))


def layer(hidden: int) -> torch.nn.Module:
    """Return the weights of a transformer's layer, without attention itself: less work, if any."""
    return torch.nn.Sequential(
        torch.nn.LayerNorm(hidden),
        torch.nn.Linear(hidden, 3 * hidden),
        torch.nn.Linear(3 * hidden, hidden),
        torch.nn.LayerNorm(hidden),
        torch.nn.Linear(hidden, 4 * hidden),
        torch.nn.GELU(),
        torch.nn.Linear(4 * hidden, hidden),
    )


def _now() -> float:
    """Seconds: of the device, or of this core's work."""
    if DEVICE.type == 'cpu':
        return time.thread_time()
    torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == '__main__':
    main()
