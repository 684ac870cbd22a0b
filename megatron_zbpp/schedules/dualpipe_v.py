"""DualPipeV: DualPipe cut in half, on a V placement."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

from megatron_zbpp.ir import BW, B, F, Pass, Placement, Schedule, W
from megatron_zbpp.schedules.family import TWO, Family


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """DualPipeV: forwards and backwards of opposite directions paired, one direction per chunk.

    DeepSeek's DualPipe (DeepSeek-V3, arXiv 2412.19437) cut in half by Sea AI Lab: the same without
    a second copy of the weights. A pair is here F, then BW: running both at once, to hide an
    expert's all-to-all, takes a model that is written for it. With m < 2p it is the order of 2p
    without the missing microbatches.

    - Bubble where F=B=W, m >= 2p: (p-1)/2, whatever m is. The published formula comes to p-1: that
      is what a pair costs that starts when both its inputs are there, which this F does not await.
    - Peak memory: p + 1/2 activations; at most m.
    - When: with expert parallelism and a model that overlaps the pairs. Otherwise `zb-v` has the
      same makespan, no bubble in its windows and less memory (some unequal times excepted: with a
      heavy last stage this order happens to lose little).
    """
    p, m = num_ranks, num_microbatches
    orders = [
        [x for x in _in_steps(p, max(m, 2 * p), rank) if x.microbatch < m] for rank in range(p)
    ]
    return Schedule.of('dualpipe-v', Placement.v(p), m, orders)


def _in_steps(p: int, m: int, rank: int) -> Iterator[Pass]:
    """One rank's order for m >= 2p, in the eight steps of DualPipe; F0 is a forward of chunk 0."""
    stages = rank, 2 * p - 1 - rank
    done: Counter[tuple[bool, int]] = Counter()  # forwards, and backwards, of each stage
    pending: deque[Pass] = deque()

    def run(times: int, *names: str) -> Iterator[Pass]:
        for name in names * times:
            if name == W:
                yield pending.popleft()
                continue
            kind, stage = name[:-1], stages[int(name[-1])]
            x = Pass(kind, stage, done[kind == F, stage])
            done[kind == F, stage] += 1
            if kind == B:
                pending.append(x._replace(kind=W))
            yield x

    below = p - 1 - rank  # ranks further down the V
    yield from run(2 * below, 'F0')
    yield from run(rank + 1, 'F0', 'F1')
    yield from run(below, 'B1', 'W', 'F1')
    yield from run(m - 2 * p + rank + 1, 'F0', 'BW1', 'F1', 'BW0')
    yield from run(below, 'BW1', 'F1', 'BW0')
    last = ['1', '0'] * (rank + 1)  # the first half of these is fused, the second split
    yield from run(1, *(BW + chunk for chunk in last[: rank + 1]))
    yield from run(1, *(B + chunk for chunk in last[rank + 1 :]))
    yield from run(below, 'W', 'B0')
    yield from run(len(pending), 'W')


FAMILY = Family(
    name='dualpipe-v',
    generate=dualpipe_v,
    summary='forwards and backwards paired to overlap expert parallelism, on a V placement',
    bubble='(p-1)/2 (F=B=W=1)',
    memory='p + 1/2',
    source='DualPipe, github.com/deepseek-ai/DualPipe; DeepSeek-V3, arXiv 2412.19437',
    aliases=('ScheduleDualPipeV',),
    chunks=TWO,
    default_chunks=2,
    min_ranks=2,
)
