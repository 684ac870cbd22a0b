"""Which layers a stage holds."""

from __future__ import annotations

import pytest

from megatron_zbpp.ir import Placement
from megatron_zbpp.ir.layout import ModelLayout, layers_per_stage, layout_string


@pytest.mark.parametrize(
    ('num_layers', 'placement', 'ends', 'counts'),
    [
        (8, Placement.loop(4), (False, False), [2, 2, 2, 2]),
        (9, Placement.loop(4), (False, False), [2, 3, 2, 2]),  # the ends have other work
        (6, Placement.loop(4), (True, True), [1, 2, 2, 1]),
        (7, Placement.loop(4), (True, False), [1, 2, 2, 2]),
        (7, Placement.loop(4), (False, True), [2, 2, 2, 1]),
        (11, Placement.loop(4), (False, False), [3, 3, 3, 2]),
        (11, Placement.loop(4), (True, False), [2, 3, 3, 3]),
        (11, Placement.loop(4), (True, True), [3, 3, 3, 2]),
        (9, Placement.v(2), (False, True), [2, 3, 2, 2]),
        (9, Placement.v(2), (True, True), [2, 3, 3, 1]),
        (8, Placement.v(3), (False, False), [1, 2, 2, 1, 1, 1]),  # one more a rank at most
        # ranks 0 and 1 hold stages 0 and 1, each on one of two routes
        (8, Placement((0, 1, 2, 3), '', (1, 0, 3, 2), (0, 1)), (True, True), [2, 2, 3, 1]),
    ],
)
def test_layers_are_spread_evenly(num_layers, placement, ends, counts):
    assert layers_per_stage(num_layers, placement, *ends) == counts
    assert sum(counts) == num_layers


def test_too_few_layers_are_refused():
    assert layers_per_stage(4, Placement.v(2)) == [1] * 4
    with pytest.raises(ValueError, match=r'3 layers cannot be placed on 4 stages \(2 ranks of 2\)'):
        layers_per_stage(3, Placement.v(2))
    # an embedding that counts as a layer is one
    assert layers_per_stage(3, Placement.v(2), embedding=True) == [0, 1, 1, 1]


def test_a_layout_tells_what_each_rank_builds():
    layout = ModelLayout(Placement.v(2), (2, 1, 1, 2))
    assert layout.num_chunks == 2
    assert layout.text == layout_string((2, 1, 1, 2)) == 'Ett|t|t|ttL'
    assert layout_string((1, 2), mtp_num_layers=1) == 'Et|ttmL'
    assert [layout.stages(rank) for rank in (0, 1)] == [(0, 3), (1, 2)]
    assert [layout.is_first(stage) for stage in range(4)] == [True, False, False, False]
    assert [layout.is_last(stage) for stage in range(4)] == [False, False, False, True]
    assert ModelLayout(Placement.loop(1), (4,)).text is None
