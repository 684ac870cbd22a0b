"""What cannot work is refused by every rank, in words, at once."""

from __future__ import annotations

import contextlib
import os
import sys
import time

import commands
import psutil
import pytest
from example import MODEL, run, train
from outcome import outcome
from paths import ROOT

EXAMPLE = ROOT / 'examples' / 'gpt' / 'pretrain_gpt.py'
SOUND = {
    '--num-layers': 4,
    '--pipeline-model-parallel-size': 2,
    '--pipeline-schedule': 'zb-v',
    '--global-batch-size': 4,
    '--train-iters': 2,
}


def flags(changes):
    """Those of a sound run, with `changes`."""
    options = SOUND | {f'--{key.replace("_", "-")}': value for key, value in changes.items()}
    return [name if value is None else f'{name}={value}' for name, value in options.items()]


def launch(num_ranks, **changes):
    """Runs the example under torchrun; its standard error, exit code, and seconds."""
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node']
    command += [num_ranks, EXAMPLE, *MODEL, *flags(changes)]
    start = time.monotonic()
    done = commands.run(command, timeout=120, env={'LAUNCHED_BY': str(os.getpid())})
    return done.stderr, done.returncode, time.monotonic() - start


def survivors():
    """Processes of `launch` that still run; other tests may run the example meanwhile."""
    found = []
    for process in psutil.process_iter(['cmdline']):
        with contextlib.suppress(psutil.Error):
            if process.environ().get('LAUNCHED_BY') == str(os.getpid()):
                found.append(process.info['cmdline'])
    return found


def test_refused():
    """Each rank has its own line, and ends though there are process groups."""
    error, code, seconds = launch(2, data_path='/nowhere/text')
    assert code != 0
    assert error.count('no /nowhere/text.bin') >= 2, error
    assert seconds < 150, 'refused, but slowly'
    assert not survivors()


def ended(argv, metrics):
    """On each rank: what the example's training ends with; None: it is done."""
    try:
        train(argv, metrics)
    except (SystemExit, Exception) as error:
        return str(error)
    return None


def train_with(ranks, metrics, **changes):
    return ranks(2).run(ended, [*MODEL, *flags(changes)], metrics)


def test_refused_while_others_load(ranks, tmp_path):
    for said in train_with(ranks, tmp_path / 'metrics', load='/nowhere'):
        assert 'no checkpoint in --load /nowhere' in said


def test_a_loss_that_is_no_number():
    """It ends the training, as it ends NVIDIA's loop; who wants to go on says so."""
    error, code, _ = launch(2, lr=1e30, train_iters=5)
    assert code != 0 and 'the loss is nan: lower --lr' in error, error
    assert not survivors()


def test_a_loss_that_may_be_no_number(ranks, data, tmp_path):
    changes = {'lr': 1e30, 'train_iters': 5, 'no_check_for_nan_in_loss_and_grad': None}
    metrics = tmp_path / 'metrics'
    assert train_with(ranks, metrics, data_path=data, **changes) == [None, None]
    assert metrics.read_text().count('"loss": "nan"') > 1


def parse(argv):
    """On each rank: how the program ends, and what it says."""
    import pretrain_gpt

    return outcome(pretrain_gpt.parse_args, argv)


@pytest.mark.parametrize(
    ('changes', 'num_ranks', 'said'),
    [
        ({'pipeline_schedule': 'zb-w'}, 2, ("unknown schedule 'zb-w'", 'zb-h1', 'zb-v')),
        ({'num_layers': 3}, 2, ('3 layers cannot be placed on 4 stages', '--num-layers')),
        ({'pipeline_model_parallel_size': 1}, 1, ('zb-v needs at least 2 ranks, not 1',)),
        (
            {'pipeline_model_parallel_size': 1, 'pipeline_schedule': 'dualpipe'},
            2,
            ('dualpipe needs at least 2 pipeline ranks a replica, not 1',),
        ),
        ({'global_batch_size': 0}, 2, ('--global-batch-size 0 is not a positive multiple',)),
        (
            {'global_batch_size': 3, 'micro_batch_size': 2},
            2,
            ('3 is not a positive multiple of 2',),
        ),
        ({'pipeline_model_parallel_size': 3}, 2, ('2 processes cannot be divided',)),
        (
            {'pipeline_schedule': 'megatron', 'pipeline_offload': 'all'},
            2,
            ('--pipeline-offload is not for --pipeline-schedule megatron',),
        ),
    ],
    ids=lambda value: '-'.join(value) if isinstance(value, dict) else None,
)
def test_refused_by_the_parser(ranks, changes, num_ranks, said):
    for found in ranks(num_ranks).run(parse, [*MODEL, *flags(changes)]):
        assert found.code == 2
        assert all(words in found.said for words in said), found


def test_checkpoint_of_another_model(ranks, data, tmp_path):
    common = ['--data-path', data, '--num-layers', 4, '--pipeline-model-parallel-size', 2]
    common += ['--global-batch-size', 2, '--train-iters', 1, '--pipeline-schedule', 'zb-v']
    run(ranks(2), *common, '--save', tmp_path / 'checkpoint')
    changes = {'num_layers': 6, 'load': tmp_path / 'checkpoint', 'data_path': data}
    for said in train_with(ranks, tmp_path / 'metrics', **changes):
        assert '--num-layers was 4 and is 6' in said
