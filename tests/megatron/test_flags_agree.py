"""Ranks of the example with different flags stop at once, and say which has which."""

import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from example import MODEL, train, words
from outcome import error_of

from megatron_zbpp.mcore.settings import Settings
from megatron_zbpp.runtime.channels import Message
from megatron_zbpp.runtime.guard import agreement

COMMON = ['--num-layers', '8', '--pipeline-model-parallel-size', '2', '--train-iters', '2']
COMMON += ['--log-interval', '1000', '--pipeline-watchdog-timeout', '60']


def train_apart(flags, data, metrics, compared=True):
    """Trains with the flags of this rank; what it was told, and whether it had trained by then.
    Flags that are not `compared` are those of a program that has its own."""
    argv = [*MODEL, *COMMON, '--data-path', str(data), *flags[dist.get_rank()]]
    flags_of = agreement.comparable_flags if compared else lambda flags: {}
    try:
        with mock.patch.object(agreement, 'comparable_flags', flags_of):
            train(argv, metrics)
    except agreement.DisagreementError as error:
        return str(error), metrics.exists()
    return None


ZB_V = '--pipeline-schedule zb-v'
LOOP = '--pipeline-schedule interleaved'
CHUNKS = f'{LOOP} --num-virtual-stages-per-pipeline-rank 4'
DECAY = '--lr-decay-style'
SPLIT = '--account-for-embedding-in-pipeline-split'
# flags of each rank, and what is said of each
APART = {
    'schedule': (ZB_V, '--pipeline-schedule zb-h1', 'schedule: zb-v', 'zb-h1'),
    'chunks': (LOOP, CHUNKS, 'interleaved', 'interleaved with 4 chunks a rank'),
    'microbatches': ('--global-batch-size 4', '--global-batch-size 6', 'num_microbatches: 4', '6'),
    'hidden': ('--hidden-size 32', '--hidden-size 48', 'hidden_size: 32', '48'),
    'dtype': ('--bf16', '', 'bf16: True', 'False'),
    'layers': ('--num-layers 8', '--num-layers 4', 'num_layers: 8', '4'),
    'split': ('', f'{SPLIT} --num-layers 7', f'{SPLIT[2:].replace("-", "_")}: False', 'True'),
    'words': (f'{DECAY} cosine', f'{DECAY} linear', 'lr_decay_style: cosine', 'linear'),
}


@pytest.mark.parametrize('what', APART)
def test_named_instead_of_hanging(ranks, data, tmp_path, what):
    *flags, one, other = APART[what]
    flags, said = [each.split() for each in flags], f'{one} on rank 0; {other} on rank 1'
    told = ranks(2).run(train_apart, flags, data, tmp_path / 'metrics.jsonl')
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


SHAPE = 'message shape (sequence, micro batch, hidden)'
PLACED = [[['e', 'd'], ['d']], [['d'], ['d', 'l']]]
ELSEWHERE = [[['e'], ['d']], [['d', 'd'], ['d', 'l']]]


@pytest.mark.parametrize(
    ('one', 'other', 'said'),
    [
        ({}, {'m': 8}, 'number of microbatches: 4 on rank 0; 8 on rank 1'),
        ({}, {'chunks': 1}, 'model chunks on each rank: 2 on rank 0; 1 on rank 1'),
        ({}, {'shape': (16, 1, 48)}, f'{SHAPE}: (16, 1, 32) on rank 0; (16, 1, 48) on rank 1'),
        ({'num_layers': 6}, {}, 'num_layers: 6 on rank 0; 8 on rank 1'),
        (
            {'layout': PLACED},
            {'layout': ELSEWHERE},
            'layers (by rank and chunk): ((2, 1), (1, 2)) on rank 0; ((1, 1), (2, 2)) on rank 1',
        ),
        ({}, {}, None),
    ],
    ids=['microbatches', 'chunks', 'shape', 'layers', 'layout', 'equal'],
)
@pytest.mark.on_ranks(2)
def test_first_iteration(one, other, said):
    """What a program without flags is told then, where each rank has its changes."""
    from megatron_zbpp.mcore.iteration.preparation import agreement
    from megatron_zbpp.mcore.session import Session

    values = {'m': 4, 'chunks': 2, 'shape': (16, 1, 32), 'dtype': torch.float32, 'num_layers': 8}
    values |= (one, other)[dist.get_rank()]
    message = Message(values['shape'], values['dtype'], torch.device('cpu'))
    layout = SimpleNamespace(layout=values.get('layout'))
    config = SimpleNamespace(num_layers=values['num_layers'], pipeline_model_parallel_layout=layout)
    own = agreement(values['m'], values['chunks'], message, False, config)
    session = Session(Settings('zb-v', watchdog_timeout=30))
    session.flags = {'data_path': ['one', 'other']}  # some flags are lists
    told = error_of(session.agree, own, dist.group.WORLD)
    assert said is None if told is None else said in told
    if told is None:  # known by now: no collective
        session.agree(own, dist.group.WORLD)
        if dist.get_rank() == 0:
            session.agree(own, dist.group.WORLD)
    session.watchdog.stop()


OWN = """
from megatron_zbpp.ir import Placement, Schedule
from megatron_zbpp.schedules import family
from megatron_zbpp.schedules.construct.phases import phases


@family('mine')
def mine(num_ranks, num_microbatches):
    m = num_microbatches
    orders = (
        phases([rank], m, [({lead}, 'F', 'lead'), (m, 'F B W', 'steady')])
        for rank in range(num_ranks)
    )
    return Schedule.of('mine', Placement.loop(num_ranks), m, orders)
"""


def train_mine(module, folders, data, metrics):
    """What a training is told by the module of that name in this rank's folder, if anything."""
    argv = words(data, f'{module}:mine', '--train-iters', 2, '--pipeline-watchdog-timeout', 60)
    with mock.patch.object(sys, 'path', [str(folders[dist.get_rank()]), *sys.path]):
        return error_of(train, argv, metrics)


@pytest.mark.parametrize(('module', 'leads'), [('alike', (1, 1)), ('apart', (1, 2))])
def test_own_family(ranks, data, tmp_path, module, leads):
    folders = [tmp_path / str(rank) for rank in range(2)]
    for folder, lead in zip(folders, leads, strict=True):
        folder.mkdir()
        (folder / f'own_{module}.py').write_text(OWN.format(lead=lead))
    metrics = tmp_path / 'metrics.jsonl'
    told = ranks(2).run(train_mine, f'own_{module}', folders, data, metrics, timeout=200)
    if module == 'alike':
        assert told == [None, None] and metrics.exists()
        return
    for message in told:
        assert 'what own_apart:mine makes: mine (' in message and 'on rank 1' in message
    assert not metrics.exists()
