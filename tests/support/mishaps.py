"""Small pipelines in which something happens to one rank in the middle of its schedule.

    python mishaps.py FOLDER/cases.json > ended.json

Processes that have torch in memory and no threads: their ranks are forks, quick to make.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import sympy  # noqa: F401  torch's first backward imports it, in each rank, and slowly
import torch
import torch.distributed as dist
from stages import LinearStage, Pipeline

from devtools import nccl
from megatron_zbpp.ir import B, Pass
from megatron_zbpp.runtime.guard import culprit, watchdog, watchdog_for
from megatron_zbpp.schedules import build

SETTLED = 0.5  # seconds for which the others' threads sleep before a mishap
LIMIT = 100  # seconds for a case, on a busy machine
AT_ONCE = 6
# as long as ranks may take to answer on a busy machine
culprit._ANSWER, culprit._PATIENCE = 2, 30
watchdog._LAST_WORDS, watchdog._PEER_LOSS_GRACE_S = 40, 10


class UnluckyStage(LinearStage):
    def __init__(self, *args, victim, case):
        super().__init__(*args)
        self.victim, self.case = victim, case

    def forward(self, p, received):
        output = super().forward(p, received)
        return self.befall(p, output)

    def backward(self, p, received, output, gradient):
        made = super().backward(p, received, output, gradient)
        return self.befall(p._replace(kind=B), made)

    def befall(self, p, made):
        folder, rank = Path(self.case['folder']), str(dist.get_rank())
        folder.joinpath(f'latest {rank}').write_text(str(time.monotonic()))
        if p != self.victim:
            return made
        settle([int(file.name[4:]) for file in folder.glob('pid *') if file.read_text() != rank])
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


def settle(pids):
    """Wait until other ranks have come as far as they can: their main threads sleep, and go on."""
    seen, since = {}, time.monotonic()
    while time.monotonic() < since + SETTLED:
        now = {pid: Path(f'/proc/{pid}/status').read_text() for pid in pids}
        still = {
            pid: [line for line in text.splitlines() if 'State' in line or 'ctxt' in line]
            for pid, text in now.items()
        }
        if still != seen or any('sleeping' not in text for text in now.values()):
            seen, since = still, time.monotonic()
        time.sleep(0.01)


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
    Path(case['folder'], f'pid {os.getpid()}').write_text(str(rank))
    store = common_store(Path(case['folder'], 'port'), rank, case['ranks'])
    dist.init_process_group('gloo', store=store, rank=rank, world_size=case['ranks'])
    schedule = build(case['schedule'], case['ranks'], case['microbatches'])
    watchdog = watchdog_for(case['timeout'])
    with blocking(case) if case.get('blocks') else nullcontext(dist.group.WORLD) as group:
        pipeline = Pipeline(schedule, group)
        try:
            iterate(case, pipeline, watchdog)
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
    pid = os.fork()
    if not pid:
        store = common_store(Path(case['folder'], 'network'), 0, case['ranks'])
        while store:  # until it is killed
            time.sleep(LIMIT)
    return pid


def iterate(case, pipeline, watchdog):
    """Three iterations: to warm up, which may take long; to watch; and the one of the mishap."""
    for iteration in range(3):
        victim = Pass.parse(case['pass']) if iteration == 2 else None
        pipeline.stage_class = partial(UnluckyStage, victim=victim, case=case)
        executor = pipeline.executor()
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


def outcome(case):
    """By rank: its exit code if it ended by itself, seconds since its last pass, what it said."""
    os.mkdir(case['folder'])
    servers = [serve(case)] if case.get('blocks') else []
    running = {rank: fork(case, rank) for rank in range(case['ranks'])}
    until, ended, found = time.monotonic() + LIMIT, {}, []
    while len(running) > (case['mishap'] == 'SIGSTOP') and time.monotonic() < until:
        for rank, pid in [*running.items()]:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del running[rank]
                ended[rank] = os.waitstatus_to_exitcode(status), time.monotonic()
        time.sleep(0.01)
    for pid in [*running.values(), *servers]:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    for rank in range(case['ranks']):
        code, at = ended.get(rank, (None, 0))
        latest, said = (Path(case['folder'], name) for name in (f'latest {rank}', str(rank)))
        still = at - float(latest.read_text())
        found.append({'code': code, 'still': still, 'said': said.read_text()})
    return found


def main() -> None:
    os.environ['GLOO_SOCKET_IFNAME'] = 'lo'
    torch.set_num_threads(1)
    path = Path(sys.argv[1])
    cases = json.loads(path.read_text())
    for index, case in enumerate(cases):
        case['folder'] = f'{path.parent}/{index}'
    with multiprocessing.get_context('fork').Pool(AT_ONCE) as pool:
        json.dump(pool.map(outcome, cases, chunksize=1), sys.stdout)


if __name__ == '__main__':
    main()
