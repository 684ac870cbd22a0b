"""What cannot work is refused by every rank, in words, at once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from example import MODEL, run

EXAMPLE = Path(__file__).parents[2] / 'examples' / 'gpt' / 'pretrain_gpt.py'
SOUND = {
    '--num-layers': 4,
    '--pipeline-model-parallel-size': 2,
    '--pipeline-schedule': 'zb-v',
    '--global-batch-size': 4,
    '--train-iters': 2,
}


def launch(num_ranks, **changes):
    """Runs the example under torchrun; its standard error, exit code, and seconds."""
    options = SOUND | {f'--{key.replace("_", "-")}': value for key, value in changes.items()}
    flags = [f'{name}={value}' for name, value in options.items()]
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node']
    start = time.monotonic()
    done = subprocess.run(
        [*command, str(num_ranks), str(EXAMPLE), *MODEL, *flags],
        env=os.environ | {'OMP_NUM_THREADS': '1'},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.stderr, done.returncode, time.monotonic() - start


def survivors():
    """Processes that still run the example."""
    running = subprocess.run(['ps', '-eo', 'args'], capture_output=True, text=True, check=True)
    return [line for line in running.stdout.splitlines() if str(EXAMPLE) in line]


@pytest.mark.parametrize(
    ('changes', 'num_ranks', 'said'),
    [
        ({'pipeline_schedule': 'zb-w'}, 2, ("unknown schedule 'zb-w'", 'zb-h1', 'zb-v')),
        ({'num_layers': 3}, 2, ('3 layers cannot be placed on 4 stages', '--num-layers')),
        ({'pipeline_model_parallel_size': 1}, 1, ('zb-v needs at least 2 ranks, not 1',)),
        ({'global_batch_size': 0}, 2, ('--global-batch-size 0 is not a positive multiple',)),
        (
            {'global_batch_size': 3, 'micro_batch_size': 2},
            2,
            ('3 is not a positive multiple of 2',),
        ),
        ({'pipeline_model_parallel_size': 3}, 2, ('2 processes cannot be divided',)),
        ({'data_path': '/nowhere/text'}, 2, ('no /nowhere/text.bin',)),
        ({'load': '/nowhere'}, 2, ('no checkpoint in --load /nowhere',)),
    ],
    ids=lambda value: '-'.join(value) if isinstance(value, dict) else None,
)
def test_refused(changes, num_ranks, said):
    error, code, seconds = launch(num_ranks, **changes)
    assert code != 0
    for words in said:
        # each rank has its own line; all tell the same
        assert error.count(words) >= num_ranks, error
    assert seconds < 60, 'refused, but slowly'
    assert not survivors()


def test_checkpoint_of_another_model(ranks, data, tmp_path):
    common = ['--data-path', data, '--num-layers', 4, '--pipeline-model-parallel-size', 2]
    common += ['--global-batch-size', 2, '--train-iters', 1, '--pipeline-schedule', 'zb-v']
    run(ranks(2), tmp_path, *common, '--save', tmp_path / 'checkpoint')
    error, code, _ = launch(2, num_layers=6, load=tmp_path / 'checkpoint', data_path=data)
    assert code != 0
    assert error.count('--num-layers was 4 and is 6') >= 2, error
    assert not survivors()
