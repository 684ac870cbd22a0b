"""Muon and its like, under schedules of ours and steps that are validated later."""

import importlib.util

import events
import pytest
from grids import some
from nvidia import EARLY, by, go_on, known, needs_training, run, source
from supported import WAITS, absent, supports
from test_launch import DISTRIBUTED, LLAMA, NO_CLIPPING, OVERLAP, PIPELINE

pytestmark = [
    needs_training,
    pytest.mark.skipif(
        importlib.util.find_spec('emerging_optimizers') is None,
        reason='Megatron takes Muon from emerging-optimizers: from 0.3 with Python 3.12, and '
        'before from 0.1, which is in no index',
    ),
]
MUON = [*PIPELINE, *LLAMA, '--optimizer', 'muon', '--train-iters', 4]
SHARED_OUT = 'Muon, whose ranks step some layers each'
GATHERING = ['--bf16', *DISTRIBUTED, *OVERLAP, '--overlap-param-gather']
# processes, flags
CASES = {
    'Muon': (2, []),
    'Muon in bf16': (2, ['--bf16']),
    SHARED_OUT: (4, ['--bf16', *DISTRIBUTED]),
}


@supports('{case}', 'zb-v+post-validation')
@some('case', ['Muon', SHARED_OUT], *CASES)
def test_identical_to_megatron(ranks, tmp_path, case):
    """From a checkpoint of Megatron's own 1F1B, with steps that are validated later."""
    compare(ranks, tmp_path, *spelt(ranks, case))


def spelt(ranks, case):
    """Processes and flags, in the words of this release."""
    size, flags = CASES[case]
    if case == SHARED_OUT and by_name(ranks):
        flags = ['--bf16', '--optimizer', 'dist_muon']
    return size, flags


def by_name(ranks):
    """Whether ranks share layers out where the optimizer is named so: until 0.17."""
    return '--optimizer soap' not in ranks(2).run(known)[0]


def in_buffers(ranks):
    """Whether NVIDIA's script lets DDP gather layers that ranks share out: from 0.20 on."""
    return (
        'use_layer_wise_param_layout'
        in ranks(2).run(source, 'megatron.training.models.dist_utils')[0]
    )


@pytest.mark.full
@supports('Muon, whose forwards gather layers', 'zb-v+post-validation', WAITS)
def test_gathering_into_gradients(ranks, tmp_path):
    """Its steps wait, which forwards would overtake that gather layers of other ranks."""
    if by_name(ranks):
        absent('from 0.18 on')
    if in_buffers(ranks):
        pytest.skip('see test_gathering_into_buffers')
    compare(ranks, tmp_path, 4, GATHERING, waits=True)


@pytest.mark.full
@supports('Muon, whose forwards gather layers', 'zb-v+post-validation')
def test_gathering_into_buffers(ranks, tmp_path):
    if by_name(ranks) or not in_buffers(ranks):
        pytest.skip('from 0.20 on')
    compare(ranks, tmp_path, 4, GATHERING)
    nobody_waits(ranks, 4, GATHERING)


def compare(ranks, tmp_path, size, flags, waits=False):
    shared = not {*DISTRIBUTED, 'dist_muon'}.isdisjoint(flags)
    flags = [*MUON, *flags, *NO_CLIPPING]
    ours = by('zb-v+post-validation')
    how = {'sharded': shared, 'optimizer': False, 'waits': waits}
    found, stock = go_on(ranks(size), tmp_path, flags, ours, **how)
    # Adam's part, from 0.20 on, is in shards, which another placement cuts elsewhere
    ends = {'embedding', 'output_layer'} if shared else set()
    assert found.optimizer.keys() == stock.optimizer.keys() > ends
    assert all(
        found.optimizer[name] == stock.optimizer[name] for name in stock.optimizer.keys() - ends
    )


@some('case', [SHARED_OUT], *CASES)
def test_clipped_steps_are_taken_back(ranks, case):
    """As synchronous steps have it, to the bit, in whatever iteration the norm is too large."""
    size, flags = spelt(ranks, case)
    flags = [*MUON, *flags, '--pipeline-schedule', 'zb-h1', '--log-num-zeros-in-grad']
    norms = [float.fromhex(norm) for norm in run(ranks(size), *flags).grad_norms.values()]
    flags += ['--clip-grad', sorted(norms)[len(norms) // 2]]
    synchronous = run(ranks(size), *flags)
    assert run(ranks(size), *flags, *EARLY) == synchronous


@some('case', [SHARED_OUT], *CASES)
def test_nobody_waits(ranks, case):
    nobody_waits(ranks, *spelt(ranks, case))


def nobody_waits(ranks, size, flags):
    """In the last iteration, no call that all pipeline ranks must come to; else there are some."""
    flags = [*MUON, *flags, *NO_CLIPPING, '--pipeline-schedule', 'zb-v', '--log-interval', 3]
    assert all(run(ranks(size), *flags, event=events.waits).reported)
    assert not any(run(ranks(size), *flags, *EARLY, event=events.waits).reported)
