"""Slices of a sequence in Megatron's models: inputs are cut, attention sees the slices before.

A slice [a, b) of a causal sequence has queries of its own tokens, and keys and values of all tokens
before b (Seq1F1B, arXiv 2406.03488, section 3). Rotary positions begin at a.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Any
from weakref import WeakSet

import torch
from megatron.core.transformer.enums import AttnMaskType

from megatron_zbpp.mcore import compat
from megatron_zbpp.mcore.patches.registry import Patch
from megatron_zbpp.mcore.slicing import Running, Slice

_GPT = 'megatron.core.models.gpt.gpt_model:GPTModel'
_EMBEDDINGS = 'megatron.core.models.common.embeddings'
_ROTARY = (
    f'{_EMBEDDINGS}.rotary_pos_embedding:RotaryEmbedding',
    f'{_EMBEDDINGS}.yarn_rotary_pos_embedding:YarnRotaryEmbedding',
)
_LOCAL = 'megatron.core.transformer.dot_product_attention:DotProductAttention'
_BY_TE = 'megatron.core.extensions.transformer_engine:TEDotProductAttention'
# arguments of a model that have a row of tokens for each sequence: (micro batch, sequence)
_OF_TOKENS = ('input_ids', 'position_ids', 'labels', 'loss_mask', 'padding_mask')
# layers with a state of the tokens before, by the name of their class: some need Triton to import
_WITH_STATE = {'MambaMixer', 'GatedDeltaNet', 'GatedDeltaProduct'}
_CAUSAL = (AttnMaskType.causal, AttnMaskType.arbitrary)  # the latter by masks that are given

_Masked = Callable[
    [Slice, torch.Tensor, torch.Tensor | None, AttnMaskType | None],
    tuple[torch.Tensor | None, AttnMaskType | None],
]
"""Returns mask and kind of mask for a slice, its queries, and those of the whole sequence."""


def patches(running: Running) -> Iterator[Patch]:
    """Yield what is replaced for schedules of slices.

    Args:
        running: tells which slice runs.
    """
    for owner in _models():
        yield Patch(owner, 'forward', functools.partial(_cutting, running))
    for owner in _ROTARY:
        yield Patch(owner, 'forward', functools.partial(_from_its_first_token, running))
    for owner, masked in _attentions().items():
        yield Patch(owner, 'forward', functools.partial(_attending, running, masked))


def _models() -> tuple[str, ...]:
    hybrid = compat.hybrid_model()
    return (_GPT,) if hybrid is None else (_GPT, f'{hybrid}:HybridModel')


def is_cut(model: torch.nn.Module) -> bool:
    """Return whether inputs of that model are cut."""
    return isinstance(model, tuple(map(resolve_name, _models())))


def attends_in_slices(attention: torch.nn.Module) -> bool:
    """Return whether attention of that class is given the slices before."""
    return type(attention).forward in [resolve_name(owner).forward for owner in _attentions()]


def _attentions() -> dict[str, _Masked]:
    """Return how each class of attention that is here takes a mask."""
    by_te = find_spec('transformer_engine') is not None
    return {_LOCAL: _masked_locally, **({_BY_TE: _masked_by_te} if by_te else {})}


def _cutting(running: Running, original: Callable) -> Callable:
    """Give the model the slice of its inputs; keep the whole for the slices behind it."""
    signature = inspect.signature(original)
    known: WeakSet[torch.nn.Module] = WeakSet()

    @functools.wraps(original)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        part = running.part
        if part is None:
            return original(self, *args, **kwargs)
        if self not in known:
            _require_slices_alone(self)
            known.add(self)
        given = dict(signature.bind(self, *args, **kwargs).arguments)
        del given['self']
        if given.get('packed_seq_params') is not None:
            raise NotImplementedError(
                'packed_seq_params: slices do not know where packed sequences end: give none, or '
                'take a schedule of whole sequences'
            )
        running.given = dict(given)
        for name in _OF_TOKENS:
            value = given.get(name)
            if isinstance(value, torch.Tensor):
                given[name] = value[:, part.start : part.end].contiguous()
        mask = given.get('attention_mask')
        if isinstance(mask, torch.Tensor):
            given['attention_mask'] = mask[..., part.start : part.end, : part.end].contiguous()
        return original(self, **given)

    return forward


def _require_slices_alone(model: torch.nn.Module) -> None:
    """Raise NotImplementedError for layers that a slice would give less than the sequence does."""
    for layer in model.modules():
        if not _WITH_STATE.isdisjoint(each.__name__ for each in type(layer).__mro__):
            raise NotImplementedError(
                f'slices of sequences: {type(layer).__name__} needs its state behind the slices '
                'before: take a schedule of whole sequences'
            )
        kind = getattr(layer, 'attn_mask_type', None)
        if hasattr(layer, 'core_attention') and kind not in _CAUSAL:
            raise NotImplementedError(
                f'attn_mask_type={getattr(kind, "name", kind)}: tokens of a slice cannot attend to '
                'those behind it: have AttnMaskType.causal in the spec of the layers, or take a '
                'schedule of whole sequences'
            )


def _from_its_first_token(running: Running, original: Callable) -> Callable:
    """Let rotary positions begin with the slice."""

    @functools.wraps(original)
    def forward(self: torch.nn.Module, max_seq_len: int, *args: Any, **kwargs: Any) -> Any:
        if running.part is None:
            return original(self, max_seq_len, *args, **kwargs)
        return original(self, max_seq_len, running.part.start, *args, **kwargs)

    vars(forward)['cache_clear'] = original.cache_clear  # Megatron's is an lru_cache
    return forward


def _attending(running: Running, masked: _Masked, original: Callable) -> Callable:
    """Give attention keys and values of the slices before, and a mask whose corner is below."""

    @functools.wraps(original)
    def forward(
        self: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        part = running.part
        if part is not None and running.kept is not None:
            key, value = running.kept.extended(self, part, key, value)
            attention_mask, attn_mask_type = masked(part, query, attention_mask, attn_mask_type)
        return original(self, query, key, value, attention_mask, attn_mask_type, *args, **kwargs)

    return forward


def _masked_locally(
    part: Slice, query: torch.Tensor, mask: torch.Tensor | None, kind: AttnMaskType | None
) -> tuple[torch.Tensor, AttnMaskType | None]:
    """Return what a slice may not attend to: (1, 1, its tokens, tokens up to its end), bool."""
    if mask is None:
        ones = torch.ones(part.end - part.start, part.end, dtype=torch.bool, device=query.device)
        mask = ones.triu(1 + part.start)[None, None]
    return mask, kind


def _masked_by_te(
    part: Slice, query: torch.Tensor, mask: torch.Tensor | None, kind: AttnMaskType | None
) -> tuple[torch.Tensor | None, AttnMaskType | None]:
    """Return the kind of mask whose corner is below; in the first slice they are the same."""
    if kind == AttnMaskType.causal and not part.is_first:
        kind = AttnMaskType.causal_bottom_right
    return mask, kind
