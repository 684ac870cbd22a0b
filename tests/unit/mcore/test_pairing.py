"""Pairs on one node, whatever the sizes; what does not fit is refused by name."""

from __future__ import annotations

import pytest

from megatron_zbpp.launch import paired, rank_for

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


@pytest.mark.parametrize(
    ('sizes', 'match'),
    [
        ((6, 6, 1, 3), 'nodes of 3 processes cannot hold both of a pair, 1 ranks'),
        ((16, 2, 8, 8), 'nodes of 8 processes cannot hold both of a pair, 8 ranks'),
        ((6, 4, 1, 2), '6 ranks are not a multiple of 4 pipeline ranks'),
    ],
)
def test_what_does_not_fit(sizes, match):
    with pytest.raises(ValueError, match=match):
        list(paired(*sizes))


def test_from_what_torchrun_says():
    words = ['--pipeline-model-parallel-size', '4', '--lr', '1']
    said = {'WORLD_SIZE': '4', 'LOCAL_WORLD_SIZE': '2'}
    assert [rank_for(words, {'RANK': str(r), **said}) for r in range(4)] == [0, 3, 1, 2]
    with pytest.raises(ValueError, match='needs RANK: launch with torchrun'):
        rank_for(words, said)
    with pytest.raises(ValueError, match='--use-tp-pp-dp-mapping'):
        rank_for([*words, '--use-tp-pp-dp-mapping'], {'RANK': '0', **said})
