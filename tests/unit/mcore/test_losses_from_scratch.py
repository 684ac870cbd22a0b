"""What the banner and `zbpp doctor` say of losses from scratch."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from megatron_zbpp.ir import Placement
from megatron_zbpp.mcore.same_start.losses import losses_from_scratch
from megatron_zbpp.mcore.settings import Settings

LOOP, V = Placement.loop(2), Placement.v(2).reversed()


@pytest.mark.parametrize(
    ('settings', 'placement', 'dropout', 'said'),
    [
        (Settings('zb-h1'), LOOP, 0.1, "are stock Megatron's"),
        (Settings('zb-v'), V, 0.0, "are stock Megatron's; steps that are clipped differ"),
        (Settings('zb-v'), V, 0.1, "differ from stock Megatron's: other ranks draw the masks"),
        (Settings('zb-v', dropout_seeds=True), V, 0.1, r'differ .*: masks of .* 0\.1 are seeded'),
        (Settings('zb-h1', dropout_seeds=True), LOOP, 0.1, 'differ .* as by 1f1b with that flag'),
        (Settings('zb-v', dropout_seeds=True), V, 0.0, "are stock Megatron's"),
        (Settings('zb-v', same_start=False), V, 0.0, 'differ from stock .*no-pipeline-same-start'),
        (Settings('pipedream'), LOOP, 0.0, 'pipedream is asynchronous'),
    ],
)
def test_one_line(settings, placement, dropout, said):
    line = losses_from_scratch(settings, placement, SimpleNamespace(hidden_dropout=dropout))
    assert re.search(said, line), line
