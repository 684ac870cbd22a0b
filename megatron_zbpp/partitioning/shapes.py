"""Costs of layers from a model's shape: FLOPs over what a device reaches, bytes of bf16 training.

t tokens of a microbatch. A linear layer of n parameters: F = B = W = 2tn FLOPs. Attention itself:
F = 4 x b s^2 x heads x width, half of it under a causal mask, B = 2F, no W. The output layer is a
linear layer whose fp32 logits are held; the embedding copies rows. Activations are counted
tensor by tensor: 34 t h bytes for a layer of GPT-3's shape, of which 32 t h wait for W.

Where memory has a bandwidth, F writes and reads them once, B reads them and writes as many, W reads
what waits; F and B read the weights, W reads and writes their fp32 gradient.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields, replace
from math import isfinite
from typing import Annotated

from megatron_zbpp.partitioning.layers import Layer, Layers
from megatron_zbpp.techniques.slices.balance import Attention, fit_attention

MODELS = ('gpt', 'llama', 'mla', 'moe', 'hybrid')
# fields that some models only have
OWN_FIELDS = {
    'groups': ('gpt', 'llama', 'moe', 'hybrid'),
    'mtp': ('gpt', 'llama', 'mla', 'moe'),
    'pattern': ('hybrid',),
    'state': ('hybrid',),
    'dense_first': ('mla', 'moe'),
    **dict.fromkeys(('q_rank', 'kv_rank', 'rope_dim', 'v_dim'), ('mla', 'hybrid')),
    **dict.fromkeys(
        ('experts', 'top_k', 'expert_ffn', 'shared_ffn', 'ep'), ('moe', 'mla', 'hybrid')
    ),
}
_FROM_ONE = ('layers', 'hidden', 'heads', 'vocab', 'seq', 'micro_batch', 'tp', 'ep', 'dp')
_BF16, _FP32 = 2, 4


@dataclass(frozen=True)
class Shape:
    """A model, and how it is run. The command line has an option for each field but the model."""

    model: Annotated[
        str,
        'gpt (GELU), llama (SwiGLU), mla (latent attention, SwiGLU), moe (llama with experts), '
        'hybrid (a pattern of Mamba, attention, latent attention, MLP and MoE layers)',
    ]
    layers: Annotated[int, 'decoder layers']
    hidden: Annotated[int, 'hidden size h']
    heads: Annotated[int, 'attention heads']
    vocab: Annotated[int, 'entries of the vocabulary']
    seq: Annotated[int, 'tokens of a sample']
    tflops: Annotated[float, 'TFLOP/s that a device reaches in matrix products']
    ffn: Annotated[int, 'inner size of the MLP; 0: 4h'] = 0
    groups: Annotated[int, 'query groups; 0: as many as heads'] = 0
    head_dim: Annotated[int, 'size of a head; 0: hidden / heads'] = 0
    micro_batch: Annotated[int, 'samples of a microbatch'] = 1
    mtp: Annotated[int, 'layers of multi-token prediction'] = 0
    experts: Annotated[int, 'experts of an MoE layer'] = 0
    top_k: Annotated[int, 'experts that a token takes'] = 2
    expert_ffn: Annotated[int, 'inner size of an expert; 0: ffn'] = 0
    shared_ffn: Annotated[int, 'inner size of the shared experts'] = 0
    dense_first: Annotated[int, 'dense layers before the first MoE layer'] = 0
    q_rank: Annotated[int, 'LoRA rank of the queries of latent attention; 0: not compressed'] = 0
    kv_rank: Annotated[int, 'LoRA rank of the keys and values of latent attention'] = 512
    rope_dim: Annotated[
        int,
        "size of a head's part with rotary positions, in latent attention",
    ] = 64
    v_dim: Annotated[int, "size of a head's values, in latent attention; 0: head_dim"] = 0
    state: Annotated[int, "size of Mamba's state"] = 128
    pattern: Annotated[
        str,
        "a letter a layer of a hybrid, as Megatron's --hybrid-layer-pattern has them: M Mamba, "
        '* attention, + latent attention, - MLP, E MoE; | between stages says nothing here; '
        'what follows a / predicts a further token each, on the last stage',
    ] = ''
    tp: Annotated[int, 'tensor-parallel ranks, which share a layer'] = 1
    ep: Annotated[int, "expert-parallel ranks, which share the experts' parameters"] = 1
    dp: Annotated[int, "data-parallel ranks, which share the optimizer's state"] = 1
    bandwidth: Annotated[
        float, "GB/s of a device's memory, to time element-wise operations; 0 ignores them"
    ] = 0.0

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ValueError(f'model {self.model!r} is unknown: choose of {", ".join(MODELS)}')
        if self.model == 'moe' and not self.experts:
            raise ValueError('a moe needs --experts: how many a layer has')
        if self.model == 'hybrid':
            main, *ahead = self.letters
            if not all((main, *ahead)) or set(''.join((main, *ahead))) - set('M*+-E'):
                raise ValueError(
                    f'pattern {self.pattern!r}: give a letter a layer, of M, *, +, - and E; '
                    'measure models of others (zbpp profile --stages)'
                )
            if self.layers != len(main):
                raise ValueError(
                    f'layers {self.layers}, but pattern {self.pattern!r} has {len(main)}: give as '
                    'many, or leave layers out'
                )
        if 'E' in self.pattern and not self.experts:
            raise ValueError('a pattern with E needs --experts: how many a layer has')
        if not (isfinite(self.tflops) and self.tflops > 0):
            raise ValueError(f'tflops {self.tflops}: give what a device reaches, above 0')
        for each in fields(self):
            value, least = getattr(self, each.name), int(each.name in _FROM_ONE)
            if isinstance(value, int | float) and not value >= least:
                raise ValueError(f'{each.name} {value}: give {least} or more')
        for name, value, other, divided in (
            ('heads', self.heads, 'hidden', 0 if self.head_dim else self.hidden),
            ('groups', self.groups, 'heads', self.heads),
            ('tp', self.tp, 'heads', self.heads),
            ('ep', self.ep, 'experts', self.experts),
        ):
            if value and divided % value:
                raise ValueError(
                    f'{name} {value} does not divide {other} {divided}: give one that does'
                )
        if self.experts and self.top_k > self.experts:
            raise ValueError(f'top_k {self.top_k} of experts {self.experts}: give at most as many')
        if self.dense_first > self.layers:
            raise ValueError(f'dense_first {self.dense_first} of layers {self.layers}: give fewer')

    @property
    def letters(self) -> tuple[str, ...]:
        """Letters of the decoder's layers, and of those of each further token."""
        return tuple(self.pattern.replace('|', '').split('/'))

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch."""
        return self.micro_batch * self.seq

    @property
    def width(self) -> int:
        """Size of a head."""
        return self.head_dim or self.hidden // self.heads


@dataclass(frozen=True)
class _Part:
    active: float = 0.0  # parameters that a token meets
    held: float = 0.0  # parameters that a rank holds
    core: float = 0.0  # FLOPs of F that no parameters take part in
    activation: float = 0.0  # values a token that are held from F
    retained: float = 0.0  # values a token that wait for W

    def __add__(self, other: _Part) -> _Part:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return _Part(*(one + more for one, more in pairs))


def bytes_of_a_parameter(sharing: float) -> float:
    """Return the bytes that a rank holds for a parameter, its gradient and its optimizer state."""
    return _BF16 + _FP32 + 12 / sharing


def layers_of(shape: Shape) -> Layers:
    """Return the layers of a model: times in seconds, memory and output in bytes."""
    if shape.model == 'hybrid':
        parts = {'M': _mamba(shape), '*': _attention(shape), '-': _mlp(shape, shape.ffn)}
        parts |= {'E': _experts(shape)} if shape.experts else {}
        parts['+'] = _latent(shape)
        main, *ahead = shape.letters
        body = [_layer(shape, letter, parts[letter]) for letter in main]
        last = _head(shape)
        for letters in ahead:
            more = (parts[letter] for letter in letters)
            last = sum(more, last + _linear(2 * shape.hidden, shape.hidden) + _head(shape))
        return Layers((_embedding(shape), *body, _layer(shape, 'L', last)))
    attention = _latent(shape) if shape.model == 'mla' else _attention(shape)
    dense, sparse = attention + _mlp(shape, shape.ffn), attention
    sparse += _experts(shape) if shape.experts else _mlp(shape, shape.ffn)
    body = [
        _layer(shape, 't', dense if at < shape.dense_first else sparse)
        for at in range(shape.layers)
    ]
    ahead = sparse + _linear(2 * shape.hidden, shape.hidden) + _head(shape)
    more = [_layer(shape, 'm', ahead)] * shape.mtp
    return Layers((_embedding(shape), *body, *more, _layer(shape, 'L', _head(shape))))


def attention_of(shape: Shape) -> Attention:
    """Return the parts of F of decoder layers, by that of sequences twice as long."""
    times: dict[int, float] = {}
    for tokens in (shape.seq, 2 * shape.seq):
        _, *layers, _ = layers_of(replace(shape, seq=tokens))
        times[tokens] = sum(layer.forward for layer in layers if layer.kind != 'm')
    return fit_attention(times, shape.seq)


def _linear(inputs: float, outputs: float) -> _Part:
    """Return a linear layer: its input is held, and for W the gradient of its output, too."""
    count = inputs * outputs
    return _Part(count, count, 0.0, inputs, inputs + outputs)


@dataclass(frozen=True)
class Block:
    """A norm, two linear layers that tensor parallelism divides, and dropout.

    Counted are the tensors of arXiv 2205.05198, section 4, with fused attention, which keeps no
    scores; and those that W takes: each linear layer's input and the gradient of its output.
    """

    hidden: float  # inputs of the first layer and outputs of the second
    outputs: float  # of the first layer, which is divided by columns
    inputs: float  # of the second layer, which is divided by rows

    @classmethod
    def attention(cls, hidden: float, queries: float, keys_and_values: float) -> Block:
        """Return the block of an attention, of sizes over all heads."""
        return cls(hidden, queries + keys_and_values, queries)

    @classmethod
    def mlp(cls, hidden: float, inner: float, gated: bool) -> Block:
        """Return the block of an MLP; gated: of SwiGLU, whose first layer has two halves."""
        return cls(hidden, inner * (2 if gated else 1), inner)

    @property
    def rows(self) -> float:
        """Values a token that sequence parallelism alone divides, held from F and from B."""
        return 2 * self.hidden

    @property
    def inner(self) -> float:
        """Values a token that tensor parallelism divides, held from F and from B."""
        return self.outputs + self.inputs

    @property
    def mask(self) -> float:
        """Bytes a token of dropout's mask, divided as `rows`."""
        return self.hidden

    def part(self, core: float = 0.0) -> _Part:
        """Return it as part of a layer, all of it divided; `core`: see there."""
        weights, values = self.hidden * self.inner, self.rows + self.inner
        return _Part(weights, weights, core, values + self.mask / _BF16, values)


def _attention(shape: Shape) -> _Part:
    own = shape.heads * shape.width
    both = 2 * (shape.groups or shape.heads) * shape.width
    core = 4 * shape.micro_batch * shape.seq**2 * own / 2
    return Block.attention(shape.hidden, own, both).part(core)


def _latent(shape: Shape) -> _Part:
    """Return multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""
    h, query = shape.hidden, shape.heads * (shape.width + shape.rope_dim)
    values = shape.heads * (shape.v_dim or shape.width)
    queries = _linear(h, shape.q_rank or query)
    queries += _linear(shape.q_rank, query) if shape.q_rank else _Part()
    keys = _linear(h, shape.kv_rank + shape.rope_dim)
    keys += _linear(shape.kv_rank, shape.heads * shape.width + values)
    core = 2 * shape.micro_batch * shape.seq**2 * (query + values) / 2
    inside = _Part(core=core, activation=h + 2 * query + values)
    return inside + queries + keys + _linear(values, h)


def _mlp(shape: Shape, ffn: int) -> _Part:
    return Block.mlp(shape.hidden, ffn or 4 * shape.hidden, shape.model != 'gpt').part()


def _experts(shape: Shape) -> _Part:
    one = _mlp(shape, shape.expert_ffn or shape.ffn)
    taken = _Part(
        shape.top_k * one.active,
        shape.experts / shape.ep * one.held,
        0.0,
        shape.top_k * one.activation,
        shape.top_k * one.retained,
    )
    shared = _mlp(shape, shape.shared_ffn) if shape.shared_ffn else _Part()
    return taken + shared + _linear(shape.hidden, shape.experts)


def _mamba(shape: Shape) -> _Part:
    """Return Mamba-2: linear layers around a scan of a state (arXiv 2405.21060)."""
    h, inner = shape.hidden, 2 * shape.hidden
    mixed = 2 * inner + 2 * shape.state + inner // 64
    scan = 6 * shape.tokens * inner * shape.state
    inside = _Part(core=scan, activation=h + mixed + inner)
    return inside + _linear(h, mixed) + _linear(inner, h)


def _head(shape: Shape) -> _Part:
    logits = _Part(activation=shape.vocab * _FP32 / _BF16)
    return _linear(shape.hidden, shape.vocab) + logits


def _layer(shape: Shape, kind: str, part: _Part) -> Layer:
    rate = shape.tflops * 1e12 * shape.tp
    linear = 2 * shape.tokens * part.active
    per_value = _BF16 * shape.tokens / shape.tp
    moved, weights = 2 * part.activation * per_value, part.held / shape.tp
    second = 1 / (shape.bandwidth * 1e9) if shape.bandwidth else 0.0  # a byte's
    return Layer(
        kind,
        forward=(linear + part.core) / rate + (moved + _BF16 * weights) * second,
        backward=(linear + 2 * part.core) / rate + (moved + _BF16 * weights) * second,
        weight=linear / rate + (part.retained * per_value + 2 * _FP32 * weights) * second,
        activation=part.activation * per_value,
        retained=part.retained * per_value,
        parameters=part.held / shape.tp * bytes_of_a_parameter(shape.dp),
        output=_BF16 * shape.tokens * shape.hidden,
    )


def _embedding(shape: Shape) -> Layer:
    """Return the embedding: rows are copied and gradients added, in no time beside the others'."""
    return _layer(replace(shape, bandwidth=0.0), 'E', _Part(held=shape.hidden * shape.vocab))
