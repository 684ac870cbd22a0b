"""Ranks of one node: what its host has left for their activations, and partners side by side."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from megatron_zbpp import build
from megatron_zbpp.launch import paired, rank_for
from megatron_zbpp.mcore.job import model_shape
from megatron_zbpp.runtime.activations import copies
from megatron_zbpp.techniques.offload import offloaded

GIB = 2**30


def write(root, files):
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


# files by their paths, as kernels write them: of a machine, of groups of the second and first kind
KERNELS = json.loads(Path(__file__).with_name('host_memory.json').read_text())
MACHINE, SECOND, FIRST = KERNELS.values()


@pytest.mark.parametrize(
    ('files', 'expected', 'file'),
    [
        (MACHINE, 2 * GIB, 'proc/meminfo'),
        (MACHINE | SECOND, 150, 'sys/fs/cgroup/job/memory.max'),
        (MACHINE | FIRST, GIB - 700, 'sys/fs/cgroup/memory/job/memory.limit_in_bytes'),
        (SECOND, 150, 'sys/fs/cgroup/job/memory.max'),
    ],
)
def test_the_least_counts(tmp_path, files, expected, file):
    """Of the machine, and of each group that this process is in; cached files are free."""
    write(tmp_path, files)
    assert copies.room(tmp_path) == (expected, tmp_path / file)


def test_where_nothing_tells(tmp_path):
    assert copies.room(tmp_path) is None
    # this machine says something, and in words
    found = copies.room()
    assert found is None or (found.nbytes > 0 and ' GiB (/' in str(found))


def launch(**changes):
    sizes = {
        'hidden_size': 1024, 'num_attention_heads': 16, 'seq_length': 2048, 'micro_batch_size': 1,
        'num_experts': None, 'multi_latent_attention': False, 'tensor_model_parallel_size': 1,
        'kv_channels': None, 'group_query_attention': False, 'ffn_hidden_size': None,
        'swiglu': False, 'sequence_parallel': False, 'bf16': True, 'fp16': False,
        'hidden_dropout': 0.0, 'recompute_granularity': None, 'context_parallel_size': 1,
        'num_layers': 32,
    }  # fmt: skip
    return Namespace(**sizes | changes)


TORCHRUN = {'RANK': '4', 'LOCAL_RANK': '0', 'LOCAL_WORLD_SIZE': '4', 'WORLD_SIZE': '16'}
SCHEDULE = offloaded(build('1f1b', 8, 16), 'all')


def needed(monkeypatch, room, args, environment=TORCHRUN):
    """What is said where the host has so much; None: nothing."""
    monkeypatch.setattr(copies, 'room', lambda: copies.Room(room, Path('/a/limit')))
    try:
        model_shape.require_host_memory(args, SCHEDULE, environment)
    except ValueError as error:
        return str(error)
    return None


def test_of_the_ranks_of_this_node(monkeypatch):
    """Here pipeline ranks 2 and 3, of two replicas: as many bytes as the graph says."""
    held = model_shape.on_host(SCHEDULE, 1.0)
    layer = model_shape.layer_memory(launch()).activation
    total = 2 * (held[2] + held[3]) * layer * 32 / 8
    assert total > 0 and held[0] > held[7] == 0
    said = needed(monkeypatch, int(0.8 * total), launch())
    assert said.startswith(f'1f1b + offload all needs about {total / GIB:.3g} GiB of host memory')
    assert 'for the 4 ranks of this node' in said and '(/a/limit) left: offload fewer' in said
    assert needed(monkeypatch, int(total), launch()) is None


@pytest.mark.parametrize(
    ('args', 'environment'), [(launch(num_experts=8), TORCHRUN), (launch(), {})]
)
def test_what_is_not_known_is_not_refused(monkeypatch, args, environment):
    """Layers that are not dense, a launch line without ranks."""
    assert needed(monkeypatch, 1, args, environment) is None


# ---- Pairs on one node, whatever the sizes.


# world, stages, tensor, local
SIZES = [(16, 16, 1, 8), (4, 4, 1, 2), (32, 8, 2, 8), (32, 4, 4, 8), (64, 4, 2, 8), (24, 6, 1, 4)]
SIZES += [(8, 8, 1, 8)]


@pytest.mark.parametrize('sizes', SIZES, ids=str)
def test_partners_are_on_one_node(sizes):
    world, stages, tensor, local = sizes
    ranks = list(paired(*sizes))
    assert sorted(ranks) == list(range(world)) and ranks[0] == 0
    node = {rank: place // local for place, rank in enumerate(ranks)}
    each = world // stages
    for rank in range(world):
        stage, own = divmod(rank, each)
        assert node[rank] == node[(stages - 1 - stage) * each + own]
        assert node[rank] == node[rank // tensor * tensor]


def test_by_hand():
    """As of the paper's pairs on two nodes: 0 to 3 with 12 to 15. An odd stage is alone."""
    assert {*[*paired(16, 16, 1, 8)][:8]} == {0, 1, 2, 3, 12, 13, 14, 15}
    assert list(paired(10, 5, 1, 2)) == [0, 8, 1, 9, 2, 6, 3, 7, 4, 5]


def test_from_what_torchrun_says():
    words = ['--pipeline-model-parallel-size', '4', '--lr', '1']
    said = {'WORLD_SIZE': '4', 'LOCAL_WORLD_SIZE': '2'}
    assert [rank_for(words, {'RANK': str(r), **said}) for r in range(4)] == [0, 3, 1, 2]
