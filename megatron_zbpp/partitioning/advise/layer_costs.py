"""Costs of the layers of a setup: those of the model's shape, with communication and recomputation.

A collective of tensor parallelism moves (tp-1)/tp of s·b·h values of bf16: a dense layer has four
in F and four in B, with sequence parallelism or without (arXiv 2205.05198, section 4.2). Tokens of
experts go out and come back once in F and once in B. Attention that keeps its scores holds
5·a·s²·b bytes more (there, section 4.1) and computes those above the diagonal, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_zbpp.partitioning.advise.job import FULL, NONE, SELECTIVE, Job, Setup
from megatron_zbpp.partitioning.layers import Layer, Layers
from megatron_zbpp.partitioning.shapes import Block, Shape, bytes_of_a_parameter, layers_of

_BF16 = 2  # bytes
_COLLECTIVES = {'t': 4, 'm': 4, 'M': 2, '*': 2, '-': 2, 'E': 0}  # in F, by the kind of a layer


class SetupLayers(NamedTuple):
    """Layers of a setup."""

    layers: Layers  # seconds and bytes of a rank
    transient: float  # bytes that a rank holds for a while to run one layer again


class _Again(NamedTuple):
    """A part of a layer that can run again in B."""

    seconds: float  # of its forward
    freed: float  # bytes that then need not wait from F to B


@dataclass(frozen=True)
class _Costing:
    """Adds to layers of a shape what a setup makes of them."""

    job: Job
    setup: Setup
    shape: Shape

    @property
    def tokens(self) -> float:
        """Tokens of a microbatch on a rank, before tensor parallelism."""
        return self.shape.tokens / self.job.cp

    @property
    def collective(self) -> float:
        """Seconds of one gathering or scattering of hidden states among tensor-parallel ranks."""
        tp = self.setup.tp
        moved = _BF16 * self.tokens * self.shape.hidden * (tp - 1) / tp
        return moved / self.job.rate(tp)

    @property
    def exchange(self) -> float:
        """Seconds in F for tokens to go to their experts and back."""
        ep, etp = self.setup.ep, self.job.expert_ranks(self.setup)
        own = _BF16 * self.tokens / self.setup.tp * self.shape.top_k * self.shape.hidden
        among = own * (ep - 1) / ep / self.job.rate(ep * etp)
        return 2 * (among + own * (etp - 1) / self.job.rate(etp))

    def seconds(self, flops: float, moved: float) -> float:
        """Return the time of products of a rank, and of bytes in and out of its memory."""
        memory = self.shape.bandwidth
        return flops / (self.shape.tflops * 1e12) + (moved / (memory * 1e9) if memory else 0.0)

    def scores(self) -> _Again:
        """Return the attention that keeps scores, of all tokens with all."""
        shape, ranks = self.shape, self.setup.tp * self.job.cp
        held = 5 * shape.heads * shape.seq**2 * shape.micro_batch / ranks
        flops = 4 * shape.micro_batch * shape.seq**2 * shape.heads * shape.width / ranks
        return _Again(self.seconds(flops, 2 * held), held)

    def experts(self) -> _Again:
        """Return the MLP of an MoE layer."""
        shape = self.shape
        own = self._mlp(shape.expert_ffn or shape.ffn, shape.top_k)
        shared = self._mlp(shape.shared_ffn, 1) if shape.shared_ffn else _Again(0.0, 0.0)
        again = self.exchange + own.seconds + shared.seconds
        return _Again(again, own.freed + shared.freed)

    def mlp(self) -> _Again:
        """Return the MLP of a dense layer."""
        again = self._mlp(self.shape.ffn, 1)
        return again._replace(seconds=again.seconds + 2 * self.collective)

    def _mlp(self, ffn: int, count: int) -> _Again:
        shape, tokens = self.shape, self.tokens / self.setup.tp
        block = Block.mlp(shape.hidden, ffn or 4 * shape.hidden, shape.model != 'gpt')
        freed = count * _BF16 * tokens * block.inner
        return _Again(
            self.seconds(2 * count * tokens * shape.hidden * block.inner, 2 * freed), freed
        )

    def is_sparse(self, at: int, kind: str) -> bool:
        sparse = bool(self.shape.experts) and at >= self.shape.dense_first
        return kind == 'E' if self.shape.model == 'hybrid' else sparse and kind in 'tm'

    def layer(self, layer: Layer, sparse: bool) -> Layer:
        """Return a layer of the body as it runs, nothing of it twice."""
        job, kind = self.job, layer.kind
        talk = (_COLLECTIVES[kind] - 2 * (sparse and kind in 'tm')) * self.collective
        talk += self.exchange if sparse else 0.0
        forward, backward, held = talk, talk, 0.0
        if not job.fused and kind in 'tm*':
            scores = self.scores()
            forward += scores.seconds - self._causal()
            backward += 2 * (scores.seconds - self._causal())
            held += scores.freed
        rows, wait = self._rows(kind)
        more = self.seconds(0.0, 2 * rows)
        made = self._measured(self._divided(layer), forward + more, backward + more)
        return replace(
            made,
            activation=made.activation + rows + held,
            retained=(made.retained or 0.0) + wait,
            parameters=made.parameters + (self._expert_states() if sparse else 0.0),
        )

    def end(self, layer: Layer) -> Layer:
        """Return the embedding, or the output layer, as it runs."""
        talk = self.collective
        made = self._divided(layer)
        backward = talk if layer.kind == 'L' else 0.0
        return self._measured(made, talk, backward)

    def saved(self, layer: Layer, sparse: bool) -> tuple[Layer, float]:
        """Return a layer as it runs with the setup's recomputation, and its transient bytes."""
        saving, tp = self.setup.saving, self.setup.tp
        if saving == FULL:
            ranks = tp if self.setup.sequence_parallel else 1
            kept = _BF16 * self.tokens * self.shape.hidden / ranks
            again = _Again(layer.forward, layer.activation - kept)
        elif not self.job.fused:
            again = self.scores()
        else:
            again = self.experts() if sparse else self.mlp()
        backward = layer.backward + again.seconds
        return (
            replace(layer, backward=backward, activation=layer.activation - again.freed),
            again.freed,
        )

    def _causal(self) -> float:
        """Return the time of attention below the diagonal alone, which the shape has counted."""
        shape, ranks = self.shape, self.setup.tp * self.job.cp
        own = shape.heads * shape.width
        return self.seconds(2 * shape.micro_batch * shape.seq**2 * own / ranks, 0.0)

    def _rows(self, kind: str) -> tuple[float, float]:
        """Return bytes from F to B, and to W, that each tensor-parallel rank has undivided."""
        if self.setup.sequence_parallel or kind not in 'tm':
            return 0.0, 0.0
        block = Block.attention(self.shape.hidden, 0, 0)
        share = 1 - 1 / self.setup.tp
        held = 2 * (_BF16 * block.rows + block.mask) * self.tokens * share
        return held, 2 * _BF16 * block.rows * self.tokens * share

    def _expert_states(self) -> float:
        job, setup, shape = self.job, self.setup, self.shape
        etp = job.expert_ranks(setup)
        inner = shape.expert_ffn or shape.ffn or 4 * shape.hidden
        block = Block.mlp(shape.hidden, inner, shape.model != 'gpt')
        own = shape.experts / setup.ep * block.part().held
        sharing = setup.tp * job.cp * job.replicas(setup) / (setup.ep * etp)
        held = bytes_of_a_parameter(sharing if job.shards_optimizer else 1)
        return own / etp * held - own / setup.tp * bytes_of_a_parameter(shape.dp)

    def _divided(self, layer: Layer) -> Layer:
        """Return a layer of the shape on one of `cp` ranks, which share its tokens."""
        cp, ranks = self.job.cp, self.setup.tp if self.setup.sequence_parallel else 1
        return replace(
            layer,
            forward=layer.forward / cp,
            backward=layer.backward / cp,
            weight=layer.weight / cp,
            activation=layer.activation / cp,
            retained=(layer.retained or 0.0) / cp,
            output=layer.output / cp / ranks,
        )

    def _measured(self, layer: Layer, forward: float, backward: float) -> Layer:
        """Return a layer with more of F and B, all of it by the factors that were measured."""
        f, b, w = self.job.factors
        return replace(
            layer,
            forward=f * (layer.forward + forward),
            backward=b * (layer.backward + backward),
            weight=w * layer.weight,
        )


def layer_costs(job: Job, setup: Setup) -> SetupLayers:
    """Return the layers of the model as `setup` shares them out: seconds, bytes of one rank.

    Raises:
        ValueError: sizes do not fit the model.
    """
    shape = job.shape_of(setup)
    costing, (first, *body, last) = _Costing(job, setup, shape), layers_of(shape)
    made: list[Layer] = []
    transient = 0.0
    for at, plain in enumerate(body):
        sparse = costing.is_sparse(at, plain.kind)
        layer = costing.layer(plain, sparse)
        if setup.saving != NONE and plain.kind == 't':
            layer, freed = costing.saved(layer, sparse)
            transient = max(transient, freed)
        made.append(layer)
    return SetupLayers(Layers((costing.end(first), *made, costing.end(last))), transient)


def modules_again(job: Job) -> tuple[str, ...]:
    """Return the modules that selective recomputation is about, as Megatron's flag names them."""
    if not job.fused:
        return ('core_attn',)
    shape = job.shape
    dense = not shape.experts or shape.dense_first
    return (*(['mlp'] if dense else []), *(['moe'] if shape.experts else []))


def savings(shape: Shape) -> tuple[str, ...]:
    """Return the kinds of recomputation that Megatron has for such a model."""
    return (NONE,) if shape.model == 'hybrid' else (NONE, SELECTIVE, FULL)
