"""Every command in the README of the GPT example runs, shorter; those for a GPU, on the CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forked import run
from nvidia import CHECKOUT, SCRIPT, needs_training
from paths import ROOT, SUPPORT

import megatron_zbpp
from megatron_zbpp.emulation import CPU_FLAGS
from megatron_zbpp.mcore import enabled

pytestmark = pytest.mark.one_release

README = (ROOT / 'examples' / 'gpt' / 'README.md').read_text()
SETTING, *BLOCKS = re.findall(r'```bash\n(.*?)```', README, re.S)
SNIPPETS = re.findall(r'```python\n(.*?)```', README, re.S)
CHILDREN = Path(megatron_zbpp.__file__).parent / 'emulation' / 'subprocess_hook'


def megatron_lm(folder: Path) -> Path:
    """A folder like a checkout, whose script can be patched."""
    folder.mkdir()
    for entry in Path(CHECKOUT).iterdir() if CHECKOUT else ():
        (folder / entry.name).symlink_to(entry)
    if not CHECKOUT:
        (folder / 'megatron' / 'training').mkdir(parents=True)
        (folder / 'megatron' / 'training' / 'arguments.py').touch()
    (folder / 'pretrain_gpt.py').unlink(missing_ok=True)
    (folder / 'pretrain_gpt.py').write_text(SCRIPT.read_text())
    for name in ('packed.py', 'few_documents.py'):  # which that imports without a checkout
        (folder / name).symlink_to(SUPPORT / name)
    return folder


def on_cpu(block: str) -> str:
    """The block, with what a machine without a GPU needs."""
    if torch.cuda.is_available():
        return block
    block = re.sub(r'megatron_zbpp\.launch(?! --cpu)', 'megatron_zbpp.launch --cpu', block)
    flags = ' '.join(CPU_FLAGS)
    return re.sub(r'(--nproc-per-node \d+ "\$MEGATRON_LM/pretrain_gpt.py")', rf'\1 {flags}', block)


def outcome(block: str, folder: Path, data: Path) -> str:
    """What the commands of the block print, run in a folder with the project's files."""
    for entry in ('examples', 'patches', 'scripts'):
        (folder / entry).symlink_to(ROOT / entry)
    commands = SETTING + on_cpu(block).replace(
        'examples/gpt/pretrain_gpt.py', f'examples/gpt/pretrain_gpt.py --data-path {data}'
    )
    commands = commands.replace('--train-iters 10', '--train-iters 2')
    # found before others of the name, and in the processes that torchrun starts
    done = run(
        ['bash', '-euo', 'pipefail', '-c', commands],
        cwd=folder,
        env={
            'MEGATRON_LM': str(megatron_lm(folder / 'Megatron-LM')),
            'PATH': f'{Path(sys.executable).parent}{os.pathsep}{os.environ["PATH"]}',
            'PYTHONPATH': f'{CHILDREN}{os.pathsep}{ROOT}',
        },
        stderr=subprocess.STDOUT,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


def trained(said: str) -> bool:
    return bool(re.search(r'iteration +2/ +2 \|.*lm loss: [\d.E+-]+ \|', said))


def test_blocks_are_all_run():
    assert len(BLOCKS) == 7 and len(SNIPPETS) == 2


def test_example(tmp_path, data):
    (block,) = [block for block in BLOCKS if 'pretrain_gpt.py' in block and 'LM' not in block]
    said = outcome(block, tmp_path, data)
    assert trained(said)
    told = [line for line in said.splitlines() if line.startswith('megatron_zbpp')]
    assert len(told) == 5, 'one rank says what runs, once'
    assert told[0].endswith(': zb-v on 2 ranks x 2 chunks, 4 microbatches')
    assert told[1] == 'megatron_zbpp: layers of each rank, by chunk: 2+2, 2+2'
    assert ': simulated with F = B = W: idle GPU time ' in told[2] and 'activations' in told[3]


def test_minimal(tmp_path, data):
    (block,) = [block for block in BLOCKS if 'minimal.py' in block]
    said = outcome(block, tmp_path, data)
    losses = list(map(float, re.findall(r'\| loss ([\d.]+) \| idle GPU time', said)))
    assert len(losses) == 10 and 5.0 < losses[0] < 6.0 and losses[-1] < losses[0] - 0.5, said


@needs_training
@pytest.mark.parametrize(
    'block', [block for block in BLOCKS if 'megatron_zbpp.launch' in block], ids=[1, 2, 3]
)
def test_launched(block, tmp_path, data):
    assert trained(outcome(block, tmp_path, data))


@needs_training
def test_patched(tmp_path, data):
    (block,) = [block for block in BLOCKS if 'patches/' in block]
    said = outcome(block, tmp_path, data)
    assert trained(said)
    assert said.index('pretrain_gpt.py: patched') < said.rindex('pretrain_gpt.py: reverted')


def test_doctor(tmp_path, data):
    (block,) = [block for block in BLOCKS if 'zbpp doctor' in block]
    assert 'zb-v' in outcome(block, tmp_path, data)


@pytest.mark.on_ranks(2)
def test_own_program():
    """Both snippets, one after the other: while they are enabled the function is ours."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    names: dict = {}
    own = get_forward_backward_func(2, 2)
    try:
        for snippet in SNIPPETS:
            exec(snippet, names)
            assert get_forward_backward_func(2, 2) is not own
    finally:
        enabled.plugin.disable()
    assert names['layout'].text == 'Ett|tt|tt|ttL'
