"""The files for SLURM, submitted to a SLURM of two nodes: toy models on CPU, one process a node."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import hosts
import nvidia
import pytest
from nvidia import needs_training
from paths import SUPPORT
from slurm import BENCH, BENCHMARK, FILES, FOLDER, ROOT

NODES = ('node-a7', 'node-a8')
_PACKAGES = {'sbatch': 'slurm-wlm', 'slurmctld': 'slurm-wlm', 'slurmd': 'slurm-wlm'}
_PACKAGES |= {'munged': 'munge'}
_CONFIGURATION = SUPPORT / 'slurm.conf'


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


def _start_munge(host: hosts.Host, folder: Path) -> None:
    """By which the daemons know each other; the nodes have files in common."""
    key = folder / 'munge.key'
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    files = {'socket': 'munge', 'pid-file': 'munge.pid', 'log-file': 'munge.log'}
    files |= {'seed-file': 'munge.seed', 'key-file': key.name}
    options = [f'--{name}={folder / file}' for name, file in files.items()]
    host.run('munged', '--force', *options)


pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=f'no SLURM: {missing()}'),
    pytest.mark.timeout(900),
    pytest.mark.one_release,
]
# the shape of gpt-1.5b: the first and the last stage have a layer fewer
TOY = """
    --num-layers 6 --hidden-size 32 --num-attention-heads 4 --seq-length 16
    --max-position-embeddings 16 --vocab-size 255 --lr 1e-3 --eval-iters 0 --seed 7
    --num-workers 0 --log-interval 1 --save-interval 4
""".split()
ON_MOCK_DATA = """
    --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split --mock-data
    --tokenizer-type NullTokenizer --attention-dropout 0 --hidden-dropout 0 --eval-interval 100
    --pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 4
""".split()
ITERATIONS = 8
ON_CPU = ('--nodes=2', '--gpus-per-node=0')
START = 200  # seconds that a start of all processes may take on a busy machine


@pytest.fixture(scope='module')
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    """A cluster that is ready for jobs; all of its processes end with it."""
    folder = tmp_path_factory.mktemp('slurm')
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


class Training:
    """The sbatch file of one model, with its own checkpoints and losses."""

    def __init__(self, cluster, folder):
        self._cluster = cluster
        (folder / 'Megatron-LM').mkdir()
        script = SUPPORT.joinpath('exact_script.py')
        shutil.copy(script, folder / 'Megatron-LM' / 'pretrain_gpt.py')
        self.checkpoints, self._losses = folder / 'checkpoints', folder / 'losses'
        self._environment = {
            'DEVICE': 'cpu',
            'GPUS_PER_NODE': '1',
            'DATA': 'mock',
            'MEGATRON_LM': folder / 'Megatron-LM',
            'TRAINING_SCRIPT': nvidia.SCRIPT,
            'PIPELINE_PARALLEL': '2',
            'MICRO_BATCH': '1',
            'GLOBAL_BATCH': '4',
            'ITERATIONS': ITERATIONS,
            'CHECKPOINTS': self.checkpoints,
            'LOSSES': self._losses,
            **installed(nvidia.CHECKOUT),
        }

    def submit(self, pause=0):
        file = FOLDER / 'gpt-1.5b.sbatch'
        environment = self._environment | {'PAUSE': pause}
        return self._cluster.submit(file, ROOT, *TOY, options=ON_CPU, **environment)

    def losses(self):
        """Iteration and loss, in the order in which they were logged."""
        if not self._losses.exists():
            return []
        lines = [line.split() for line in self._losses.read_text().splitlines()]
        return [(int(iteration), loss) for iteration, loss in lines]


def installed(*folders):
    """Variables by which jobs find what runs this test."""
    path = [str(Path(sys.executable).parent), os.environ['PATH']]
    modules = [str(ROOT), *filter(None, [*folders, os.environ.get('PYTHONPATH')])]
    return {'PATH': os.pathsep.join(path), 'PYTHONPATH': os.pathsep.join(modules)}


@pytest.fixture(scope='module')
def whole(cluster, tmp_path_factory):
    """Losses by iteration of a training that nothing interrupts."""
    training = Training(cluster, tmp_path_factory.mktemp('whole'))
    job = training.submit()
    assert job.wait_for_end(START) == 'COMPLETED', job.said()
    for rank in (0, 1):
        assert f'[Rank {rank}] (after save_checkpoint for iteration {ITERATIONS})' in job.said()
    losses = training.losses()
    assert [iteration for iteration, _ in losses] == list(range(1, ITERATIONS + 1))
    return dict(losses)


@needs_training
def test_requeued_training_goes_on(cluster, whole, tmp_path):
    """As when a node fails: bit for bit, in the same log."""
    training = Training(cluster, tmp_path)
    job = training.submit(pause=1)
    job.wait(lambda: len(training.losses()) >= 6, START)
    before = training.losses()
    cluster.run('scontrol', 'requeue', job.number)
    assert job.wait_for_end(2 * START) == 'COMPLETED', job.said()
    assert job.show()['Restarts'] == '1'
    losses = training.losses()
    assert losses[: len(before)] == before
    again = [iteration for iteration, _ in losses].index(5, len(before) - 1)
    assert [iteration for iteration, _ in losses[again:]] == [5, 6, 7, 8], 'from the checkpoint'
    assert all(whole[iteration] == loss for iteration, loss in losses)
    assert f'iteration        1/{" " * 8}{ITERATIONS} |'[:22] in job.said(), 'not written over'


@needs_training
def test_cancelled_training_ends(cluster, tmp_path):
    training = Training(cluster, tmp_path)
    job = training.submit(pause=1)
    job.wait(lambda: len(training.losses()) >= 2, START)
    start = time.monotonic()
    cluster.run('scancel', job.number)
    assert job.wait_for_end(60) == 'CANCELLED'
    assert time.monotonic() - start < 50, 'before SLURM would kill'
    assert not cluster.processes('pretrain_gpt.py')
    reports = re.findall(
        r'pipeline watchdog: global rank (\d) on (.*): SIGTERM\n  now: .*\n  waits for: ',
        job.said(),
    )
    assert sorted(reports) == [('0', 'node-a7'), ('1', 'node-a8')], job.said()
    assert 'CANCELLED AT' in job.said()


@pytest.mark.full
@needs_training
def test_bench_of_a_launch_line(cluster, tmp_path):
    """Each turn on both nodes, from one checkpoint that both have written."""
    folder = tmp_path / 'bench'
    words = ['--rounds', '1', '--iterations', '2', '--schedules', 'zb-h1', '--json', '-o', folder]
    line = ['--', nvidia.SCRIPT, *TOY, *ON_MOCK_DATA]
    environment = {'DEVICE': 'cpu', 'GPUS_PER_NODE': '1', **installed(nvidia.CHECKOUT)}
    job = cluster.submit(BENCH, ROOT, *words, *line, options=ON_CPU, **environment)
    assert job.wait_for_end(3 * START) == 'COMPLETED', job.said()
    said = job.said()
    found = json.loads(said[said.index('{') :])['schedules']
    assert [(row['name'], row['error']) for row in found] == [('as it is', None), ('zb-h1', None)]
    own, ours = found
    assert len(own['losses']) == 2 and ours['losses_equal'] is True
    assert ours['idle_all_ranks'] > 0, 'measured on both ranks'
    assert not cluster.processes('pretrain_gpt.py')


@pytest.mark.full
def test_cancelled_benchmark_goes_on(cluster, tmp_path):
    result = tmp_path / 'result.json'

    def submit():
        return cluster.submit(
            BENCHMARK,
            ROOT,
            *('--warm-up', '1', '--iterations', '2'),
            options=ON_CPU,
            DEVICE='cpu',
            GPUS_PER_NODE='1',
            MODELS='tiny',
            SCHEDULES='megatron:1f1b,zb-v',
            MICROBATCHES='4',
            RESULT=result,
            **installed(),
        )

    def rows():
        return json.loads(result.read_text())['rows'] if result.exists() else []

    job = submit()
    job.wait(rows, START)
    cluster.run('scancel', job.number)
    assert job.wait_for_end(60) == 'CANCELLED'
    assert not cluster.processes('benchmark')
    (first,) = rows()
    assert first['schedule'] == '1f1b'
    job = submit()
    assert job.wait_for_end(START) == 'COMPLETED', job.said()
    again, second = rows()
    assert again == first, 'not measured again'
    assert (second['kind'], second['schedule']) == ('measured', 'zb-v')
    assert second['p'] == 2 and second['device'] == 'cpu'


@pytest.mark.parametrize('file', [*FILES, BENCHMARK, BENCH], ids=lambda file: file.stem)
def test_sbatch_takes_the_file(cluster, file):
    """Its options mean to SLURM what they say."""
    job = cluster.submit(file, ROOT, options=(*ON_CPU, '--hold'))
    shown = job.show()
    cluster.run('scancel', job.number)
    assert shown['JobName'] == file.stem and shown['Requeue'] == '1'
    assert shown['NtasksPerN:B:S:C'].startswith('1:'), 'one torchrun a node'
    assert shown['OverSubscribe'] == 'NO', 'exclusive'


def test_without_gpus_it_says_what_to_set(cluster, tmp_path):
    job = cluster.submit(BENCHMARK, ROOT, options=ON_CPU)
    assert job.wait_for_end(30) == 'FAILED'
    assert (
        'benchmark_gpt: 0 GPUs a node: set GPUS_PER_NODE to the number of processes that a node '
        'is to have, and DEVICE=cpu if it has no GPU'
    ) in job.said()
