"""What an optimizer step on trial costs beside the step itself, and how much memory it takes.

    python scripts/benchmark_step.py --parameters 20 [--layers 24] [--device cuda]

Post-validation makes two of each step: one on trial, whose time is in the last but one column, and
the true one. Times are medians of steps that take turns.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch

from megatron_zbpp.optim.trial import BUFFER_BYTES, Stepped, Trial


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
    size = int(args.parameters * 1e6 / args.layers)
    print(f'Adam, {args.parameters:g} million parameters in {args.layers} tensors, {args.device}')
    print('model  step ms  on trial ms  ratio  set aside MB')
    for name, dtype in (('bf16', torch.bfloat16), ('fp32', None)):
        step, trial, peak = measure(size, args.layers, dtype, args.rounds, args.device)
        print(
            f'{name:5} {step * 1e3:8.1f} {trial * 1e3:12.1f} {trial / step:6.2f} {peak / 1e6:13.1f}'
        )
    print(f'buffer: {BUFFER_BYTES / 1e6:.0f} MB at most, if no tensor takes more')


def measure(
    size: int, layers: int, dtype: torch.dtype | None, rounds: int, device: str
) -> tuple[float, float, int]:
    """Median seconds of a step and of one on trial, and the bytes that the latter set aside.

    Args:
        size: of each tensor.
        layers: how many there are.
        dtype: of the copies that the model reads; None: it reads the parameters themselves.
        rounds: of both.
        device: where they are.
    """
    own = [torch.randn(size, device=device, requires_grad=True) for _ in range(layers)]
    for parameter in own:
        parameter.grad = torch.randn_like(parameter)
    read = [None if dtype is None else p.detach().to(dtype) for p in own]
    optimizer = torch.optim.Adam(own)
    optimizer.step()
    steps, trials, peak = [], [], 0

    def now() -> float:
        if device != 'cpu':
            torch.cuda.synchronize()
        return time.perf_counter()

    for _ in range(rounds):
        start = now()
        trial = Trial(optimizer, list(map(Stepped, own, read)))
        trials.append(now() - start)
        trial.undo()
        peak = trial.peak_bytes
        start = now()
        optimizer.step()
        steps.append(now() - start)
    return median(steps), median(trials), peak


if __name__ == '__main__':
    main()
