"""What a step that is validated later costs beside a synchronous one, and how much memory it takes.

    python scripts/benchmark_step.py --parameters 20 [--layers 24] [--device cuda]

The step is tried, and stands. Parameters whose old state is kept have taken it then, the others
take it again: rows with nothing kept, with as much as post-validation keeps on a CPU, and with
all, as on a GPU that has the memory. Times are medians of steps that take turns; on a CPU, of the
time of one core, whatever else it does.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch

from megatron_zbpp.emulation import cpu
from megatron_zbpp.post_validation.speculative_step import (
    BUFFER_BYTES,
    KEPT_BYTES,
    SpeculativeStep,
    Stepped,
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--parameters', type=float, default=20, help='in millions')
    parser.add_argument('--layers', type=int, default=24, help='tensors that they are in')
    parser.add_argument('--rounds', type=int, default=7)
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    args = parser.parse_args()
    if args.parameters <= 0 or args.layers < 1 or args.rounds < 1:
        parser.error('--parameters, --layers and --rounds must be positive')
    if args.device == 'cpu':
        cpu.install()  # as in training: memory stays with the process
        torch.set_num_threads(1)
    size = int(args.parameters * 1e6 / args.layers)
    print(f'Adam, {args.parameters:g} million parameters in {args.layers} tensors, {args.device}')
    print('model   kept MB  step ms  validated later ms  ratio  set aside MB')
    for name, dtype in (('bf16', torch.bfloat16), ('fp32', None)):
        for row in measure(size, args.layers, dtype, args.rounds, args.device):
            print(
                f'{name:5} {row.kept_bytes / 1e6:9.1f} {row.step * 1e3:8.1f} '
                f'{row.later * 1e3:19.1f} {row.later / row.step:6.2f} {row.peak_bytes / 1e6:13.1f}'
            )
    print(
        f'kept on a CPU: {KEPT_BYTES / 1e6:.0f} MB at most; of what is not, '
        f'{BUFFER_BYTES / 1e6:.0f} MB are set aside at once, or the largest tensor'
    )


class Row(NamedTuple):
    """Of one size of what is kept.

    Attributes:
        kept_bytes, peak_bytes: of `SpeculativeStep`.
        step: median seconds of a synchronous step.
        later: of one that is tried, and then completed.
    """

    kept_bytes: int
    peak_bytes: int
    step: float
    later: float


def measure(
    size: int, layers: int, dtype: torch.dtype | None, rounds: int, device: str
) -> list[Row]:
    """One for nothing kept, one for what post-validation keeps at most on a CPU, one for all.

    Args:
        size: of each tensor.
        layers: how many there are.
        dtype: of the copies that the model reads; None: it reads the parameters themselves.
        rounds: of all, after one that does not count.
        device: where they are.
    """
    own = [torch.randn(size, device=device, requires_grad=True) for _ in range(layers)]
    for parameter in own:
        parameter.grad = torch.randn_like(parameter)
    read = [None if dtype is None else p.detach().to(dtype) for p in own]
    optimizer = torch.optim.Adam(own)
    optimizer.step()

    def timed(function: Callable[[], Any]) -> tuple[float, Any]:
        start = _now(device)
        result = function()
        return _now(device) - start, result

    def later(kept_bytes: int) -> SpeculativeStep:
        speculative = SpeculativeStep(
            optimizer, list(map(Stepped, own, read)), kept_bytes=kept_bytes
        )
        speculative.undo()
        speculative.complete(optimizer.step)
        return speculative

    limits = (0, KEPT_BYTES, 1 << 62)
    steps, laters = [], [[] for _ in limits]
    for _ in range(rounds + 1):
        steps.append(timed(optimizer.step)[0])
        for limit, taken in zip(limits, laters, strict=True):
            taken.append(timed(lambda limit=limit: later(limit)))
    return [
        Row(
            taken[-1][1].kept_bytes,
            taken[-1][1].peak_bytes,
            median(steps[1:]),
            median(seconds for seconds, _ in taken[1:]),
        )
        for taken in laters
    ]


def _now(device: str) -> float:
    """Seconds: of the device, or of this core's work."""
    if device == 'cpu':
        return time.thread_time()
    torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == '__main__':
    main()
