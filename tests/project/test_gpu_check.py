"""scripts/gpu_check.sh on a machine that only looks as if it had a GPU; and its rehearsal."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import run
from gpu import CUDA
from paths import ROOT

from benchmarks.one_gpu import REHEARSAL

SCRIPT = ROOT / 'scripts' / 'gpu_check.sh'
KERNELS = ('torch', 'flash', 'cuDNN', 'unfused')

# Stands for the interpreter: writes down what it is to run; a virtual environment has it, too.
PYTHON = """#!/bin/bash
echo "$*" >> "$CALLS"
case "$*" in
    '-m venv '*) mkdir -p "$VENV/bin" && cp "$0" "$VENV/bin/python" ;;
    *'import transformer_engine'*) [ "$TE" = yes ] ;;
    *"find_spec('$LACKS')"*) exit 1 ;;
    *"$HANGS"*) sleep 60 ;;
    '-m pytest'*)
        echo '=== 3 passed in 0.1s ==='
        case "$*" in *"$FAILS"*) exit 1 ;; esac
        ;;
    scripts/benchmark_gpt.py*) echo 'a table' ;;
    -c*) echo Python 3 ;;
esac
"""


@pytest.fixture
def check(tmp_path):
    """Runs the script: what it left, what it ran of tests and benchmarks, and how it ended."""

    def run_check(te='yes', fails='nothing', smi='echo NVIDIA H100', **more):
        for name, text in (('python3', PYTHON), ('nvidia-smi', f'#!/bin/sh\n{smi}\n')):
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        env = {'PATH': f'{tmp_path}{os.pathsep}{os.environ["PATH"]}', 'TE': te, 'FAILS': fails}
        env |= {name: str(tmp_path / name.lower()) for name in ('RESULTS', 'VENV', 'CALLS')}
        # not what the caller of the tests has set, as .ci/run sets PYTHON
        env |= {'PYTHON': 'python3', 'WHEELS': '', 'PIP_FIND_LINKS': '', 'TESTS': ''}
        env |= dict.fromkeys(('NO_VENV', 'REHEARSE', 'STAGES', 'LIMIT'), '')
        env |= {'LACKS': 'nothing', 'HANGS': 'nothing', **more}
        done = run(['bash', SCRIPT], env=env)
        calls = tmp_path / 'calls'
        ran = calls.read_text().splitlines() if calls.exists() else []
        tests = [c for c in ran if c.startswith(('-m pytest', '-m benchmarks', 'scripts/'))]
        reports = list((tmp_path / 'results').glob('*.md'))
        return done, tests, reports[0].read_text() if reports else None

    return run_check


def test_order(check):
    """Tests first, then what is proven on one GPU, then what is measured."""
    done, ran, report = check()
    assert done.returncode == 0, done.stderr
    assert [
        re.sub(r' (--(models|json|logs)|tests/(dist|megatron)/).*', '', call) for call in ran
    ] == [
        '-m pytest -v -rs -m gpu',
        '-m pytest -v -rs -m te and not gpu',
        '-m pytest -v -rs tests/unit/emulation/test_te_sources.py',
        '-m benchmarks.one_gpu.ddp_race',
        '-m benchmarks.one_gpu.nccl',
        '-m benchmarks.one_gpu.spinning',
        '-m benchmarks.one_gpu.copies --mib 1024',
        'scripts/benchmark_step.py --parameters 1000',
        *(f'-m benchmarks.one_gpu.slices --attention {kernel}' for kernel in KERNELS),
        '-m benchmarks.one_gpu.shards',
        'scripts/benchmark_gpt.py --single-gpu',
    ]
    assert report.startswith('# NVIDIA H100, ') and 'a table' in report
    assert report.count('3 passed in 0.1s') == 3 and 'benchmark of one stage: done' in report
    assert 'commit them: git add' in done.stderr


def test_without_transformer_engine(check):
    done, ran, report = check(te='no')
    assert done.returncode == 0 and len(ran) == 12
    assert 'Transformer Engine: not run: it cannot be imported' in report


def test_a_failure_is_told(check):
    """And does not keep the rest from running."""
    done, ran, report = check(fails='-m gpu')
    assert done.returncode == 1 and len(ran) == 14
    assert '- tests on a GPU: FAILED (1): ' in report and '3 passed' in report


def test_stages(check):
    """Those that are named, and no others."""
    done, ran, report = check(STAGES='streams micro')
    assert done.returncode == 0, done.stderr
    assert ran[:2] == ['-m benchmarks.one_gpu.ddp_race', '-m benchmarks.one_gpu.spinning']
    assert len(ran) == 4
    assert '- spinning receives and waiting sends: done' in report


def test_earlier_results_stay(check, tmp_path):
    """A second run on a day has files of its own."""
    check(STAGES='streams')
    (first,) = (tmp_path / 'results').glob('*.md')
    said = first.read_text()
    check(STAGES='micro')
    second = first.with_name(f'{first.stem}-2.md')
    assert first.read_text() == said and 'copies both ways' in second.read_text()


def test_a_stage_that_is_none(check):
    """It is refused before anything runs."""
    done, ran, report = check(STAGES='streams streems')
    assert done.returncode == 2 and not ran and report is None
    assert 'STAGES has streems: give some of' in done.stderr


def test_a_stage_that_does_not_end(check):
    """It is ended, told, and the next begins."""
    done, ran, report = check(STAGES='streams micro', LIMIT='6', HANGS='ddp_race')
    assert done.returncode == 1 and len(ran) == 4
    assert 'waits for W: FAILED: not done after 6 s' in report
    assert '- spinning receives and waiting sends: done' in report


def test_without_a_virtual_environment(check, tmp_path):
    """For an interpreter that is in one: only what it lacks is installed, and never torch."""
    done, _, _ = check(NO_VENV='1', STAGES='streams', LACKS='megatron.core')
    assert done.returncode == 0, done.stderr
    calls = (tmp_path / 'calls').read_text().splitlines()
    assert not [call for call in calls if call.startswith('-m venv')]
    (installed,) = [call for call in calls if call.startswith('-m pip install')]
    assert installed.endswith(f'--no-deps --target {tmp_path / "venv"} megatron-core')


def test_a_rehearsal_is_no_result(check):
    """It needs no GPU, names no folder of results by itself, and says what it is."""
    done, ran, _ = check(REHEARSE='1', RESULTS='', smi='exit 9')
    assert done.returncode == 2 and not ran and 'name a folder in RESULTS' in done.stderr


REHEARSED = {
    'streams': (REHEARSAL, 'W returns a dummy, side stream: reduced 1.00, 1.00 expected'),
    'nccl': (REHEARSAL, 'p2, megatron: done', 'p2, zb-v: done'),
    'micro': (REHEARSAL, 'nothing spins here', 'two streams: ', 'validated later ms'),
    'slices': (REHEARSAL, 'torch: slices differ by', 'right', 'flash: Transformer Engine', 'ms'),
    'shards': (REHEARSAL, 'S: ', 'T: ', 'reduction of the gradient, 2 ranks: ', 'right'),
    'stage': ('predicted', 'zb-v'),
}
LONG = ('nccl', 'slices', 'shards')


@pytest.mark.skipif(CUDA, reason='on a GPU nothing is rehearsed')
@pytest.mark.parametrize(
    'stage',
    [pytest.param(stage, marks=pytest.mark.full if stage in LONG else ()) for stage in REHEARSED],
)
def test_rehearsal(tmp_path, stage):
    """Each stage with what stands in for the card: gloo among two ranks, the CPU."""
    env = {'REHEARSE': '1', 'NO_VENV': '1', 'PYTHON': sys.executable, 'WHEELS': '', 'TESTS': ''}
    env |= {'RESULTS': str(tmp_path / 'results'), 'VENV': str(tmp_path / 'venv'), 'LIMIT': ''}
    words = '--models tiny --warm-up 1 --iterations 2 --predict-ranks 2 --schedules zb-v'.split()
    env |= {'STAGES': stage, 'PIP_FIND_LINKS': ''}
    done = run(['bash', SCRIPT, *words], timeout=900, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    (report,) = (tmp_path / 'results').glob('*.md')
    said = report.read_text()
    assert said.startswith('# rehearsal without a GPU') and 'Nothing here was run on a GPU' in said
    assert all(words in said for words in REHEARSED[stage]), said
    done = re.findall('^- .*: done$', said, re.M)
    assert len(done) == {'micro': 3, 'slices': 4}.get(stage, 1), said
    assert not list((tmp_path / 'venv').iterdir()), 'nothing had to be installed'


def test_what_it_names_is_there():
    for path in re.findall(r'(?:scripts|tests|docs)/[\w/.]*\w', SCRIPT.read_text()):
        assert (ROOT / path).exists(), path


def test_shellcheck():
    beside = Path(sys.executable).with_name('shellcheck')
    shellcheck = beside if beside.exists() else shutil.which('shellcheck')
    assert shellcheck, "no shellcheck: pip install -e '.[dev]'"
    done = subprocess.run([shellcheck, SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
