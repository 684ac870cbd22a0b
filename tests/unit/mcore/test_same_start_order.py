"""The order in which stock Megatron draws the parts of our stages."""

import re
from random import Random
from types import SimpleNamespace

import pytest

from megatron_zbpp import Placement
from megatron_zbpp.ir.layout import layers_per_stage, layout_string
from megatron_zbpp.mcore.placement_independent_init import Part, can_be_drawn, chains
from megatron_zbpp.mcore.settings import Settings
from megatron_zbpp.mcore.training_log import losses_from_scratch


def stages(layers, placement, mtp=0):
    return layout_string(layers_per_stage(layers, placement), mtp).split('|')


def test_a_rank_of_stock_draws_its_stages_in_turn():
    """Interleaved, a rank has stages that lie apart."""
    ours = stages(8, Placement.v(2).reversed())
    assert chains(stages(8, Placement.loop(2, 2)), ours, 2) == (
        (Part(0, 0), Part(0, 1), Part(0, 2), Part(2, 1), Part(2, 2)),
        (Part(1, 1), Part(1, 2), Part(3, 1), Part(3, 2), Part(3, 3)),
    )
    ours = stages(4, Placement.v(2).reversed(), mtp=1)
    assert ours == ['Et', 't', 't', 'tmL']
    _, last = chains(['Ett', 'ttmL'], ours, 2)
    assert last == (Part(3, 0), Part(2, 1), Part(3, 1), Part(3, 2))


@pytest.mark.parametrize('p', [2, 3, 4, 5, 8])
@pytest.mark.parametrize('chunks', [2, 4])
def test_whatever_the_layers_of_a_stage(p, chunks):
    """No part is drawn twice or left out, and nobody waits forever."""
    placement, draw = Placement.wave(p, chunks).reversed(), Random(p)
    for _ in range(20):
        ends = sorted(draw.choices(range(25), k=placement.num_stages - 1))
        counts = [b - a for a, b in zip([0, *ends], [*ends, 24], strict=True)]
        ours = layout_string(counts).split('|')
        for virtual in (1, 3):
            drawn = chains(stages(24, Placement.loop(p, virtual)), ours, p)
            parts = [part for chain in drawn for part in chain]
            assert len(parts) == len({*parts}) == 24 + 2
            assert can_be_drawn(drawn, placement)


def test_ranks_that_would_wait_for_each_other():
    """Of four chunks a rank, the last begins with what stock draws before the third."""
    placement = Placement.wave(2, 4).reversed()
    drawn = chains(['Etttt', 'ttttmL'], stages(8, placement, mtp=1), 2)
    assert not can_be_drawn(drawn, placement)
    # where first and last stage are on different ranks, both end together
    placement = Placement.loop(2, 3)
    drawn = chains(['Ettt', 'tttL'], stages(6, placement), 2)
    assert not can_be_drawn(drawn, placement)
    wider = Placement.loop(4, 2)
    assert can_be_drawn(chains(stages(8, Placement.loop(4)), stages(8, wider), 4), wider)


# ---- What the banner and `zbpp doctor` say of losses from scratch.


LOOP, V = Placement.loop(2), Placement.v(2).reversed()


@pytest.mark.parametrize(
    ('settings', 'placement', 'dropout', 'said'),
    [
        (Settings('zb-h1'), LOOP, 0.1, "are stock Megatron's"),
        (Settings('zb-v'), V, 0.0, "are stock Megatron's; steps that are clipped differ"),
        (
            Settings('zb-v'),
            V,
            0.1,
            "differ from stock Megatron's: other ranks draw the random numbers",
        ),
        (
            Settings('zb-v', dropout_seeds=True),
            V,
            0.1,
            r'differ .*: random numbers of .* 0\.1 are seeded',
        ),
        (Settings('zb-h1', dropout_seeds=True), LOOP, 0.1, 'differ .* as by 1f1b with that flag'),
        (Settings('zb-v', dropout_seeds=True), V, 0.0, "are stock Megatron's"),
        (Settings('zb-v', same_start=False), V, 0.0, 'differ from stock .*no-pipeline-same-start'),
        (Settings('pipedream'), LOOP, 0.0, 'pipedream is asynchronous'),
    ],
)
def test_one_line(settings, placement, dropout, said):
    line = losses_from_scratch(settings, placement, SimpleNamespace(hidden_dropout=dropout))
    assert re.search(said, line), line


@pytest.mark.parametrize('value', [('moe_input_jitter_eps', 0.01), ('attention_dropout', 0.1)])
def test_all_that_draws_is_named(value):
    """Not dropout alone, and not where a schedule keeps each rank's draws."""
    config = SimpleNamespace(**dict([value]))
    line = losses_from_scratch(Settings('zb-v'), V, config)
    assert f'{value[0]} {value[1]}' in line and 'differ' in line
    assert "are stock Megatron's" in losses_from_scratch(Settings('zb-h1'), LOOP, config)


def test_stochastic_rounding():
    """Backwards round gradients of fp4 at random: only 1F1B's own order draws the same."""
    fp4 = SimpleNamespace(fp4='e2m1')
    assert 'fp4' in losses_from_scratch(Settings('zb-h1'), LOOP, fp4)
    assert "are stock Megatron's" in losses_from_scratch(Settings('1f1b'), LOOP, fp4)
