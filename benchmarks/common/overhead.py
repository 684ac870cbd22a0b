"""What the runtime itself costs on each pass: Python on one core, nothing on a device.

The program of one rank runs in one process. Its stages compute nothing, its neighbours are not
there: what it sends is dropped, what it receives is zeros. So nothing is waited for, and all the
CPU time is the runtime's: executor, store, the autograd nodes that W runs through, the times that
are taken down for the log line. Not in it: what Megatron's own steps and a backend's sends and
receives cost. Beside it: how long rank 0 draws one iteration of all ranks for --pipeline-trace-dir.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from tqdm import tqdm

from megatron_zbpp.analysis.lowering import lower
from megatron_zbpp.analysis.program import Send
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.guests.tracing import Tracer
from megatron_zbpp.ir import KINDS, Pass, Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.runtime.channels import Incoming, Message
from megatron_zbpp.runtime.clock import HostClock, Record
from megatron_zbpp.runtime.executor import Executor
from megatron_zbpp.runtime.tables import Tables
from megatron_zbpp.runtime.weight_grads import WeightGradStore
from megatron_zbpp.schedules import build

_MESSAGE = Message((4, 1, 16), torch.float32, torch.device('cpu'))


class _Arrived:
    """The work of a message that is there, or gone."""

    def wait(self) -> None:
        pass


class Nowhere:
    """Channels without a network."""

    leaving = None

    def send(self, tensor: torch.Tensor, send: Send) -> None:
        tensor.detach().contiguous()  # as the real ones do

    def post(self, message: Message, peer: int) -> Incoming:
        tensor = torch.empty(message.shape, dtype=message.dtype, device=message.device)
        return Incoming(tensor, _Arrived())

    def let_go(self) -> None:
        pass

    def finish(self) -> None:
        pass


class IdleStage:
    """A stage that computes nothing and leaves weight gradients that are there already."""

    def __init__(self, store: WeightGradStore, gradients: int) -> None:
        self._store = store
        self._weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(gradients)]
        self._gradient = torch.zeros(1)
        self._output = torch.zeros(_MESSAGE.shape)

    def forward(self, p: Pass, received: torch.Tensor | None) -> torch.Tensor:
        return self._output

    def backward(
        self,
        p: Pass,
        received: torch.Tensor | None,
        output: torch.Tensor,
        gradient: torch.Tensor | None,
    ) -> torch.Tensor:
        if self._store.deferring:
            for weight in self._weights:
                self._store.defer([weight], lambda: [self._gradient])
        return self._output

    def release(self, output: torch.Tensor) -> None:
        pass

    def grad_sync(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext()


def run(tables: Tables, gradients: int) -> Record:
    """One iteration of one rank; a stage leaves so many `gradients` to each W.

    Args:
        tables: of the program: made once, as in a training.
        gradients: so many.
    """
    store = WeightGradStore()
    stages = {s: IdleStage(store, gradients) for s in {p.stage for p in tables.passes}}
    clock = HostClock()
    return Executor(tables.program, stages, Nowhere(), _MESSAGE, store, clock, tables=tables).run()


def cost(tables: Tables, gradients: int, repeats: int) -> float:
    """Median seconds of CPU time for each pass of a program; what making an executor takes too."""
    passes = len(tables.passes)
    run(tables, gradients)
    taken = []
    for _ in tqdm(range(repeats), desc='iterations', leave=False, disable=None):
        start = time.thread_time()
        run(tables, gradients)
        taken.append((time.thread_time() - start) / passes)
    return median(taken)


def spans(record: Record) -> dict[str, list[float]]:
    """Return seconds inside the passes of each kind, on the host's clock."""
    found: dict[str, list[float]] = {}
    for p, (start, end) in zip(record.passes, record.marks, strict=True):
        found.setdefault(p.kind, []).append(end - start)
    return found


def within(record: Record) -> dict[str, float]:
    """Median seconds inside the passes of each kind: what is left of a pass is around it."""
    found = spans(record)
    return {kind: median(found[kind]) for kind in KINDS if kind in found}


def drawing(schedule: Schedule) -> float:
    """Return seconds to draw one iteration of all ranks: tracing does so once."""
    measured = simulate(schedule, Costs.uniform(schedule.placement))
    with TemporaryDirectory() as folder:
        start = time.perf_counter()
        Tracer(Path(folder)).draw(measured)
        return time.perf_counter() - start


def main(argv: Sequence[str] | None = None) -> int:
    """Print the cost of a schedule's passes; the exit status is 1 if it is above the limit."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog='example: python scripts/benchmark_overhead.py --schedules zb-v,1f1b --profile',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add('--schedules', default='1f1b,zb-h1,zb-v', metavar='NAME,...', help='(default: %(default)s)')
    add('--pp', type=int, default=8, metavar='P', help='ranks (default: %(default)s)')
    add('--microbatches', type=int, default=64, metavar='M', help='(default: %(default)s)')
    add('--gradients', type=int, default=4, metavar='N', help='linear layers of a stage: weight '
        'gradients that a B leaves to its W (default: %(default)s)')  # fmt: skip
    add('--repeats', type=int, default=21, help='iterations of each (default: %(default)s)')
    add('--limit-us', type=float, default=150.0, help='for a pass (default: %(default)s)')
    add('--profile', action='store_true', help='also where the time goes, by cProfile')
    add('--json', type=Path, metavar='FILE', help='takes the numbers')
    args = parser.parse_args(argv)
    for flag, value in (('--repeats', args.repeats), ('--gradients', args.gradients)):
        if value < 1:
            parser.error(f'{flag} {value} is too small: give at least 1')
    names = args.schedules.split(',')
    try:
        schedules = {name: build(name, args.pp, args.microbatches) for name in names}
    except ValueError as error:
        parser.error(str(error))
    torch.set_num_threads(1)
    sizes = args.gradients, args.repeats
    # a rank in the middle has neighbours on both sides
    programs = {name: Tables(lower(each)[args.pp // 2]) for name, each in schedules.items()}
    found = {name: 1e6 * cost(tables, *sizes) for name, tables in programs.items()}
    for name, tables in programs.items():
        record = run(tables, args.gradients)
        inside = (f'{kind} {1e6 * t:.0f}' for kind, t in within(record).items())
        trace = f'a trace: {drawing(schedules[name]):.2f} s, once'
        print(f'{name:16} {found[name]:6.1f} µs a pass; inside: {", ".join(inside)}; {trace}')
        if args.profile:
            _profile(tables, args.gradients)
    if args.json:
        args.json.write_text(json.dumps({'us_per_pass': found, 'limit_us': args.limit_us}) + '\n')
    return int(max(found.values()) > args.limit_us)


def _profile(tables: Tables, gradients: int) -> None:
    """Print what took most, of ten iterations."""
    profile = cProfile.Profile()
    for _ in range(10):
        profile.runcall(run, tables, gradients)
    pstats.Stats(profile).sort_stats('tottime').print_stats(14)
