"""The README's first command, scaled down."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from commands import run
from paths import ROOT

from megatron_zbpp.ir.timeline import MEANING

pytestmark = pytest.mark.one_release


def quickstart():
    """The script as a user calls it; without set-up where this environment is not of its making."""
    if (Path(sys.prefix) / 'installed').exists():
        return ['./scripts/quickstart.sh']
    return [sys.executable, 'scripts/quickstart.py']


def test_quickstart(tmp_path):
    text = tmp_path / 'own.txt'
    text.write_text(
        'All happy families are alike; each unhappy family is unhappy in its own way.\n' * 4000
    )
    command = [sys.executable, 'scripts/quickstart.py', '--ranks', '2', '--input', text]
    command += '--iterations 3 --hidden-size 16 --seq-length 16 --microbatches 2'.split()
    done = run([*command, '--output', tmp_path / 'out'], cwd=ROOT, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line for line in done.stdout.splitlines() if line.startswith(('Megatron', 'zb-'))]
    assert len(rows) == 3
    assert rows[0].split()[3] == 'reference'
    assert all('bit for bit' in row for row in rows[1:])
    losses = {row.split('1F1B')[-1].split('zb-h1')[-1].split('zb-v')[-1].split()[0] for row in rows}
    assert len(losses) == 1
    pictures = [line.removeprefix('wrote ') for line in done.stdout.splitlines() if 'wrote' in line]
    assert len(pictures) == 2
    for picture in pictures:
        assert Path(picture).read_bytes().startswith(b'\x89PNG')
    for schedule in ("Megatron's 1F1B", 'zb-h1', 'zb-v'):
        lines = [line for line in done.stderr.splitlines() if line.startswith(f'{schedule:16}')]
        (last,) = lines  # of three iterations; no bar, as this is no terminal
        assert re.fullmatch(rf'{schedule:16}: 3/3, loss \d+\.\d+', last)
    assert 'differences in s/iteration are noise' in done.stdout
    assert 'idle GPU time' in done.stdout and MEANING in done.stdout


def test_quickstart_refuses_one_rank():
    command = [*quickstart(), '--ranks', '1']
    done = run(command, cwd=ROOT, env={'VENV': sys.prefix, 'PYTHON': sys.executable})
    assert done.returncode == 2
    assert '--ranks 1 is too small' in done.stderr


def test_a_node_of_many_cores_and_gpus(monkeypatch):
    """Four ranks on the CPU, whatever the machine has."""
    monkeypatch.syspath_prepend(str(ROOT / 'scripts'))
    from quickstart import environment, parse_args

    for cores, ranks in ((224, 4), (3, 3), (1, 2), (None, 2)):
        monkeypatch.setattr('os.cpu_count', lambda cores=cores: cores)
        assert parse_args([]).ranks == ranks
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '0,1')
    assert environment()['CUDA_VISIBLE_DEVICES'] == ''
