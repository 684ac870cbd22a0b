"""Small pipelines in which something happens to one rank in the middle of its schedule.

    python mishaps.py FOLDER/cases.json > ended.json

A process of its own, which has torch in memory and no threads: its ranks are forks, quick to make.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from contextlib import contextmanager, nullcontext
from pathlib import Path

import sympy  # noqa: F401  torch's first backward imports it, in each rank, and slowly
import torch
import torch.distributed as dist
from programs import pairs
from stages import ROWS, WIDTH, LinearStage

from devtools import nccl
from megatron_zbpp.analysis.lowering import lower
from megatron_zbpp.ir import B, Pass
from megatron_zbpp.runtime.activations.store import ActivationStore
from megatron_zbpp.runtime.channels import Channels, Message
from megatron_zbpp.runtime.clock import HostClock
from megatron_zbpp.runtime.executor import Executor
from megatron_zbpp.runtime.guard.watchdog import Watchdog
from megatron_zbpp.runtime.weight_grads import WeightGradStore
from megatron_zbpp.schedules import build

SETTLED = 1.0  # seconds before a mishap
LIMIT = 60  # seconds for the cases that run at once, on a busy machine
AT_ONCE = 6


class UnluckyStage(LinearStage):
    """The pass `victim` does not end well."""

    def __init__(self, store, stage, num_stages, victim, case):
        super().__init__(store, stage, num_stages)
        self.victim, self.case = victim, case

    def forward(self, p, received):
        output = super().forward(p, received)
        return self.befall(p, output)

    def backward(self, p, received, output, gradient):
        made = super().backward(p, received, output, gradient)
        return self.befall(p._replace(kind=B), made)

    def befall(self, p, made):
        if p != self.victim:
            return made
        time.sleep(SETTLED)  # by now the other ranks have come as far as they can
        Path(f'{self.case["folder"]}/mishap').write_text(str(time.monotonic()))
        mishap = self.case['mishap']
        if mishap.startswith('SIG'):
            os.kill(os.getpid(), signal.Signals[mishap])
        elif mishap == 'exception':
            raise RuntimeError('out of luck')
        elif mishap == 'wrong shape':
            return made[:-1]
        elif mishap == 'wrong type':
            return made.double()
        elif mishap == 'slow':
            time.sleep(0.5 * self.case['timeout'])
        else:
            time.sleep(2 * LIMIT)  # 'stuck'
        return made


def common_store(file, rank, size):
    """Rank 0 serves it, on a port that is free, and writes that down."""
    if rank == 0:
        store = dist.TCPStore('127.0.0.1', 0, size, is_master=True, wait_for_workers=False)
        file.with_suffix('.part').write_text(str(store.port))
        file.with_suffix('.part').rename(file)
        return store
    while not file.exists():
        time.sleep(0.01)
    return dist.TCPStore('127.0.0.1', int(file.read_text()), size, is_master=False)


def run(case, rank):
    """One rank of `case`, to its end."""
    store = common_store(Path(case['folder'], 'port'), rank, case['ranks'])
    dist.init_process_group('gloo', store=store, rank=rank, world_size=case['ranks'])
    schedule = build(case['schedule'], case['ranks'], case['microbatches'])
    programs = lower(schedule)
    watchdog = Watchdog(case['timeout'])
    with blocking(case) if case.get('blocks') else nullcontext(dist.group.WORLD) as group:
        channels = Channels(group, pairs(programs), torch.device('cpu'))
        try:
            iterate(case, rank, schedule, programs, channels, watchdog)
            dist.barrier()  # as an optimizer's step does
        finally:
            watchdog.stop()


@contextmanager
def blocking(case):
    """A group that blocks as NCCL's do: who talks to a rank that is dead hears nothing of it.

    What carries its messages is nobody's of the ranks, as a network is not.
    """
    with nccl.Device(patience=LIMIT) as device:
        network = common_store(Path(case['folder'], 'network'), -1, case['ranks'])
        device.store = dist.PrefixStore('nccl', network)
        yield dist.new_group(backend=nccl.NAME)


def serve(case):
    """The process that carries the messages of `blocking`."""
    pid = os.fork()
    if not pid:
        store = common_store(Path(case['folder'], 'network'), 0, case['ranks'])
        while store:  # until it is killed
            time.sleep(LIMIT)
    return pid


def iterate(case, rank, schedule, programs, channels, watchdog):
    """Three iterations: to warm up, which may take long; to watch; and the one of the mishap."""
    message = Message((ROWS, WIDTH), torch.float32, torch.device('cpu'))
    activations, partners = None, pairs(programs, saved=True)
    if partners:
        activations = ActivationStore(message.device, small=1)
        saving = Channels(dist.group.WORLD, partners, message.device, shapes=True, saved=True)
        activations.join(saving)
    for iteration in range(3):
        store = WeightGradStore()
        victim = Pass.parse(case['pass']) if iteration == 2 else None
        stages = {
            stage: UnluckyStage(store, stage, schedule.num_stages, victim, case)
            for stage in schedule.placement.stages(rank)
        }
        executor = Executor(
            programs[rank],
            stages,
            channels,
            message,
            store,
            HostClock(),
            activations=activations,
        )
        with watchdog.passes(executor) if iteration else nullcontext():
            executor.run()
        if iteration == 0:
            dist.barrier()
        elif iteration == 1:
            time.sleep(case.get('pause', 0))


def fork(case, rank):
    """The process of one rank; what it says goes to a file."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.dup2(os.open(f'{case["folder"]}/{rank}', os.O_WRONLY | os.O_CREAT), 2)
        run(case, rank)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def run_all(cases, indices):
    """Those `cases` at once; exit code and time of end by (case, rank), for those that ended."""
    running, servers = {}, []
    for index in indices:
        if cases[index].get('blocks'):
            servers.append(serve(cases[index]))
        ranks = range(cases[index]['ranks'])
        running |= {fork(cases[index], rank): (index, rank) for rank in ranks}
    ended = {}
    deadline = time.monotonic() + LIMIT
    stopped = sum(cases[index]['mishap'] == 'SIGSTOP' for index in indices)
    while len(running) > stopped and time.monotonic() < deadline:
        for pid in list(running):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                ended[running.pop(pid)] = os.waitstatus_to_exitcode(status), time.monotonic()
        time.sleep(0.01)
    for pid in [*running, *servers]:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return ended


def main() -> None:
    os.environ['GLOO_SOCKET_IFNAME'] = 'lo'
    torch.set_num_threads(1)
    path = Path(sys.argv[1])
    cases = json.loads(path.read_text())
    for index, case in enumerate(cases):
        case['folder'] = f'{path.parent}/{index}'
        os.mkdir(case['folder'])
    ended = {}
    for first in range(0, len(cases), AT_ONCE):
        ended |= run_all(cases, range(first, min(first + AT_ONCE, len(cases))))
    results = []
    for index, case in enumerate(cases):
        mishap = float(Path(case['folder'], 'mishap').read_text())
        ranks = []
        for rank in range(case['ranks']):
            code, at = ended.get((index, rank), (None, None))
            said = Path(case['folder'], str(rank)).read_text()
            ranks.append({'code': code, 'seconds': at and at - mishap, 'said': said})
        results.append(ranks)
    json.dump(results, sys.stdout)


if __name__ == '__main__':
    main()
