"""The order in which stock Megatron draws the parts of our stages."""

import re
from random import Random
from types import SimpleNamespace

import pytest

from megatron_zbpp import Placement
from megatron_zbpp.ir.placement import layers_per_stage, layout_string
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
ZB_H1, ZB_V, SEEDED = Settings('zb-h1'), Settings('zb-v'), Settings('zb-v', dropout_seeds=True)
SOME, NONE = {'hidden_dropout': 0.1}, {'hidden_dropout': 0.0}


@pytest.mark.parametrize(
    ('settings', 'placement', 'config', 'said'),
    [
        (ZB_H1, LOOP, SOME, "are stock Megatron's"),
        (ZB_V, V, NONE, "are stock Megatron's; steps that are clipped differ"),
        (ZB_V, V, SOME, "differ from stock Megatron's: other ranks draw the random numbers"),
        (SEEDED, V, SOME, r'differ .*: random numbers of .* 0\.1 are seeded'),
        (Settings('zb-h1', dropout_seeds=True), LOOP, SOME, 'differ .* as by 1f1b with that flag'),
        (SEEDED, V, NONE, "are stock Megatron's"),
        (Settings('zb-v', same_start=False), V, NONE, 'differ from stock .*no-pipeline-same-start'),
        (Settings('pipedream'), LOOP, NONE, 'pipedream is asynchronous'),
        # all that draws is named, and not where a schedule keeps each rank's draws
        (ZB_V, V, {'moe_input_jitter_eps': 0.01}, 'differ.*moe_input_jitter_eps 0.01'),
        (ZB_V, V, {'attention_dropout': 0.1}, 'differ.*attention_dropout 0.1'),
        (ZB_H1, LOOP, {'moe_input_jitter_eps': 0.01}, "are stock Megatron's"),
        (ZB_H1, LOOP, {'attention_dropout': 0.1}, "are stock Megatron's"),
        # backwards round gradients of fp4 at random: only 1F1B's own order draws the same
        (ZB_H1, LOOP, {'fp4': 'e2m1'}, 'fp4'),
        (Settings('1f1b'), LOOP, {'fp4': 'e2m1'}, "are stock Megatron's"),
    ],
)
def test_one_line(settings, placement, config, said):
    line = losses_from_scratch(settings, placement, SimpleNamespace(**config))
    assert re.search(said, line), line
