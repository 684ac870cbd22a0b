"""What the banner and `zbpp doctor` say of losses from scratch."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from megatron_zbpp.ir import Placement
from megatron_zbpp.mcore.settings import Settings
from megatron_zbpp.mcore.start.scratch_losses import losses_from_scratch

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
