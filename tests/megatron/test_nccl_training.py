"""Megatron trains on groups that order and block as NCCL's: its collectives beside our messages.
Every group that Megatron makes is such a one: tensor-parallel collectives are inside passes, those
of DDP beside the last ones, tied embeddings, norms and parameters behind them."""

from contextlib import contextmanager
from unittest import mock

import injected
import pytest
import torch
import torch.distributed as dist
from example import MODEL, logged
from example import run as run_stock
from grids import grid
from test_auto import told
from torch.distributed import distributed_c10d

from devtools import nccl
from megatron_zbpp.mcore.iteration import batch

pytestmark = pytest.mark.one_release

COMMON = ['--num-layers', 4, '--pipeline-model-parallel-size', 2, '--global-batch-size', 8]
COMMON += ['--train-iters', 4, '--eval-interval', 2, '--eval-iters', 1, '--clip-grad', 1e9]
# processes, flags, whether steps are validated later, the device
SETUPS = {
    'overlapped reduction, all in order': (
        4, ['--overlap-grad-reduce'], 0,
        {'in_order': True, 'synchronises': True},
    ),
    'distributed optimizer, in order': (
        4, ['--use-distributed-optimizer'], 0, {'in_order': True},
    ),
    'tensor parallel, all in order': (
        4, ['--tensor-model-parallel-size', 2], 0, {'in_order': True, 'synchronises': True},
    ),
    'post-validation, synchronised': (2, [], 1, {'synchronises': True}),
}  # fmt: skip


@contextmanager
def emulated(device):
    """Whatever Megatron makes a group of, or computes, is on `device`."""
    made = []

    def new_group(*args, backend=None, original=dist.new_group, **kwargs):
        made.append(backend or nccl.NAME)
        return original(*args, backend=made[-1], **kwargs)

    with (
        mock.patch.object(dist, 'new_group', new_group),
        mock.patch.object(distributed_c10d, 'new_group', new_group),
        mock.patch.object(torch.cuda, 'synchronize', device.synchronize),
        mock.patch.object(batch, 'profiled', device.passing),
    ):
        yield
    assert nccl.NAME in made


def train(argv, clean_steps, mode, *, metrics):
    """Runs on each rank: its early steps; what `auto` says, whose plan is taken for better."""
    with nccl.Device(**mode) as device, emulated(device), told(None, switching=True) as said:
        return injected.train(argv, [], clean_steps, '', metrics=metrics), said


def compare(ranks, data, schedule, size, flags, clean_steps, mode):
    """As Megatron's own schedule on gloo; nothing waits for ever. Gives `train`'s results."""
    common = [*COMMON, *flags, '--data-path', data]
    stock = run_stock(ranks(size), *common, '--pipeline-schedule', 'megatron')
    argv = [*MODEL, *common, '--log-interval', 1000, '--pipeline-schedule', schedule]
    found = ranks(size).run(logged, train, list(map(str, argv)), clean_steps, mode)
    _, lines = found[-1]
    assert tuple(line['loss'] for line in lines if 'loss' in line) == stock.losses
    assert lines[-1]['parameters_sha256'] == stock.parameters
    return [result for result, _ in found]


@grid(setup=tuple(SETUPS), schedule=('zb-h1', 'zb-v'))
def test_same_bits(ranks, data, setup, schedule):
    size, flags, clean_steps, mode = SETUPS[setup]
    found = compare(ranks, data, schedule, size, flags, clean_steps, mode)
    assert not clean_steps or any(early.tried for early, _ in found)


def test_auto_switches(ranks, data):
    """Ranks measure, agree and go over to other channels."""
    mode = {'in_order': True, 'synchronises': True}
    found = compare(ranks, data, 'auto', 2, ['--train-iters', 16], 0, mode)
    assert 'switches' in found[0][1][0]
