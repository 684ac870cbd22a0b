"""Runs each job in processes of its own, one a rank: whatever becomes of them, the sweep goes on.

A process that has run out of GPU memory keeps its fragments and its broken communicators; only its
end lets go of them. So what torchrun starts are supervisors, which never touch a device: each
starts its rank's process of a job, and all end theirs when one fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from benchmarks.gpt.jobs import Job
from benchmarks.gpt.worker import PROGRESS, ROW, Row, error_file

_ROOT = Path(__file__).parents[2]
_POLL = 0.1  # seconds
_LOST = timedelta(minutes=10)  # after which a supervisor that says nothing is taken for dead


class Crew:
    """This supervisor among those of all ranks.

    Args:
        logs: folder for what the processes print, a file for each job and rank.
        timeout: seconds that a job may take.

    Attributes:
        rank, world: as torchrun says; 0 of 1 without it.
    """

    def __init__(self, logs: Path, timeout: float) -> None:
        self.rank = int(os.environ.get('RANK', 0))
        self.world = int(os.environ.get('WORLD_SIZE', 1))
        self._logs, self._timeout = logs, timeout
        self._jobs = 0
        self._child: subprocess.Popen | None = None
        if self.world > 1:
            self._store, _, _ = next(dist.rendezvous('env://'))
            self._store = dist.PrefixStore('benchmark_gpt', self._store)
        else:
            self._store = dist.HashStore()
        self._store.set_timeout(_LOST)
        signal.signal(signal.SIGTERM, _ended)  # torchrun's way to say so

    def share(self, value: str) -> str:
        """Return what rank 0 gives, on all ranks."""
        self._jobs += 1
        key = f'{self._jobs}/shared'
        if self.rank == 0:
            self._store.set(key, value)
        return self._store.get(key).decode()

    def run(self, module: str, job: Job, progress: Callable[[str], None]) -> Row:
        """Return the row of `job`, on rank 0; with `error` in place of figures where it failed.

        Args:
            module: that a rank's process runs.
            job: what to measure.
            progress: told what the processes say of themselves.
        """
        port = self.share(str(_free_port()))
        with tempfile.TemporaryDirectory() as folder:
            log = self._logs / f'{job.log}.{self.rank}.log'
            with log.open('w') as output:
                self._child = self._start(module, job, Path(folder), port, output)
                try:
                    self._follow(Path(folder), progress, log)
                finally:
                    self._child.kill()
                    self._child.wait()
            self._wait_for_all()
            if self._store.check([self._failed]):
                return {'error': self._store.get(self._failed).decode()}
            return json.loads((Path(folder) / ROW).read_text()) if self.rank == 0 else {}

    @property
    def _failed(self) -> str:
        """The key of the first error of the job."""
        return f'{self._jobs}/failed'

    def _start(
        self, module: str, job: Job, folder: Path, port: str, output: object
    ) -> subprocess.Popen:
        """Return the process of this rank."""
        command = [sys.executable, '-m', module, json.dumps(job.as_row()), str(folder)]
        # its rendezvous is not torchrun's
        kept = {k: v for k, v in os.environ.items() if not k.startswith('TORCHELASTIC_')}
        path = os.pathsep.join(filter(None, [str(_ROOT), kept.get('PYTHONPATH')]))
        defaults = {'OMP_NUM_THREADS': '1', 'CUDA_DEVICE_MAX_CONNECTIONS': '1'}
        ranks = {'RANK': '0', 'LOCAL_RANK': '0', 'WORLD_SIZE': '1', 'MASTER_ADDR': '127.0.0.1'}
        own = {'MASTER_PORT': port, 'PYTHONPATH': path}
        return subprocess.Popen(
            command,
            env=defaults | ranks | kept | own,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )

    def _follow(self, folder: Path, progress: Callable[[str], None], log: Path) -> None:
        """Return when this rank's process has ended, or the job has failed elsewhere."""
        deadline = time.monotonic() + self._timeout
        said = error_file(folder, self.rank)
        while (status := self._child.poll()) is None:
            if self._store.check([self._failed]):
                return
            if said.exists():
                time.sleep(2 * _POLL)  # a rank ended by a signal is the first to be told of
                self._fail(said.read_text())
                return
            if time.monotonic() > deadline:
                self._fail(f'not done after {self._timeout:g} s (--timeout); see {log}')
                return
            with contextlib.suppress(FileNotFoundError):
                progress((folder / PROGRESS).read_text())
            time.sleep(_POLL)
        if status:
            by = f'ended by signal {-status}' if status < 0 else f'exit status {status}'
            self._fail(f'{by}; see {log}')

    def _fail(self, text: str) -> None:
        """Tell all supervisors, unless another rank was first."""
        self._store.compare_set(self._failed, '', f'rank {self.rank}: {text}')

    def _wait_for_all(self) -> None:
        """Until the processes of all ranks have ended: no device has two jobs."""
        ended, last = f'{self._jobs}/ended', f'{self._jobs}/all'
        if self._store.add(ended, 1) == self.world:
            self._store.set(last, '')
        self._store.wait([last], timedelta(seconds=self._timeout) + _LOST)


def _ended(*_: object) -> None:
    sys.exit(128 + signal.SIGTERM)  # by an exception, so that the process below ends, too


def _free_port() -> int:
    """Return one below those that the system gives to whoever asks for any."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(('', port))
            return port
