"""Training on two hosts, and what becomes of it when their link is cut."""

import contextlib
import itertools
import json
import os
import re
import sys
import time
from typing import NamedTuple
from unittest import mock

import hosts
import psutil
import pytest
from example import MODEL, run
from grids import some
from nvidia import COMMON, EARLY, SCRIPT, needs_training, require_same
from nvidia import run as run_nvidia
from paths import ROOT, SUPPORT

pytestmark = [
    pytest.mark.skipif(hosts.missing() is not None, reason=f'no two hosts: {hosts.missing()}'),
    pytest.mark.timeout(900),
    pytest.mark.one_release,
]
NAMES = ('node-a7', 'node-a8')
TIMEOUT, PAUSE = 15, 45  # seconds: of the watchdog, in passes and between them
COMMON_FLAGS = '--pipeline-model-parallel-size 2 --global-batch-size 4 --pipeline-schedule zb-v'
FLAGS = f'{COMMON_FLAGS} --num-layers 8 --train-iters 5 --clip-grad 100'.split()
WATCHED = ['--pipeline-watchdog-timeout', TIMEOUT, '--pipeline-watchdog-pause-timeout', PAUSE]
START = 400  # seconds that everything may take on a busy machine
AHEAD = 3600  # seconds between the starts of the hosts
MARGIN = 90  # seconds for all processes to end, on a busy machine


class Ended(NamedTuple):
    code: int
    said: str  # by torchrun and its rank
    rank_time: float | None  # when the rank was no more, where the link was cut
    time: float  # when torchrun was no more


class Torchrun:
    """A program with one process on each of two hosts, one of them started before the other."""

    def __init__(self, stack, folder, *command):
        self.folder = folder
        folder.mkdir()
        self.hosts = stack.enter_context(hosts.pair(NAMES, folder, ahead=(0, AHEAD)))
        launch = [sys.executable, '-m', 'torch.distributed.run', '--nnodes=2', '--nproc-per-node=1']
        launch += ['--master-addr', NAMES[0], '--master-port', '29500', '--node-rank']
        path = os.pathsep.join(map(str, (ROOT, ROOT / 'examples' / 'gpt')))
        environment = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': path}
        self._logs = [folder / f'{host.name}.log' for host in self.hosts]
        self._processes = []
        for number, (host, log) in enumerate(zip(self.hosts, self._logs, strict=True)):
            there = host.command(*launch, number, *command)
            with log.open('w') as file:
                process = psutil.Popen(there, env=environment, stdout=file, stderr=file)
            self._processes.append(process)
        self._times = [{} for _ in self.hosts]

    def poll(self):
        cut = (self.folder / 'cut').exists()
        for host, process, times in zip(self.hosts, self._processes, self._times, strict=True):
            lines = host.processes('doomed.py') if cut and 'rank' not in times else ['']
            if all('distributed.run' in line for line in lines):
                times['rank'] = time.time()
            if 'torchrun' not in times and process.poll() is not None:
                times['torchrun'] = time.time()
        return all('torchrun' in times for times in self._times)

    def ended(self):
        """By rank; raises where it is too late."""
        assert self.poll(), [log.read_text() for log in self._logs]
        return [
            Ended(process.returncode, log.read_text(), times.get('rank'), times['torchrun'])
            for process, log, times in zip(self._processes, self._logs, self._times, strict=True)
        ]


def wait(running, seconds):
    """Until all have ended, or that long."""
    deadline = time.monotonic() + seconds
    while sum(each.poll() for each in running) < len(running) and time.monotonic() < deadline:
        time.sleep(1)  # a look goes through all processes of the machine


REPORT = re.compile(
    r'pipeline watchdog: global rank (\d) on (.*): no step forward for \d+ s\n'
    r'  now: (.*)\n  waits for: (.*)\n'
)
PASS = r'[FBW] stage \d microbatch \d \(\d[FBW]\d\)'
MESSAGE = r'(output|gradient) of stage \d microbatch \d from pipeline rank \d \(global rank \d\)'
TO_COME = 'the other ranks of the pipeline to come there'
CUTS = {
    'pass': ([], PASS, MESSAGE),
    'step': ([], 'optimizer step', TO_COME),
    'validated step': (EARLY, 'optimizer step: the state of .*', TO_COME),
    'checkpoint': (
        [],
        r'between passes, in .* \(.*megatron/core/dist_checkpointing/.*:\d+\)',
        r'the other ranks to come to .* of torch.distributed',
    ),
}


@pytest.fixture(scope='module')
def whole(ranks, data):
    """What the same training gives that nothing interrupts."""
    return run(ranks(2), '--data-path', data, *FLAGS)


# in each run: a step that is validated waits in the same place as one that is not, and says more
OFTEN = ('pass', 'validated step')


@pytest.fixture(scope='module')
def cuts(data, whole, tmp_path_factory, request):
    """Trainings, by the place of the cut, that have ended: all at once, as they mostly wait. They
    read the indices of `data` that `whole` has left: Megatron's cache of them has no lock."""
    folder = tmp_path_factory.mktemp('cuts')
    places = CUTS if request.config.getoption('full') else OFTEN
    with contextlib.ExitStack() as stack:
        running = {
            place: Torchrun(stack, folder / place, *program(place, folder / place, data))
            for place in places
        }
        wait(running.values(), START)
        yield running


def program(place, folder, data):
    """The training whose last rank cuts the link at that place of the fourth iteration."""
    saving = ['--save', folder / 'checkpoints', '--save-interval', 2]
    saving += ['--metrics-file', folder / 'metrics']
    script = [SUPPORT / 'doomed.py', 1, 4, place, folder / 'cut']
    return [*script, *MODEL, '--data-path', data, *FLAGS, *CUTS[place][0], *saving, *WATCHED]


@some('place', OFTEN, *CUTS)
def test_link_is_cut(ranks, data, cuts, whole, tmp_path, place):
    """Both ranks say what they wait for, in time; resumed, it is as if nothing had happened."""
    more, now, waits_for = CUTS[place]
    training = cuts[place]
    ended = training.ended()
    cut = float((training.folder / 'cut').read_text())
    for rank, each in enumerate(ended):
        ((number, host, *position),) = REPORT.findall(each.said)
        assert (int(number), host) == (rank, NAMES[rank])
        assert re.fullmatch(now, position[0]) and re.fullmatch(waits_for, position[1]), position
        assert f'culprit: global rank {1 - rank}, which does not answer' in each.said, each.said
        limit = (PAUSE if place == 'checkpoint' else TIMEOUT) + MARGIN
        assert each.rank_time - cut < limit
        assert each.code != 0 and each.time - each.rank_time < MARGIN
        assert not training.hosts[rank].processes('doomed.py')
    tracker = training.folder / 'checkpoints' / 'latest_checkpointed_iteration.txt'
    assert tracker.read_text() == '2'
    metrics = (training.folder / 'metrics').read_text()
    before = [json.loads(line)['loss'] for line in metrics.splitlines()]
    flags = ['--data-path', data, *FLAGS, *more]
    after = run(ranks(2), *flags, '--load', tracker.parent)
    assert tuple(before) == whole.losses[: len(before)]
    require_same(after, whole, 2)


# NVIDIA's loop draws by our launcher's flag
TRACED = f'{COMMON_FLAGS} --train-iters 6'.split()


@needs_training
def test_trace_of_two_hosts(ranks, tmp_path):
    """It trains as on one host; the spans of both, whose clocks are an hour apart, are on one."""
    launcher = ['-m', 'megatron_zbpp.launch', '--cpu', SUPPORT / 'exact_script.py', *COMMON]
    variables = {'TRAINING_SCRIPT': str(SCRIPT), 'LOSSES': str(tmp_path / 'losses'), 'PAUSE': '0'}
    with mock.patch.dict(os.environ, variables), contextlib.ExitStack() as stack:
        trace = ['--pipeline-trace-dir', tmp_path / 'trace']
        training = Torchrun(stack, tmp_path / 'hosts', *launcher, *TRACED, *trace)
        wait([training], START)
        for each in training.ended():
            assert each.code == 0, each.said
    losses = dict(line.split() for line in (tmp_path / 'losses').read_text().splitlines())
    whole = run_nvidia(ranks(2), *TRACED).losses
    assert losses == {str(iteration): loss for iteration, (loss, *_) in whole.items()}

    events = json.loads((tmp_path / 'trace' / 'pipeline.perfetto.json').read_text())['traceEvents']
    spans = {e['name']: (e['ts'], e['ts'] + e['dur']) for e in events if e['ph'] == 'X'}
    assert len(spans) == 3 * 4 * 4, 'F, B and W of four stages and four microbatches'
    assert max(end for _, end in spans.values()) < 1e6 * AHEAD / 10
    for stage, microbatch in itertools.product(range(3), range(4)):
        for first, then in (
            (f'{stage}F{microbatch}', f'{stage + 1}F{microbatch}'),
            (f'{stage + 1}B{microbatch}', f'{stage}B{microbatch}'),
        ):
            assert spans[first][1] <= spans[then][0] + 1, 'microseconds'
