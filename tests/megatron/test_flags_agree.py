"""Ranks of the example with different flags stop at once, and say which has which."""

from __future__ import annotations

import time

import pytest
from example import MODEL, train

COMMON = ['--num-layers', '8', '--pipeline-model-parallel-size', '2', '--train-iters', '2']
COMMON += ['--log-interval', '1000', '--pipeline-watchdog-timeout', '60']


def train_apart(flags, data, metrics, compared=True):
    """Trains with the flags of this rank; what it was told, and whether it had trained by then.

    Flags that are not `compared` are those of a program that has its own.
    """
    from unittest import mock

    import torch.distributed as dist

    from megatron_zbpp.runtime.guard import agreement

    argv = [*MODEL, *COMMON, '--data-path', str(data), *flags[dist.get_rank()]]
    flags_of = agreement.comparable_flags if compared else lambda flags: {}
    try:
        with mock.patch.object(agreement, 'comparable_flags', flags_of):
            train(argv, metrics)
    except agreement.DisagreementError as error:
        return str(error), metrics.exists()
    return None


@pytest.mark.parametrize(
    ('flags', 'said'),
    [
        (
            [['--pipeline-schedule', 'zb-v'], ['--pipeline-schedule', 'zb-h1']],
            'schedule: zb-v on rank 0; zb-h1 on rank 1',
        ),
        (
            [
                ['--pipeline-schedule', 'interleaved'],
                [
                    '--pipeline-schedule',
                    'interleaved',
                    '--num-virtual-stages-per-pipeline-rank',
                    '4',
                ],
            ],
            'schedule: interleaved on rank 0; interleaved with 4 chunks a rank on rank 1',
        ),
        (
            [['--global-batch-size', '4'], ['--global-batch-size', '6']],
            'num_microbatches: 4 on rank 0; 6 on rank 1',
        ),
        (
            [['--hidden-size', '32'], ['--hidden-size', '48']],
            'hidden_size: 32 on rank 0; 48 on rank 1',
        ),
        ([['--bf16'], []], 'bf16: True on rank 0; False on rank 1'),
        (
            [['--num-layers', '8'], ['--num-layers', '4']],
            'num_layers: 8 on rank 0; 4 on rank 1',
        ),
        (
            [[], ['--account-for-embedding-in-pipeline-split', '--num-layers', '7']],
            'account_for_embedding_in_pipeline_split: False on rank 0; True on rank 1',
        ),
        (
            [['--lr-decay-style', 'cosine'], ['--lr-decay-style', 'linear']],
            'lr_decay_style: cosine on rank 0; linear on rank 1',
        ),
    ],
    ids=['schedule', 'chunks', 'microbatches', 'hidden', 'dtype', 'layers', 'split', 'words'],
)
def test_named_instead_of_hanging(ranks, data, tmp_path, flags, said):
    start = time.monotonic()
    told = ranks(2).run(train_apart, flags, data, tmp_path / 'metrics.jsonl', timeout=200)
    assert time.monotonic() - start < 150
    for message, trained in told:
        assert said in message
        assert not trained, 'found at start'


def test_model_is_compared_before_the_first_pass(ranks, data, tmp_path):
    flags = [['--num-layers', '8'], ['--num-layers', '4']]
    metrics = tmp_path / 'metrics.jsonl'
    for message, trained in ranks(2).run(train_apart, flags, data, metrics, False, timeout=200):
        assert message.endswith(
            'num_layers: 8 on rank 0; 4 on rank 1\n'
            '  layers (by rank and chunk): ((2, 2), (3, 3)) on rank 0; ((1, 1), (2, 2)) on rank 1'
        )
        assert not trained


def configured_apart(changes):
    """What a program without flags is told at its first iteration; each rank has its changes."""
    from types import SimpleNamespace

    import torch
    import torch.distributed as dist

    from megatron_zbpp.mcore.iteration.preparation import agreement
    from megatron_zbpp.mcore.session import Session
    from megatron_zbpp.mcore.settings import Settings
    from megatron_zbpp.runtime.channels import Message

    values = {'m': 4, 'chunks': 2, 'shape': (16, 1, 32), 'dtype': torch.float32, 'num_layers': 8}
    values |= changes[dist.get_rank()]
    message = Message(values['shape'], values['dtype'], torch.device('cpu'))
    layout = SimpleNamespace(layout=values.get('layout'))
    config = SimpleNamespace(num_layers=values['num_layers'], pipeline_model_parallel_layout=layout)
    own = agreement(values['m'], values['chunks'], message, False, config)
    session = Session(Settings('zb-v', watchdog_timeout=30))
    session.flags = {'data_path': ['one', 'other']}  # some flags are lists
    try:
        session.agree(own, dist.group.WORLD)
        session.agree(own, dist.group.WORLD)  # known by now: no collective, as below
        if dist.get_rank() == 0:
            session.agree(own, dist.group.WORLD)
    except ValueError as error:
        return str(error)
    finally:
        session.watchdog.stop()
    return None


@pytest.mark.parametrize(
    ('one', 'other', 'said'),
    [
        ({}, {'m': 8}, 'number of microbatches: 4 on rank 0; 8 on rank 1'),
        ({}, {'chunks': 1}, 'model chunks on each rank: 2 on rank 0; 1 on rank 1'),
        (
            {},
            {'shape': (16, 1, 48)},
            'message shape (sequence, micro batch, hidden): (16, 1, 32) on rank 0; '
            '(16, 1, 48) on rank 1',
        ),
        ({'num_layers': 6}, {}, 'num_layers: 6 on rank 0; 8 on rank 1'),
        (
            {'layout': [[['e', 'd'], ['d']], [['d'], ['d', 'l']]]},
            {'layout': [[['e'], ['d']], [['d', 'd'], ['d', 'l']]]},
            'layers (by rank and chunk): ((2, 1), (1, 2)) on rank 0; ((1, 1), (2, 2)) on rank 1',
        ),
        ({}, {}, None),
    ],
    ids=['microbatches', 'chunks', 'shape', 'layers', 'layout', 'equal'],
)
def test_first_iteration(ranks, one, other, said):
    for message in ranks(2).run(configured_apart, [one, other], timeout=200):
        assert said is None if message is None else said in message
