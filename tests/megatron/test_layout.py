"""How many layers each stage gets."""

from __future__ import annotations

import pytest


def layers_by_rank(num_layers, name, num_ranks, ends):
    """Layers of each stage, and of each rank with embedding and loss where they count."""
    from megatron_zbpp.ir.layout import layers_per_stage
    from megatron_zbpp.schedules import build

    placement = build(name, num_ranks, 1).placement
    layers = layers_per_stage(num_layers, placement, embedding=ends, loss=ends)
    units = list(layers)
    units[0] += ends
    units[-1] += ends
    return layers, [sum(units[s] for s in placement.stages(rank)) for rank in range(num_ranks)]


@pytest.mark.parametrize(
    ('case', 'expected'),
    [
        ((8, 'zb-v', 4, False), [1] * 8),
        ((9, 'zb-h1', 4, False), [2, 3, 2, 2]),
        ((11, 'zb-h1', 4, False), [3, 3, 3, 2]),
        ((6, 'zb-h1', 4, True), [1, 2, 2, 1]),
        ((10, 'zb-v', 4, False), [1, 2, 2, 1, 1, 1, 1, 1]),
        ((22, 'zb-v', 8, True), [1, *[2] * 7, *[1] * 7, 0]),
    ],
    ids=str,
)
def test_stages(ranks, case, expected):
    for layers, _ in ranks(2).run(layers_by_rank, *case):
        assert layers == expected


@pytest.mark.parametrize('case', [(22, 8), (46, 16), (62, 32), (30, 8)], ids=str)
@pytest.mark.parametrize('name', ['zb-v', 'zb-h1', 'interleaved', 'hanayo'])
def test_what_divides_by_ranks_is_even(ranks, case, name):
    num_layers, num_ranks = case
    for layers, by_rank in ranks(2).run(layers_by_rank, num_layers, name, num_ranks, True):
        assert sum(layers) == num_layers
        assert set(by_rank) == {(num_layers + 2) // num_ranks}


def refused():
    try:
        layers_by_rank(7, 'zb-v', 4, False)
    except ValueError as error:
        return str(error)


def test_too_few(ranks):
    for message in ranks(2).run(refused):
        assert '7 layers cannot be placed on 8 stages' in message and '--num-layers' in message
        assert 'zbpp plan --num-layers 7' in message
