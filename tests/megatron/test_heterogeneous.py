"""A layer specification per stage: `--heterogeneous-layers-config-path`, no two layers alike.

Megatron's own interleaved schedule cannot build them: its builders do not say of which chunk.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from grids import grid
from nvidia import needs_training, run, since
from supported import supports
from test_launch import LLAMA, NO_CLIPPING, PIPELINE
from test_launch_post_validation import EARLY

pytestmark = needs_training

NOT_THERE = {'no_op': True, 'replace_with_linear': False}
LINEAR = {'no_op': False, 'replace_with_linear': True}
FULL = {'no_op': False, 'replace_with_linear': False}
# attention and MLP of each layer
BLOCKS = (
    ({**FULL, 'n_heads_in_group': 2}, {**FULL, 'ffn_mult': 2.625}),
    ({**NOT_THERE, 'n_heads_in_group': None}, {**FULL, 'ffn_mult': 9.0}),
    ({**FULL, 'n_heads_in_group': 2}, {**LINEAR, 'ffn_mult': None}),
    ({**LINEAR, 'n_heads_in_group': None}, {**FULL, 'ffn_mult': 2.625}),
    ({**FULL, 'n_heads_in_group': 2}, {**NOT_THERE, 'ffn_mult': None}),
    ({**FULL, 'n_heads_in_group': 2}, {**FULL, 'ffn_mult': 9.0}),
)


@pytest.fixture
def flags(tmp_path: Path) -> list[str | int | Path]:
    """Flags of a model of these layers."""
    path = tmp_path / 'layers.json'
    sizes = {
        'hidden_act': 'silu',
        'num_hidden_layers': len(BLOCKS),
        'hidden_size': 32,
        'num_attention_heads': 4,
        'tie_word_embeddings': False,
        'rope_theta': 10000,
        'rope_scaling': {'factor': 8.0},
        'block_configs': [{'attention': a, 'ffn': f} for a, f in BLOCKS],
    }
    path.write_text(json.dumps(sizes))
    given = ['--num-layers', len(BLOCKS), '--heterogeneous-layers-config-path', path]
    given += ['--use-rotary-position-embeddings', '--use-rope-scaling']
    return [*PIPELINE, *NO_CLIPPING, *LLAMA, *given, '--train-iters', 3]


@supports("NVIDIA's loop: heterogeneous layers")
@grid(schedule=('zb-v', 'zb-interleaved', 'zb-h1', 'zb-2p+post-validation'))
def test_identical_to_megatron(ranks, flags, tmp_path, schedule):
    """From a checkpoint of Megatron's own 1F1B, and back into it."""
    name, _, early = schedule.partition('+')
    saving = ['--save', tmp_path, '--save-interval', 1]
    stock = run(ranks(2), *flags, *saving)
    assert len(set(stock.losses.values())) == 3
    ours = ['--load', tmp_path, '--ckpt-step', 1, '--pipeline-schedule', name]
    found = run(ranks(2), *flags, *ours, *(EARLY if early else []))
    assert found.losses == since(1, stock.losses)
    assert found.parameters == stock.parameters
    assert found.optimizer == stock.optimizer
