"""The five commands of the page on unbalanced pipelines, from a run to a better layout."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pages
import pytest
from commands import run
from nvidia import COMMON, SCRIPT, needs_training
from paths import ROOT

pytestmark = pytest.mark.one_release

PAGE = ROOT / 'docs' / 'unbalanced.md'
FIVE = re.search(r'## In five commands\n.*?```bash\n(.*?)```', PAGE.read_text(), re.S)[1]
SMALLER = {
    '--nproc-per-node 4': '--nproc-per-node 2',
    '-size 4': '-size 2',
    '--pp 4': '--pp 2',
    '--microbatches 8': '--microbatches 4',
    '--seconds 5': '--seconds 1',
    '/path/to/Megatron-LM/pretrain_gpt.py': f'--cpu {SCRIPT}',
    '...': shlex.join([*COMMON, '--train-iters', '6', '--global-batch-size', '4']),
    'torchrun': f'{sys.executable} -m torch.distributed.run --standalone',
}


@needs_training
def test_from_a_run_to_a_better_layout(tmp_path):
    """On two ranks of the CPU, with four layers; the second run has the plan's layout."""
    lines = FIVE.splitlines()
    assert len(lines) == 5 and set(lines) <= {c.line for c in pages.commands()}
    for there, here in SMALLER.items():
        lines = [line.replace(there, here) for line in lines]
    env = {
        'PATH': f'{Path(sys.executable).parent}{os.pathsep}{os.environ["PATH"]}',
        'PYTHONPATH': str(ROOT),
    }
    command = ['bash', '-exo', 'pipefail', '-c', '\n'.join(lines)]
    done = run(command, cwd=tmp_path, env=env, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert 'largest error of a stage' in done.stdout
    stages = json.loads((tmp_path / 'trace' / 'stages.json').read_text())
    assert [len(stages[kind]) for kind in 'FBW'] == [2, 2, 2]
    assert stages['layout'] == 'Ett|ttL'
    layout = json.loads((tmp_path / 'better.json').read_text())['layout']
    assert f'layers as the plan has them: {layout}' in done.stderr
    trained = re.findall(r'iteration +(\d)/ +6 \|.*lm loss: [\d.E+-]+ \|', done.stdout)
    assert trained == [*'123456'] * 2
