"""NVIDIA's own training loop on Transformer Engine's layers, without a GPU, by the launcher."""

import json
import sys
from pathlib import Path

import commands
import pytest
from defined import require_defined, watched
from gpu import CUDA
from grids import grid
from nvidia import COMMON, SCRIPT, by, go_on, needs_training
from supported import supports
from test_launch import DISTRIBUTED, LLAMA, MOE, NO_CLIPPING, OVERLAP, PIPELINE
from test_same_start import P2, require_same_start
from wheels import NEWEST, transformer_engine

import megatron_zbpp

pytestmark = [pytest.mark.te, pytest.mark.skipif(CUDA, reason='--cpu is for machines without')]

TE = ['--transformer-impl', 'transformer_engine', '--bf16']
FP8 = ['--fp8-format', 'hybrid', '--fp8-recipe', 'tensorwise']
CASES = {
    'dense': ['--disable-bias-linear', *OVERLAP],
    'grouped experts': [*LLAMA, *MOE, '--moe-grouped-gemm', *OVERLAP],
    'FP8 weights': [*FP8, '--fp8-param-gather', *DISTRIBUTED],
}


@supports("NVIDIA's loop on Transformer Engine's layers: {case}")
@needs_training
@grid(case=tuple(CASES), schedule=('zb-h1', 'zb-v'))
def test_identical_to_megatron(te_ranks, tmp_path, case, schedule):
    """From a checkpoint that Megatron's own 1F1B saved, every schedule goes on as it does. And each
    gradient that reaches DistributedDataParallel is defined: see `defined`."""
    flags = [*PIPELINE, *NO_CLIPPING, *TE, *CASES[case], '--train-iters', 4]
    how = {'event': watched, 'at': 2, 'sharded': DISTRIBUTED[0] in flags}
    ours, _ = go_on(te_ranks(2), tmp_path, flags, by(schedule), **how)
    require_defined(ours.reported, fused=True)


@supports("training from scratch, the same start: Transformer Engine's layers, {case}", 'zb-v')
@needs_training
@pytest.mark.full
@pytest.mark.parametrize('case', ['grouped experts', 'FP8 weights'])
def test_from_scratch(te_ranks, case):
    require_same_start(te_ranks(2), [*P2, *TE, *CASES[case], '--te-rng-tracker'])


@pytest.mark.one_release
def test_without_transformer_engine():
    command = [sys.executable, '-m', 'megatron_zbpp.launch', '--cpu', SCRIPT, *COMMON, *TE]
    done = commands.run(command, timeout=200)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        'python -m megatron_zbpp.launch: error: no transformer_engine in sys.path: pip install'
    )


@pytest.mark.one_release
def test_children_have_it(tmp_path):
    """A process that a run starts, in any folder, emulates Transformer Engine as the run does."""
    children = Path(megatron_zbpp.__file__).parent / 'emulation' / 'subprocess_hook'
    code = (
        'import megatron.core, json, transformer_engine.pytorch as te\n'
        'from devtools.te import installed\n'
        'print(json.dumps([installed(), te.__file__]))'
    )
    folder = transformer_engine(NEWEST)
    environment = {'PYTHONPATH': str(children), 'MEGATRON_ZBPP_EMULATED_TE': str(folder)}
    done = commands.run([sys.executable, '-c', code], cwd=tmp_path, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr
    emulated, file = json.loads(done.stdout.splitlines()[-1])
    assert emulated and Path(file).is_relative_to(folder)
