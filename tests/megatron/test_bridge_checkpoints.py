"""Checkpoints of Megatron-Bridge's LoRA: adapters go to any placement, what is by rank is named."""

from __future__ import annotations

import functools

import pytest
import recipe
from gpu import CUDA
from recipe import LORA
from supported import refuses, supports
from test_bridge import WHAT, bridge_ranks  # noqa: F401

pytestmark = [pytest.mark.te, pytest.mark.skipif(CUDA, reason='tested on the CPU')]

CHUNKS = {'model.virtual_pipeline_model_parallel_size': 2}
STOCK, INTERLEAVED = "Megatron's 1F1B", "Megatron's interleaved schedule"
# schedule, changes to the recipe
RUNS = {
    STOCK: ('megatron', {}),
    INTERLEAVED: ('megatron', CHUNKS),
    'zb-v': ('zb-v', {}),
    'interleaved': ('interleaved', CHUNKS),
}
FLAGS = {
    'train.global_batch_size': 4,  # Megatron's interleaved schedule asks for multiples of ranks
    'checkpoint.save_rng': False,
    'checkpoint.load_rng': False,
    'checkpoint.async_save': False,
}
DISTRIBUTED = {
    'ddp.use_distributed_optimizer': True,
    'optimizer.use_distributed_optimizer': True,
}
FULL = pytest.mark.full


@pytest.fixture(scope='module')
def run(bridge_ranks, tmp_path_factory):  # noqa: F811
    """`run(name, changes)`: what LoRA gives by that schedule, on the last rank; or what is said."""
    weights = tmp_path_factory.mktemp('weights')
    bridge_ranks(2).run(recipe.save_weights, weights, LORA, timeout=240)

    def trained(name, changes):
        schedule, own = RUNS[name]
        changes = {**FLAGS, 'checkpoint.hf_source_path': str(weights), **own, **changes}
        return bridge_ranks(2).run(attempt, weights, schedule, changes, timeout=240)[-1]

    return trained


def attempt(weights, schedule, changes):
    """On each rank: what a run leaves, or what it says."""
    try:
        return recipe.train(weights, schedule, False, LORA, changes)
    except ValueError as error:
        return str(error)


@pytest.fixture(scope='module')
def saved(run, tmp_path_factory):
    """By who saves, and with which optimizer: how to go on after two iterations; what then came."""

    @functools.cache
    def trained(name, distributed):
        folder = tmp_path_factory.mktemp('saved')
        flags = DISTRIBUTED if distributed else {}
        whole = run(name, {**flags, **saving(folder)})
        loading = {**flags, 'checkpoint.load': str(folder), 'checkpoint.ckpt_step': 2}
        return loading, whole, folder

    return trained


def saving(folder):
    """Save there, for Hugging Face, too."""
    return {
        'checkpoint.save': str(folder),
        'checkpoint.save_interval': 2,
        'checkpoint.also_save_hf_checkpoint': True,
    }


def adapters(folder):
    """Adapters by Hugging Face's names, of the last iteration, from its file."""
    (file,) = folder.glob('iter_0000004/**/adapter_model.safetensors')
    return file.read_bytes()


@supports(WHAT + 'checkpoints of LoRA, saved by {saver}', '{loader}')
@pytest.mark.parametrize(
    ('saver', 'loader'),
    [
        (STOCK, 'zb-v'),
        pytest.param('interleaved', 'zb-v', marks=FULL),
        pytest.param('zb-v', 'interleaved', marks=FULL),
        pytest.param(INTERLEAVED, 'zb-v', marks=FULL),
    ],
)
def test_adapters_go_to_any_placement(run, saved, tmp_path, saver, loader):
    """They are kept by the layers' numbers, in files for Hugging Face, too."""
    loading, whole, folder = saved(saver, False)
    losses, last = whole.losses[2:], folder
    if saver == INTERLEAVED:  # in Bridge it gives other losses than 1F1B
        last = tmp_path / 'stock'
        whole = run(STOCK, {**loading, **saving(last)})
        losses = whole.losses
    found = run(loader, {**loading, **saving(tmp_path / 'ours')})
    assert found.losses == losses and len(found.losses) == 2
    assert found.weights == whole.weights
    assert adapters(tmp_path / 'ours') == adapters(last)


@pytest.mark.full
@supports(WHAT + 'checkpoints of LoRA, loaded by Megatron', 'zb-v')
def test_adapters_come_from_a_v(run, saved, tmp_path):
    loading, whole, folder = saved('zb-v', False)
    found = run(STOCK, {**loading, **saving(tmp_path)})
    assert found.losses == whole.losses[2:] and len(found.losses) == 2
    assert found.weights == whole.weights
    assert adapters(folder) == adapters(tmp_path)


@refuses(
    WHAT + "checkpoint of another placement, with the distributed optimizer's state",
    'that is kept by rank, unless it is fully reshardable',
    'zb-v',
)
@pytest.mark.parametrize(
    ('saver', 'loader', 'held'),
    [
        (INTERLEAVED, 'zb-v', ('E 1 | 3', '2 | 3')),
        pytest.param('zb-v', 'interleaved', ('2 | 3', 'E 1 | 3'), marks=FULL),
        pytest.param(STOCK, 'zb-v', ('E 1-2', '2 | 3'), marks=FULL),
    ],
)
def test_state_by_rank_is_refused(run, saved, saver, loader, held):
    """By name; and the cure that needs no other checkpoint is one."""
    loading, *_ = saved(saver, True)
    said = run(loader, loading)
    assert isinstance(said, str)
    assert "the distributed optimizer's state in this checkpoint is kept by rank" in said
    assert f'rank 0 holds layers {held[0]} by {saver}, but {held[1]} by {loader}' in said
    assert 'checkpoint.load_optim to False' in said
    cured = run(loader, {**loading, 'checkpoint.load_optim': False})
    assert len(cured.losses) == 2
