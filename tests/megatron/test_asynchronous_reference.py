"""The example by an asynchronous schedule, and by its formula on one process without a pipeline."""

from __future__ import annotations

import json
import re
import shlex
import sys

import commands
import pytest
from example import MODEL, run
from paths import ROOT, SUPPORT

pytestmark = [pytest.mark.alone, pytest.mark.one_release]
PAGE = (ROOT / 'docs' / 'asynchronous.md').read_text()
TORCHRUN = [sys.executable, '-m', 'torch.distributed.run', '--standalone']
PATHS = {'PYTHONPATH': f'{ROOT}:{ROOT / "examples" / "gpt"}:{SUPPORT}'}
INTERVAL, ITERATIONS, KILLED = 2, 6, 4  # in which iteration


def words_of_page(script: str) -> list[str]:
    """Flags of the page's command that runs `script`, behind torchrun's."""
    (found,) = re.findall(rf'^torchrun (.*(?:\\\n.*)*{script}(?:.*\\\n)*.*)$', PAGE, re.M)
    return shlex.split(found.replace('\\\n', ' '))


def command(script: str, p: int, method: str) -> list[str]:
    """The page's command, for p ranks and a method."""
    return [
        {'4': str(p), 'pipedream-2bw': method}.get(word, word) for word in words_of_page(script)
    ]


def started(argv, metrics):
    """What a command prints, its exit code, and the lines that it has written to `metrics`."""
    more = ['--metrics-file', metrics, *MODEL, '--log-interval', 1000]
    done = commands.run([*TORCHRUN, *argv, *more], cwd=ROOT, env=PATHS)
    return done, [json.loads(line) for line in metrics.read_text().splitlines()]


def losses_of(lines):
    return tuple(line['loss'] for line in lines if 'loss' in line)


@pytest.mark.parametrize(
    ('method', 'p'),
    [
        pytest.param(method, p, marks=[pytest.mark.full] * (p > 2 or method != 'pipedream-2bw'))
        for method in ('pipedream-2bw', 'pipedream', 'wpipe')
        for p in (2, 4)
    ],
)
def test_equal_hashes(ranks, data, tmp_path, method, p):
    """Both commands of the page, and the first one killed in the middle, and resumed."""
    more = ['--data-path', data, '--train-iters', ITERATIONS]
    ours = [*command('pretrain_gpt.py', p, method), *more]
    at = next(index for index, word in enumerate(ours) if str(word).endswith('pretrain_gpt.py'))
    whole = run(ranks(p), *ours[at + 1 :])
    done, lines = started([*command('older_weights.py', p, method), *more], tmp_path / 'formula')
    assert done.returncode == 0, done.stderr
    assert losses_of(lines) == whole.losses
    assert lines[-1] == {
        'parameters_sha256': whole.parameters,
        'optimizer_sha256': whole.optimizer,
    }

    saving = ['--save', tmp_path / 'checkpoints', '--save-interval', INTERVAL]
    where = [p - 1, KILLED, 'forward', 2]
    doomed = [*ours[:at], SUPPORT / 'doomed.py', *where, *ours[at + 1 :], *saving]
    done, lines = started(doomed, tmp_path / 'killed')
    assert done.returncode and 'Signal 9 (SIGKILL)' in done.stderr, done.stderr
    assert losses_of(lines) == whole.losses[: KILLED - 1]
    after = run(ranks(p), *ours[at + 1 :], '--load', tmp_path / 'checkpoints')
    assert after.losses == whole.losses[INTERVAL:]
    assert after.parameters == whole.parameters
    assert after.optimizer == whole.optimizer
