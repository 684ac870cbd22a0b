"""Refusals of Megatron's settings on a CPU: what needs kernels of a GPU, or Transformer Engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_zbpp.emulation import te
from megatron_zbpp.mcore.refusal import RECIPES, Refusal, hybrid, set_in

_GPU_ONLY = 'its kernels need a GPU'
_ON_CPU = {
    'fp4': (_GPU_ONLY, 'drop --fp4-format'),
    'use_flash_attn': (_GPU_ONLY, 'drop --use-flash-attn'),
    'moe_permute_fusion': (_GPU_ONLY, 'drop --moe-permute-fusion'),
    'masked_softmax_fusion': (_GPU_ONLY, 'give --no-masked-softmax-fusion'),
    'apply_rope_fusion': (_GPU_ONLY, 'give --no-rope-fusion'),
}
# letters of hybrid models' patterns whose layers need kernels of a GPU
_KERNELS = {'M': 'Mamba', 'G': 'Gated DeltaNet', 'D': 'DeepSeek sparse attention'}
# what runs on a CPU on Transformer Engine's own modules, their kernels emulated; and the cure
_EMULATED = {'fp8': 'drop --fp8-format', 'moe_grouped_gemm': 'drop --moe-grouped-gemm'}
BY_NAME = (*_ON_CPU, *_EMULATED)
"""Settings that are refused where they are set at all."""


def refused(settings: Any, with_te: bool) -> Iterator[Refusal]:
    """Yield everything that a machine without a GPU cannot run.

    Args:
        settings: Megatron's arguments or config.
        with_te: Transformer Engine is there, its kernels emulated.
    """
    yield from set_in(_ON_CPU, settings)
    if not with_te:
        emulated = {name: (_without_te(), cure) for name, cure in _EMULATED.items()}
        yield from set_in(emulated, settings)
    yield from _layers_of_kernels(settings)
    yield from _by_value(settings, with_te)


def _without_te() -> str:
    return te.missing() or te.NOT_INSTALLED


def _layers_of_kernels(settings: Any) -> Iterator[Refusal]:
    """Yield a hybrid model's pattern with layers that no CPU can run, named."""
    name = hybrid(settings)
    pattern = getattr(settings, name) if name else ''
    letters = pattern if isinstance(pattern, str) else 'M'  # a ratio: the rest is Mamba
    found = [f'{letter} ({kind})' for letter, kind in _KERNELS.items() if letter in letters]
    if found:
        assert name is not None
        cure = 'have a pattern of other layers (*, -, E, +) where there is no GPU'
        yield Refusal(name, pattern, f'kernels of {", ".join(found)} need a GPU', cure)


def _by_value(settings: Any, with_te: bool) -> Iterator[Refusal]:
    """Yield layers, recipes and attention that have no kernels here."""
    layers = getattr(settings, 'transformer_impl', 'local')
    if layers not in ('local', *(['transformer_engine'] if with_te else [])):
        reason = _without_te() if layers == 'transformer_engine' else _GPU_ONLY
        yield Refusal('transformer_impl', layers, reason, 'give --transformer-impl local')
    recipe = getattr(settings, 'fp8_recipe', None)
    if with_te and getattr(settings, 'fp8', None) and recipe not in (None, *RECIPES):
        yield Refusal('fp8_recipe', recipe, _GPU_ONLY, f'give --fp8-recipe {RECIPES[0]}')
    backend = getattr(settings, 'attention_backend', 'auto')
    backend = getattr(backend, 'name', backend)  # Megatron has an enum
    if backend in ('flash', 'fused'):
        yield Refusal('attention_backend', backend, _GPU_ONLY, 'give --attention-backend auto')
    ranks = getattr(settings, 'context_parallel_size', 1)
    if ranks > 1 and not getattr(settings, 'spec', None):
        reason = "the kernels of Megatron's own attention over a split sequence need a GPU"
        cure = 'give --context-parallel-size 1, or --spec with an attention that can'
        yield Refusal('context_parallel_size', ranks, reason, cure)
