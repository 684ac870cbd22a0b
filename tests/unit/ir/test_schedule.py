"""The schedule as a value."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_zbpp import ModelLayout, Pass, Placement, build
from megatron_zbpp.ir import KINDS
from megatron_zbpp.ir.layout import layers_per_stage, layout_string
from megatron_zbpp.ir.schedule import grid

passes = st.builds(
    Pass, st.sampled_from(KINDS), st.integers(0, 99), st.integers(0, 999), st.integers(0, 9)
)


@given(passes)
def test_pass_text_and_back(p):
    assert Pass.parse(str(p)) == p


def test_placements():
    assert Placement.loop(3, 2).only_route == (0, 1, 2, 0, 1, 2)
    assert Placement.v(3).only_route == (0, 1, 2, 2, 1, 0)
    assert Placement.wave(2, 4).only_route == (0, 1, 1, 0, 0, 1, 1, 0)
    named = Placement.loop(3, 2), Placement.v(3), Placement.wave(3, 2), Placement.wave(2, 4)
    assert [placement.name for placement in named] == ['loop', 'v', 'v', 'wave']
    vee = Placement.v(3)
    assert [vee.stages(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert vee.chunks == (0, 0, 0, 1, 1, 1) and vee.num_chunks == 2
    assert vee.reversed().only_route == (2, 1, 0, 0, 1, 2) and vee.reversed().reversed() == vee
    assert vee.reversed().name == vee.name
    two = Placement.two_way(2)
    assert two.routes == ((0, 1), (1, 0)) and not two.is_one_way
    # a plan's placement has no name, and a model that was laid out for a V fits it
    v = Placement.v(4)
    assert Placement(v.only_route) == v and hash(Placement(v.only_route)) == hash(v)
    assert Placement(v.only_route) != v.reversed()
    schedule = build('zb-v', 2, 3)
    assert schedule.reversed().reversed() == schedule
    assert schedule.reversed().passes == schedule.passes[::-1]
    cells = replace(schedule, together=frozenset({(0, 2), (1, 3)}))
    assert cells.reversed().together == {(1, 2), (0, 3)}
    forward = schedule.forward_only()
    assert sum(map(len, forward.passes)) == 4 * 3
    assert all(p.kind == 'F' for _, p in forward)


# ---- Which layers a stage holds.


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


def test_few_layers():
    assert layers_per_stage(4, Placement.v(2)) == [1] * 4
    # an embedding that counts as a layer is one
    assert layers_per_stage(3, Placement.v(2), embedding=True) == [0, 1, 1, 1]
    layout = ModelLayout(Placement.v(2), (2, 1, 1, 2))
    assert layout.num_chunks == 2
    assert layout.text == layout_string((2, 1, 1, 2)) == 'Ett|t|t|ttL'
    assert layout_string((1, 2), mtp_num_layers=1) == 'Et|ttmL'
    assert [layout.stages(rank) for rank in (0, 1)] == [(0, 3), (1, 2)]
    assert [layout.is_first(stage) for stage in range(4)] == [True, False, False, False]
    assert [layout.is_last(stage) for stage in range(4)] == [False, False, False, True]
    assert ModelLayout(Placement.loop(1), (4,)).text is None


# ---- An order as text, in columns.


@pytest.fixture
def schedule():
    return build('zb-v', 6, 40)


def test_small_one_whole():
    assert grid(build('1f1b', 2, 2)) == (
        'rank 0   0F0   0F1   0BW0  0BW1\nrank 1   1F0   1BW0  1F1   1BW1'
    )


@pytest.mark.parametrize('cell', [(0, 0), (3, 100), (5, 239)])
@pytest.mark.parametrize('width', [30, 80, 200])
def test_marked_cell_is_in_the_cut(schedule, cell, width):
    rank, index = cell
    lines = grid(schedule, [cell], width=width).splitlines()
    assert f'[{schedule.passes[rank][index]}]' in lines[rank]
    assert sum(line.count('[') for line in lines) == 1
    assert max(map(len, lines)) <= width
    assert len(lines) == 6


def test_cuts_are_around_the_marks(schedule):
    short = replace(schedule, passes=(*schedule.passes[:5], schedule.passes[5][:-1]))
    assert grid(short, [(5, 239)]).splitlines()[5].endswith('[___]')
    lines = grid(build('1f1b', 64, 2), [(40, 1)], height=5).splitlines()
    assert lines[0] == '(38 more above)'
    assert lines[3].startswith('rank 40') and '[40F1]' in lines[3]
    assert lines[-1] == '(21 more below)'
    lines = grid(schedule, [(0, 10), (4, 200)]).splitlines()
    assert f'[{schedule.passes[0][10]}]' in lines[0]
    assert f'[{schedule.passes[4][200]}]' in lines[4]
    # behind the passes that are shown, where there are more
    schedule = build('1f1b', 2, 8)
    whole, cut = grid(schedule, width=1000), grid(schedule, width=40)
    assert '…' not in whole
    assert all(line.endswith('…') and len(line) <= 40 for line in cut.splitlines())


# ---- Layers, embedding and loss are spread evenly over ranks, however many stages they hold.


@pytest.mark.parametrize('case', [(22, 8), (46, 16), (62, 32), (30, 8)], ids=str)
@pytest.mark.parametrize('name', ['zb-v', 'zb-h1', 'interleaved', 'hanayo'])
def test_what_divides_by_ranks_is_even(case, name):
    num_layers, num_ranks = case
    placement = build(name, num_ranks, 1).placement
    layers = layers_per_stage(num_layers, placement, embedding=1, loss=1)
    assert sum(layers) == num_layers
    assert layers[-1] == 0 or (name, case) != ('zb-v', (22, 8))
    units = [layers[0] + 1, *layers[1:-1], layers[-1] + 1]
    of_ranks = {sum(units[s] for s in placement.stages(rank)) for rank in range(num_ranks)}
    assert of_ranks == {(num_layers + 2) // num_ranks}
