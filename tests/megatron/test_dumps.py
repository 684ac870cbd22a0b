"""What NVIDIA's loop reads between backward and step: dumps of gradients, their zeros, norms."""

from __future__ import annotations

import functools

import events
import pytest
from grids import grid
from nvidia import needs_training, run
from supported import supports
from test_launch import DISTRIBUTED, NO_CLIPPING, OVERLAP, PIPELINE, WITHOUT_STATE
from test_launch_post_validation import EARLY

pytestmark = needs_training

POSITIONS = ['--max-position-embeddings', 32]  # of which the data has 16: the rest get zeros
UNUSED = 16 * 32
FLAGS = [*PIPELINE, *POSITIONS, *NO_CLIPPING, *WITHOUT_STATE, '--train-iters', 4]
FLAGS += ['--log-interval', 4, '--save-wgrads-interval', 2]
FLAGS += ['--log-num-zeros-in-grad', '--log-params-norm']
OPTIMIZERS = {'plain': [], 'distributed': DISTRIBUTED}


@pytest.fixture(scope='module')
def stock(ranks, tmp_path_factory):
    """By flags: what Megatron's own 1F1B gives and has dumped, from one checkpoint of its own."""
    start = tmp_path_factory.mktemp('start')
    saving = ['--save', start, '--save-interval', 1, '--no-save-optim']
    run(ranks(4), *PIPELINE, *POSITIONS, '--train-iters', 4, '--exit-interval', 1, *saving)

    @functools.cache
    def trained(*more):
        folder = tmp_path_factory.mktemp('dumps')
        flags = ['--load', start, '--ckpt-step', 1, '--save', folder, '--save-interval', 100, *more]
        return run(ranks(4), *FLAGS, *flags, event=events.Dumps(folder))

    return trained


def numbers(norms):
    return {iteration: float.fromhex(norm) for iteration, norm in norms.items()}


def dumped(found):
    """What all ranks have dumped, by iteration."""
    together = {}
    for each in found.reported:
        for iteration, values in each.items():
            together.setdefault(iteration, {}).update(values)
    return together


@supports("NVIDIA's loop: dumps of gradients, {optimizer} optimizer")
@grid(
    schedule=('zb-h1', 'zb-v+post-validation', 'zb-v'),
    optimizer=('plain', 'distributed', 'distributed'),
    overlap=(False, False, True),
)
def test_as_by_megatron(stock, schedule, optimizer, overlap):
    """Dumps of stock are those of the plain reduction: see limits on the overlapped one."""
    name, _, early = schedule.partition('+')
    overlapped = OVERLAP if overlap else []
    plain = stock(*OPTIMIZERS[optimizer])
    expected = stock(*OPTIMIZERS[optimizer], *overlapped)
    ours = [*overlapped, '--pipeline-schedule', name, *(EARLY if early else [])]
    found = stock(*OPTIMIZERS[optimizer], *ours)
    gradients = dumped(plain)
    assert list(gradients) == ['iter_0000002', 'iter_0000004']
    assert dumped(found) == gradients
    scattered = bool(overlapped) and optimizer == 'distributed'
    assert (dumped(expected) == gradients) != scattered, 'see limits'
    assert found.losses == expected.losses and found.parameters == expected.parameters
    assert min(expected.zeros.values()) >= UNUSED and found.zeros == expected.zeros
    if name == 'zb-h1':
        assert found.grad_norms == expected.grad_norms
        assert found.param_norms == expected.param_norms
    for ours, theirs in (
        (found.grad_norms, expected.grad_norms),
        (found.param_norms, expected.param_norms),
    ):
        assert numbers(ours) == pytest.approx(numbers(theirs), rel=1e-6)
