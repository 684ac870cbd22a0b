"""Does a gradient reduction on DistributedDataParallel's stream wait for the W that computes it?

    python -m benchmarks.one_gpu.ddp_race

NVIDIA's loop builds DistributedDataParallel on a side stream, so its hooks run there. Here W is the
store's own, with a slow kernel that adds to `main_grad`; the hook reads `main_grad` on its stream,
as NCCL would. With None for a gradient (as before 0.1.0) it reads too early; with a dummy it waits.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.one_gpu import REHEARSAL
from megatron_zbpp.runtime.weight_grads import WeightGradStore

ROWS, CYCLES = 1024, 30_000_000  # of the kernel that W waits for: some 20 ms


def streams(device: torch.device) -> Any:
    """Return the functions of torch.cuda that are used; on a CPU, such that order nothing."""
    if device.type == 'cuda':
        return torch.cuda
    stream = SimpleNamespace(wait_stream=lambda other: None)
    return SimpleNamespace(
        Stream=lambda: stream,
        current_stream=lambda: stream,
        stream=lambda chosen: nullcontext(),
        synchronize=lambda: None,
        _sleep=lambda cycles: None,
    )


def reduced(device: torch.device, defined: bool, side: bool) -> float:
    """Return what the hook read of a gradient of ones: 1 where it waited for W.

    Args:
        device: of the weight.
        defined: whether W hands autograd a dummy, or None and a stand-in in `.grad`.
        side: whether the weight's AccumulateGrad is made on a side stream.
    """
    cuda = streams(device)
    weight = torch.nn.Parameter(torch.ones(ROWS, ROWS, device=device, dtype=torch.bfloat16))
    main_grad = torch.zeros(ROWS, ROWS, device=device)
    stand_in = torch.zeros((), device=device, dtype=torch.bfloat16).expand(ROWS, ROWS)
    seen = torch.full_like(main_grad, -1)
    stream = cuda.Stream() if side else cuda.current_stream()
    stream.wait_stream(cuda.current_stream())
    with cuda.stream(stream):
        node: Any = weight.expand_as(weight).grad_fn.next_functions[0][0]

    def reduce(*_: object) -> None:
        seen.copy_(main_grad)  # on the stream of the node, which nothing else orders
        weight.grad = None

    def compute() -> list[torch.Tensor | None]:
        cuda._sleep(CYCLES)
        main_grad.add_(1)
        if defined:
            return [torch.empty_like(weight)]
        weight.grad = stand_in
        return [None]

    node.register_hook(reduce)
    cuda.current_stream().wait_stream(stream)
    store = WeightGradStore()
    store.open((0, 0))
    with store.scope((0, 0)):
        store.defer([weight], compute)
    cuda.synchronize()
    store.run((0, 0))
    cuda.synchronize()
    return seen.mean().item()


def main() -> int:
    """Print what each case reads; return 0 if the cure waits, and on a GPU the defect does not."""
    real = torch.cuda.is_available()
    device = torch.device('cuda' if real else 'cpu')
    print(f'torch {torch.__version__}', torch.cuda.get_device_name() if real else REHEARSAL)
    right = True
    for defined in (False, True):
        for side in (False, True):
            value = reduced(device, defined, side)
            races = real and side and not defined
            as_expected = (value == 1) != races
            right &= as_expected
            print(
                f'W returns {"a dummy" if defined else "None":7}, '
                f'{"side" if side else "same"} stream: reduced {value:.2f}, '
                f'{"too early expected" if races else "1.00 expected"}'
                f'{"" if as_expected else ": NOT AS EXPECTED"}',
                flush=True,
            )
    return 0 if right else 1


if __name__ == '__main__':
    sys.exit(main())
