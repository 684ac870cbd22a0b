"""Slices of a sequence in Megatron's models: inputs are cut, attention sees the slices before.

A slice [a, b) of a causal sequence has queries of its own tokens, and keys and values of all tokens
before b (Seq1F1B, arXiv 2406.03488, section 3). Rotary positions begin at a.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
from megatron.core.transformer.enums import AttnMaskType

from megatron_zbpp.mcore import compat
from megatron_zbpp.mcore.model_settings import not_by_token
from megatron_zbpp.mcore.patches.registry import Patch, around

_GPT = 'megatron.core.models.gpt.gpt_model:GPTModel'
_EMBEDDINGS = 'megatron.core.models.common.embeddings'
_ROTARY = (
    f'{_EMBEDDINGS}.rotary_pos_embedding:RotaryEmbedding',
    f'{_EMBEDDINGS}.yarn_rotary_pos_embedding:YarnRotaryEmbedding',
)
_LOCAL = 'megatron.core.transformer.dot_product_attention:DotProductAttention'
_BY_TE = 'megatron.core.extensions.transformer_engine:TEDotProductAttention'
# arguments of a model that have a row of tokens for each sequence: (micro batch, sequence)
_OF_TOKENS = ('input_ids', 'position_ids', 'labels', 'loss_mask')
_MASK, _AS_IT_IS = 'attention_mask', 'runtime_gather_output'
# modules that mix tokens and keep nothing of those before, by the name of a base class: some need
# Triton to import
_MIXING = {'MambaMixer', 'GatedDeltaNet', 'GatedDeltaProduct', '_ConvNd', 'RNNBase', '_BatchNorm'}
_MIXING |= {'MultiheadAttention'}
_ROUTERS = {'TopKRouter', 'InferenceTopKRouter'}
_POSITIONS = {'learned_absolute', 'rope', 'yarn', 'none'}
WHOLE = 'take a schedule of whole sequences'
_CAUSAL = (AttnMaskType.causal, AttnMaskType.arbitrary)  # the latter by masks that are given


class Slice(NamedTuple):
    """A slice of a microbatch."""

    microbatch: int  # its number
    start: int  # its first token, in the sequence
    end: int  # the token behind its last one
    total: int  # tokens of the sequence

    @property
    def is_first(self) -> bool:
        return self.start == 0

    @property
    def is_last(self) -> bool:
        return self.end == self.total

    @property
    def share(self) -> float:
        """Its part of the tokens."""
        return (self.end - self.start) / self.total


@dataclass(eq=False)
class Rows:
    """Keys, or values, of one microbatch in one layer: of all tokens so far."""

    values: torch.Tensor | None = None  # (sequence, ...); None before the first slice
    # that later slices have left, of the same shape; None before the first backward
    gradients: torch.Tensor | None = None


class _Extended(torch.autograd.Function):
    """Rows of a slice and of those before it; gradients of the latter wait for their backwards.

    Each slice writes its own rows of one buffer, so what a backward has saved of it stays as it
    was, though autograd would take it for changed: hence `.data`.
    """

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, rows: Rows, part: Slice) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if rows.values is None:
            rows.values = own.new_empty(part.total, *own.shape[1:])
        rows.values.data[part.start : part.end] = own
        ctx.rows, ctx.part = rows, part
        return rows.values.data[: part.end]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows, part = ctx.rows, ctx.part
        if part.is_last:
            rows.gradients = gradient.clone()
        else:
            rows.gradients[: part.end] += gradient
        return rows.gradients[part.start : part.end].clone(), None, None


class Kept:
    """Keys and values of the microbatches that are under way in a stage."""

    def __init__(self) -> None:
        self.storages: set[int] = set()  # addresses of the memory that slices of one share
        self.visited: set[torch.nn.Module] = set()  # in the pass that runs
        self._rows: dict[int, dict[torch.nn.Module, tuple[Rows, Rows]]] = {}

    def extended(
        self, layer: torch.nn.Module, part: Slice, *own: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return keys and values of a layer up to the end of a slice: views of one buffer for all.

        `own` are those of the slice, (its tokens, micro batch, heads, width of a head).
        """
        length, given = part.end - part.start, own[0].size(0)
        if given != length:
            raise NotImplementedError(
                f'slices of sequences: a {type(layer).__name__} gets {given} tokens where slices '
                f'have {length}: a forward that replaces that of GPTModel after '
                'megatron_zbpp.enable() does not cut its inputs, nor does another kind of model: '
                f'replace it before, or {WHOLE}'
            )
        self.visit(layer)
        pair = self._rows.setdefault(part.microbatch, {}).setdefault(layer, (Rows(), Rows()))
        extended = tuple(_Extended.apply(*each, part) for each in zip(own, pair, strict=True))
        self.storages.update(each.untyped_storage()._cdata for each in extended)
        return extended

    def visit(self, module: torch.nn.Module) -> None:
        """Note that a module runs in this pass; raise NotImplementedError if it has already."""
        if module in self.visited:
            raise NotImplementedError(
                f'slices of sequences: a {type(module).__name__} runs twice in a pass, where keys '
                'and values of one run would be taken for those of the other: let each module '
                f'run once (no layer that is shared or looped), or {WHOLE}'
            )
        self.visited.add(module)

    def drop(self, microbatch: int) -> None:
        """Forget a microbatch, whose last pass has run."""
        for pair in self._rows.pop(microbatch, {}).values():
            for rows in pair:
                if rows.values is not None:
                    self.storages.discard(rows.values.untyped_storage()._cdata)


@dataclass(eq=False)
class Running:
    """The slice that runs in this process, for Megatron's layers to ask."""

    part: Slice | None = None  # the slice that runs; None: whole sequences do
    kept: Kept | None = None  # of its stage
    # the chunk of that stage, unwrapped; other models run whole
    model: torch.nn.Module | None = None
    # code of the loss functions that have been shown to be sums over tokens
    additive: set[object] = field(default_factory=set)

    @contextlib.contextmanager
    def slice(self, part: Any = None, kept: Any = None, model: Any = None) -> Iterator[None]:
        """Say within that a slice runs, or a whole sequence: see the attributes."""
        before = self.part, self.kept, self.model
        if kept is not None:
            kept.visited.clear()
        self.part, self.kept, self.model = part, kept, model
        try:
            yield
        finally:
            self.part, self.kept, self.model = before


def patches(running: Running) -> Iterator[Patch]:
    """Yield what is replaced for schedules of slices; `running` tells which one runs."""
    for owner in _models():
        yield Patch(owner, 'forward', around(_cutting, running))
    for owner in _ROTARY:
        yield Patch(owner, 'forward', functools.partial(_from_its_first_token, running))
    for owner in _attentions():
        yield Patch(owner, 'forward', around(_attending, running, owner == _BY_TE))


def _models() -> tuple[str, ...]:
    hybrid = compat.hybrid_model()
    return (_GPT,) if hybrid is None else (_GPT, f'{hybrid}:HybridModel')


def _attentions() -> tuple[str, ...]:
    return (_LOCAL,) if find_spec('transformer_engine') is None else (_LOCAL, _BY_TE)


_signature = functools.cache(inspect.signature)


def _cutting(
    running: Running, original: Callable, self: torch.nn.Module, *args: Any, **kwargs: Any
) -> Any:
    """Give the chunk that runs in slices the slice of its inputs."""
    part, kept = running.part, running.kept
    if part is None or kept is None:
        return original(self, *args, **kwargs)
    if self is not running.model:  # a teacher, say, in the one call of forward_step
        with running.slice():
            return original(self, *args, **kwargs)
    kept.visit(self)
    (own, first), *given = _signature(original).bind(self, *args, **kwargs).arguments.items()
    if isinstance(first, tuple):  # as of a function without names of its arguments
        given.insert(0, (own, first))
    return original(self, **{name: _cut(name, value, part) for name, value in given})


def _cut(name: str, value: Any, part: Slice) -> Any:
    if value is None or name == _AS_IT_IS:
        return value
    if name not in (*_OF_TOKENS, _MASK):
        packed = ', which do not know where packed sequences end' if 'packed' in name else ''
        raise NotImplementedError(
            f'{name}: the model is called with it, and nobody has cut it for slices of sequences'
            f'{packed}: give none, or {WHOLE} (a forward that replaces that of GPTModel keeps its '
            'arguments by functools.wraps)'
        )
    tokens = value.shape[-2:] if name == _MASK else value.shape[1:2]
    if {*tokens} != {part.total}:
        raise NotImplementedError(
            f'{name} of shape {tuple(value.shape)}: slices cut (micro batch, sequence, ...) and '
            f'masks (..., sequence, sequence) of {part.total} tokens: give such, or {WHOLE}'
        )
    if name == _MASK:
        return value[..., part.start : part.end, : part.end].contiguous()
    return value[:, part.start : part.end].contiguous()


def require(model: torch.nn.Module) -> None:
    """Raise NotImplementedError for modules to which a slice would not be what the sequence is."""
    if not isinstance(model, tuple(map(resolve_name, _models()))):
        raise NotImplementedError(
            f'slices of sequences: inputs of a {type(model).__name__} cannot be cut, as those '
            f'of a GPTModel can: {WHOLE}'
        )
    positions = getattr(model, 'position_embedding_type', 'none')
    problem = None if positions in _POSITIONS else f'positions by {positions} are not known to cut'
    for layer in model.modules():
        problem = problem or _problem(layer)
        if problem is not None:
            raise NotImplementedError(f'slices of sequences: {problem}, or {WHOLE}')


def _problem(layer: torch.nn.Module) -> str | None:
    name = type(layer).__name__
    if not _MIXING.isdisjoint(each.__name__ for each in type(layer).__mro__):
        return f'{name} needs what it has seen of the slices before: leave it out'
    attention, kind = getattr(layer, 'core_attention', None), getattr(layer, 'attn_mask_type', None)
    if attention is not None:
        known = [resolve_name(owner).forward for owner in _attentions()]
        if type(attention).forward not in known:
            attention = type(attention).__name__
            return f"{attention} is not known to attend to the slices before: have Megatron's"
        if kind not in _CAUSAL:
            return (
                f'attn_mask_type={getattr(kind, "name", kind)}, and tokens of a slice cannot '
                'attend to those behind it: have AttnMaskType.causal in the spec of the layers'
            )
    router = getattr(layer, 'router', None)
    if router is not None and type(router).__name__ not in _ROUTERS:
        return f'{type(router).__name__} is not known to route token by token: have a TopKRouter'
    if others := not_by_token(getattr(router, 'routing_type', None)):
        return f'{others} balances experts by all tokens of a microbatch: have aux_loss'
    return None


def _from_its_first_token(running: Running, original: Callable) -> Callable:
    """Let rotary positions begin with the slice."""

    @functools.wraps(original)
    def forward(self: torch.nn.Module, max_seq_len: int, *args: Any, **kwargs: Any) -> Any:
        if running.part is None:
            return original(self, max_seq_len, *args, **kwargs)
        return original(self, max_seq_len, running.part.start, *args, **kwargs)

    vars(forward)['cache_clear'] = original.cache_clear  # Megatron's is an lru_cache
    return forward


def _attending(
    running: Running,
    by_te: bool,
    original: Callable,
    self: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    attn_mask_type: AttnMaskType | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Give attention keys and values of the slices before, and a mask whose corner is below."""
    part = running.part
    if part is not None and running.kept is not None:
        key, value = running.kept.extended(self, part, key, value)
        if by_te:  # in the first slice both kinds are the same
            if attn_mask_type == AttnMaskType.causal and not part.is_first:
                attn_mask_type = AttnMaskType.causal_bottom_right
        elif attention_mask is None:
            shape = part.end - part.start, part.end
            ones = torch.ones(shape, dtype=torch.bool, device=query.device)
            attention_mask = ones.triu(1 + part.start)[None, None]
    return original(self, query, key, value, attention_mask, attn_mask_type, *args, **kwargs)
