"""scripts/gpu_check.sh on a machine that only looks as if it had a GPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import run
from paths import ROOT

SCRIPT = ROOT / 'scripts' / 'gpu_check.sh'

# Stands for the interpreter: writes down what it is to run; a virtual environment has it, too.
PYTHON = """#!/bin/bash
echo "$*" >> "$CALLS"
case "$*" in
    '-m venv '*) mkdir -p "$VENV/bin" && cp "$0" "$VENV/bin/python" ;;
    *'import transformer_engine'*) [ "$TE" = yes ] ;;
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

    def run_check(te='yes', fails='nothing', smi='echo NVIDIA H100'):
        for name, text in (('python3', PYTHON), ('nvidia-smi', f'#!/bin/sh\n{smi}\n')):
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        env = {'PATH': f'{tmp_path}{os.pathsep}{os.environ["PATH"]}', 'TE': te, 'FAILS': fails}
        env |= {name: str(tmp_path / name.lower()) for name in ('RESULTS', 'VENV', 'CALLS')}
        # not what the caller of the tests has set, as .ci/run sets PYTHON
        env |= {'PYTHON': 'python3', 'WHEELS': '', 'PIP_FIND_LINKS': '', 'TESTS': ''}
        done = run(['bash', SCRIPT], timeout=20, env=env)
        calls = tmp_path / 'calls'
        ran = calls.read_text().splitlines() if calls.exists() else []
        tests = [c for c in ran if c.startswith(('-m pytest', 'scripts/'))]
        reports = list((tmp_path / 'results').glob('*.md'))
        return done, tests, reports[0].read_text() if reports else None

    return run_check


def test_order(check):
    """What needs a GPU first, then Transformer Engine, then the benchmark."""
    done, ran, report = check()
    assert done.returncode == 0, done.stderr
    assert [re.sub(r' --json.*', '', call) for call in ran] == [
        '-m pytest -v -rs -m gpu',
        '-m pytest -v -rs -m te and not gpu',
        '-m pytest -v -rs tests/unit/emulation/test_te_sources.py',
        'scripts/benchmark_gpt.py --single-gpu',
    ]
    assert report.startswith('# NVIDIA H100, ') and 'a table' in report
    assert report.count('3 passed in 0.1s') == 3 and 'benchmark of one stage: done' in report
    assert 'commit them: git add' in done.stderr


def test_without_transformer_engine(check):
    done, ran, report = check(te='no')
    assert done.returncode == 0 and len(ran) == 2
    assert 'Transformer Engine: not run: it cannot be imported' in report


def test_a_failure_is_told(check):
    """And does not keep the rest from running."""
    done, ran, report = check(fails='-m gpu')
    assert done.returncode == 1 and len(ran) == 4
    assert '- tests on a GPU: FAILED (1): 3 passed' in report


def test_without_a_gpu(check, tmp_path):
    """It says so at once, and leaves nothing."""
    done, ran, report = check(smi='echo NVIDIA-SMI has failed >&2; exit 9')
    assert done.returncode == 3 and not ran and report is None
    assert 'no NVIDIA GPU here (nvidia-smi lists none): nothing was run' in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {'python3', 'nvidia-smi'}


def test_what_it_names_is_there():
    for path in re.findall(r'(?:scripts|tests|docs)/[\w/.]*\w', SCRIPT.read_text()):
        assert (ROOT / path).exists(), path


def test_shellcheck():
    beside = Path(sys.executable).with_name('shellcheck')
    shellcheck = beside if beside.exists() else shutil.which('shellcheck')
    assert shellcheck, "no shellcheck: pip install -e '.[dev]'"
    done = subprocess.run([shellcheck, SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
