"""Where flags place the layers."""

from __future__ import annotations

import argparse

import pytest
from parsed_flags import MEGATRONS, PLACED, parsed


@pytest.mark.parametrize(
    ('schedule', 'changes', 'expected'),
    [
        ('zb-h1', {}, None),
        ('zb-h1', {'num_layers': 5}, 'Ettt|ttL'),
        ('zb-v', {}, 'Et|t|t|tL'),
        ('zb-v', {'num_layers': 6}, 'Et|tt|tt|tL'),
        (
            'zb-v',
            {'num_layers': 6, 'account_for_embedding_in_pipeline_split': True}
            | {'account_for_loss_in_pipeline_split': True},
            'Et|tt|tt|tL',
        ),
        (
            'zb-h1',
            {'num_layers': 6, 'account_for_embedding_in_pipeline_split': True}
            | {'account_for_loss_in_pipeline_split': True},
            None,
        ),
        ('zb-v', {'pipeline_model_parallel_layout': 'E|tt|t|tL'}, 'E|tt|t|tL'),
        ('zb-v', {'num_layers_per_virtual_pipeline_stage': 1}, 'Et|t|t|tL'),
        ('zb-v', {'num_virtual_stages_per_pipeline_rank': 2}, 'Et|t|t|tL'),
        ('interleaved', {'num_layers': 8}, 'Ett|tt|tt|ttL'),
        (
            'interleaved',
            {'num_layers': 8, 'num_layers_per_virtual_pipeline_stage': 1},
            'Et|t|t|t|t|t|t|tL',
        ),
        (
            'interleaved',
            {'num_layers': 7, 'num_layers_per_virtual_pipeline_stage': 1}
            | {'account_for_loss_in_pipeline_split': True},
            'Et|t|t|t|t|t|t|L',
        ),
        ('zb-v', {'num_layers': 7, 'decoder_first_pipeline_num_layers': 2}, 'Et|tt|tt|ttL'),
        (
            'interleaved',
            {'num_layers': 8, 'num_virtual_stages_per_pipeline_rank': 2}
            | {'decoder_last_pipeline_num_layers': 2},
            'Ettt|t|ttt|tL',
        ),
        ('zb-h1', {'num_layers': 7, 'decoder_first_pipeline_num_layers': 3}, None),
        ('zb-v', {'num_layers': 7, 'mtp_num_layers': 1}, 'Ett|tt|tt|tmL'),
    ],
    ids=str,
)
def test_layers_are_placed(ranks, schedule, changes, expected):
    found = parsed(ranks, '--pipeline-schedule', schedule, **changes)
    assert found.code is None, found.said
    assert found.result.placed['pipeline_model_parallel_layout'] == expected
    if expected is None:  # Megatron's own
        assert found.result.placed == {
            **found.result.placed,
            **{k: v for k, v in changes.items() if k in PLACED},
        }
    else:
        assert not any(value for name, value in found.result.placed.items() if 'layout' not in name)


@pytest.mark.parametrize(
    ('schedule', 'pattern', 'expected'),
    [
        ('zb-v', '*-*-*-/MM', '*|-*|-*|-/MM'),
        ('zb-v', '*|-|*|-', '*|-|*|-'),
        ('zb-h1', '*-*-', '*-*-'),
        ('zb-interleaved', '*-*-', '*|-|*|-'),
    ],
)
def test_a_hybrid_pattern_is_divided(schedule, pattern, expected):
    from megatron_zbpp.mcore.command_line import sizes
    from megatron_zbpp.mcore.programs import Programs
    from megatron_zbpp.mcore.settings import Settings

    args = argparse.Namespace(**MEGATRONS, hybrid_layer_pattern=pattern)
    sizes.place_layers(args, Programs(Settings(schedule)).placement(2))
    assert args.hybrid_layer_pattern == expected
    assert args.pipeline_model_parallel_layout is None


@pytest.mark.parametrize(
    ('schedule', 'pattern', 'chunks'),
    [('zb-h1', '-*|*-/*-', None), ('zb-h1', '-*-*', None), ('zb-interleaved', '-|*|-|*', 2)],
)
def test_layers_of_hybrid_models_are_where_their_pattern_says(ranks, schedule, pattern, chunks):
    found = parsed(
        ranks, '--pipeline-schedule', schedule, hybrid_layer_pattern=pattern, num_layers=None
    )
    assert found.code is None and found.result.source == (schedule, chunks, None)
    assert found.result.placed == {name: MEGATRONS[name] for name in PLACED}
