"""Readings of Megatron's settings that several rooms share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# of a HybridModel or MambaModel, whose layers are laid out by the order of the ranks
HYBRID = (
    'hybrid_layer_pattern',
    'hybrid_override_pattern',
    'hybrid_attention_ratio',
    'hybrid_mlp_ratio',
)
IN_A_LOOP = (
    'this release of Megatron lays the layers of a hybrid model out in a loop, which this schedule '
    'has not',
    'take a schedule that has, such as zb-h1, or megatron-core from 0.17 on',
)
OVERLAP = 'overlap_moe_expert_parallel_comm'
MASKS = 'reset_attention_mask'
_BY_TOKEN = {'none', 'aux_loss', 'seq_aux_loss'}  # whose routers look at one token at a time


def captured(settings: Any) -> str | None:
    """Return the setting that captures CUDA graphs; None: no setting does."""
    graphs = getattr(settings, 'cuda_graph_impl', None)
    return None if graphs == 'none' else graphs


def scales_late(settings: Any) -> bool:
    """Return whether FP8 takes its scales from the largest values of earlier forwards."""
    recipe = getattr(settings, 'fp8_recipe', None)
    delayed = getattr(recipe, 'value', recipe) in (None, 'delayed')
    return bool(getattr(settings, 'fp8', None)) and delayed


def hybrid(settings: Any) -> str | None:
    """Return the setting that makes it a HybridModel or MambaModel; None: there is none."""
    return next((name for name in HYBRID if getattr(settings, name, None)), None)


def needs_masks(settings: Any) -> bool:
    """Return whether batches of NVIDIA's loop have masks that differ from the plain causal one.

    Args:
        settings: Megatron's arguments; None: another loop trains.
    """
    made = getattr(settings, 'create_attention_mask_in_dataloader', True)
    return bool(made and getattr(settings, MASKS, False))


def not_by_token(balancing: str | Sequence[str] | None) -> str:
    """Return load-balancing types that are not known to route token by token; empty: all are."""
    types = [balancing] if isinstance(balancing, str) else balancing or ()
    return ', '.join(each for each in types if each not in _BY_TOKEN)
