"""A SLURM cluster of two nodes on this machine: its own daemons, with a controller on the first."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import hosts

NODES = ('node-a7', 'node-a8')
_PACKAGES = {'sbatch': 'slurm-wlm', 'slurmctld': 'slurm-wlm', 'slurmd': 'slurm-wlm'}
_PACKAGES |= {'munged': 'munge'}
_CONFIGURATION = Path(__file__).with_name('slurm.conf')


def missing() -> str | None:
    """Why there can be no cluster here; None if there can."""
    for program, package in _PACKAGES.items():
        if shutil.which(program) is None:
            return f'there is no {program} (Debian: apt-get install {package})'
    return hosts.missing()


@dataclass(frozen=True)
class Job:
    """One that was submitted."""

    cluster: Cluster  # where it runs
    number: int  # that SLURM gave it
    log: Path  # its output

    def show(self) -> dict[str, str]:
        """What SLURM says of it."""
        words = self.cluster.run('scontrol', '--oneliner', 'show', 'job', self.number).split()
        return {key: value for key, _, value in (word.partition('=') for word in words)}

    @property
    def state(self) -> str:
        return self.show()['JobState']

    def wait(self, until: Callable[[], bool], seconds: float) -> None:
        """Raises AssertionError, with what the job said, where that does not come."""
        deadline = time.monotonic() + seconds
        while not until():
            late = time.monotonic() > deadline
            assert not late, f'not within {seconds} s; {self.show()}\n{self.said()}'
            time.sleep(0.5)

    def wait_for_end(self, seconds: float) -> str:
        """Its last state, once nothing of it runs any more."""
        running = ('PENDING', 'CONFIGURING', 'RUNNING', 'COMPLETING')
        self.wait(lambda: self.state not in running, seconds)
        return self.state

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ''


@dataclass(frozen=True)
class Cluster:
    """Two nodes; commands run on the first."""

    nodes: tuple[hosts.Host, hosts.Host]
    folder: Path

    def run(self, *words: object) -> str:
        """What a command of SLURM printed."""
        return self.nodes[0].run('env', f'SLURM_CONF={self.configuration}', *words)

    @property
    def configuration(self) -> Path:
        return self.folder / 'slurm.conf'

    def submit(
        self, file: Path, folder: Path, *arguments: object, options: tuple = (), **environment: str
    ) -> Job:
        """Submits an sbatch file from `folder`, with options of sbatch and variables of its own."""
        log = self.folder / f'{file.stem}-%j.log'
        command = ['sbatch', '--parsable', f'--output={log}', *options, file, *arguments]
        settings = {'SLURM_CONF': self.configuration, 'OMP_NUM_THREADS': '1', **environment}
        done = subprocess.run(
            self.nodes[0].command(*command, folder=folder),
            env={**os.environ, **{key: str(value) for key, value in settings.items()}},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        number = int(done.stdout)
        return Job(self, number, Path(str(log).replace('%j', str(number))))

    def processes(self, word: str) -> list[str]:
        """Command lines with `word` in them, of all nodes."""
        return [command for node in self.nodes for command in node.processes(word)]


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """A cluster that is ready for jobs; all of its processes end with it."""
    with hosts.pair(NODES, folder) as nodes:
        made = Cluster(nodes, folder)
        settings = {'controller': nodes[0].name, 'folder': folder, 'nodes': ','.join(NODES)}
        made.configuration.write_text(_CONFIGURATION.read_text().format(**settings))
        (folder / 'state').mkdir()
        _start_munge(nodes[0], folder)
        conf = f'SLURM_CONF={made.configuration}'
        nodes[0].run('env', conf, 'slurmctld')
        for node in nodes:
            node.run('env', conf, 'slurmd', '-N', node.name)
        deadline = time.monotonic() + 120
        while made.run('sinfo', '--noheader', '--format=%T %D').split() != ['idle', '2']:
            assert time.monotonic() < deadline, (folder / 'slurmctld.log').read_text()
            time.sleep(0.5)
        yield made


def _start_munge(host: hosts.Host, folder: Path) -> None:
    """By which the daemons know each other; the nodes have files in common."""
    key = folder / 'munge.key'
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    files = {'socket': 'munge', 'pid-file': 'munge.pid', 'log-file': 'munge.log'}
    files |= {'seed-file': 'munge.seed', 'key-file': key.name}
    options = [f'--{name}={folder / file}' for name, file in files.items()]
    host.run('munged', '--force', *options)
