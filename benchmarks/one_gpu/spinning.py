"""What receives that spin cost the kernels beside them, and how long a send waits behind a pass.

    python -m benchmarks.one_gpu.spinning

NCCL's receive is a kernel of a few thread blocks that spins until data comes: one thread of a block
reads a flag, the others wait for it. Here a kernel of our own does so, on a flag in the device's
memory (as between GPUs of a node) and in the host's (as by a network): matrix products are timed
with 0 to 16 such blocks beside them. Then a kernel as small as a send becomes ready between
products that are queued: how long until it ends, on a stream of normal and of high priority.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable

import torch

from benchmarks.one_gpu import REHEARSAL

BLOCKS = (0, 1, 2, 4, 8, 16)
SHAPES = ((4096, 4096, 4096), (4096, 4096, 1536), (2048, 12288, 6144), (8192, 8192, 1024))
THREADS, SHARED = 544, 40 << 10  # of a block, about as NCCL's
SOURCE = """
extern "C" __global__ void spin(volatile int* flag) {
    extern __shared__ char shared[];
    if (threadIdx.x == 0) while (*flag == 0) {}
    __syncthreads();
    if (*flag == 7) shared[0] = 1;
}
"""


class Spinner:
    """A kernel that runs until it is told to end.

    Args:
        memory: where its flag is, the device's or the host's.
    """

    def __init__(self, memory: str) -> None:
        self._kernel = torch.cuda._compile_kernel(SOURCE, 'spin')
        flag = torch.zeros(1, dtype=torch.int32)
        self._flag = flag.pin_memory() if memory == 'host' else flag.cuda()
        self._teller = torch.cuda.Stream()

    def start(self, blocks: int, stream: torch.cuda.Stream) -> None:
        """Begin to spin; none of the blocks ends before `end`."""
        self._tell(0)
        self.launch(blocks, stream)

    def launch(self, blocks: int, stream: torch.cuda.Stream) -> None:
        """Launch the kernel; it ends at once where it has been told to."""
        self._kernel((blocks, 1, 1), (THREADS, 1, 1), [self._flag], SHARED, stream)

    def end(self) -> None:
        """Let all blocks end."""
        self._tell(1)

    def _tell(self, value: int) -> None:
        """Write the flag behind nothing that is queued: a kernel that would write it could wait."""
        with torch.cuda.stream(self._teller):
            self._flag.copy_(torch.tensor([value], dtype=torch.int32).pin_memory())
        self._teller.synchronize()


def products(shape: tuple[int, int, int], count: int, device: str) -> Callable[[], None]:
    """Return what runs `count` matrix products of (m, k) and (k, n)."""
    m, k, n = shape
    dtype = torch.bfloat16
    a, b = (
        torch.randn(m, k, device=device, dtype=dtype),
        torch.randn(k, n, device=device, dtype=dtype),
    )
    out = torch.empty(m, n, device=device, dtype=dtype)

    def run() -> None:
        for _ in range(count):
            torch.matmul(a, b, out=out)

    return run


def milliseconds(run: Callable[[], None], spinner: Spinner, blocks: int) -> float:
    """Return the median time of `run` beside so many spinning blocks."""
    side, taken = torch.cuda.Stream(), []
    for _ in range(7):
        torch.cuda.synchronize()
        if blocks:
            spinner.start(blocks, side)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in '12')
        begin.record()
        run()
        end.record()
        end.synchronize()
        spinner.end()
        taken.append(begin.elapsed_time(end))
    torch.cuda.synchronize()
    return statistics.median(taken[2:])


def slowed(spinner: Spinner, shape: tuple[int, int, int]) -> str:
    """Return a line on products of this shape alone, and beside 1 to 16 blocks."""
    run = products(shape, 20, 'cuda')
    run()
    found = [milliseconds(run, spinner, blocks) for blocks in BLOCKS]
    beside = (
        f'{blocks} {taken / found[0] - 1:+.1%}'
        for blocks, taken in zip(BLOCKS[1:], found[1:], strict=True)
    )
    size = ' x '.join(map(str, shape))
    return f'{size}: {found[0] / 20 * 1e3:.0f} us; beside {", ".join(beside)}'


def wait_of_a_send(spinner: Spinner, priority: int) -> list[float]:
    """Return microseconds from the end of a pass to that of a send behind it, sorted."""
    side, taken = torch.cuda.Stream(priority=priority), []
    run = products((8192, 4096, 4096), 8, 'cuda')
    spinner.end()  # the kernel ends as soon as it runs
    for _ in range(9):
        torch.cuda.synchronize()
        ready, ended = (torch.cuda.Event(enable_timing=True) for _ in '12')
        run()
        ready.record()
        run()
        side.wait_event(ready)
        spinner.launch(4, side)
        ended.record(side)
        torch.cuda.synchronize()
        taken.append(ready.elapsed_time(ended) * 1e3)
    return sorted(taken)


def main() -> int:
    """Print a table; it has no right or wrong."""
    real = torch.cuda.is_available()
    device = 'cuda' if real else 'cpu'
    print(torch.cuda.get_device_name() if real else REHEARSAL, flush=True)
    if not real:
        products((64, 64, 64), 20, device)()
        print('64 x 64 x 64: ran; nothing spins here, so nothing is timed')
        return 0
    for memory in ('device', 'host'):
        spinner = Spinner(memory)
        print(f"beside blocks that read a flag in the {memory}'s memory:", flush=True)
        for shape in SHAPES:
            print(slowed(spinner, shape), flush=True)
    for priority in (0, -1):
        taken = wait_of_a_send(spinner, priority)
        print(
            f'priority {priority}: a send of 4 blocks ends {taken[len(taken) // 2]:.0f} us after '
            f'its pass (least {taken[0]:.0f}, most {taken[-1]:.0f})',
            flush=True,
        )
    return 0


if __name__ == '__main__':
    sys.exit(main())
