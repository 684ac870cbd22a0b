"""A job to give advice on, its setups, and the costs of the layers of a setup.

Costs are those of the model's shape, with communication and recomputation. A collective of tensor
parallelism moves (tp-1)/tp of s·b·h values of bf16: a dense layer has four in F and four in B, with
sequence parallelism or without (arXiv 2205.05198, section 4.2). Tokens of experts go out and come
back once in F and once in B. Attention that keeps its scores holds 5·a·s²·b bytes more (there,
section 4.1) and computes those above the diagonal, too.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from megatron_zbpp.ir import Placement
from megatron_zbpp.ir.placement import layers_per_stage
from megatron_zbpp.partitioning.layers import Layer, Layers
from megatron_zbpp.partitioning.shapes import Block, Shape, bytes_of_a_parameter, layers_of

NONE, SELECTIVE, FULL = ('none', 'selective', 'full')
STOCK = ('1f1b', 'interleaved')  # schedules that Megatron has itself


@dataclass(frozen=True)
class Setup:
    """Sizes of parallelism, and what runs on them."""

    tp: int = 1  # tensor-parallel ranks
    pp: int = 1  # pipeline ranks
    chunks: int = 1  # model chunks of each pipeline rank
    ep: int = 1  # expert-parallel ranks
    micro_batch: int = 1  # samples of a microbatch
    schedule: str = '1f1b'  # name of a family
    saving: str = NONE  # Megatron's recomputation: none, selective or full
    sequence_parallel: bool = True  # whether tensor-parallel ranks share norms and dropout, too
    # decoder layers of each stage, where the launch line gives them; none: even
    layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Job:
    """A model, its batch, and the GPUs that are to train it."""

    shape: Shape  # of the model; its tp, ep, dp and micro batch are those of a `Setup`
    global_batch: int  # samples of an iteration
    gpus: int  # of the job
    memory: float  # bytes of a GPU
    gpus_per_node: int = 8  # that are linked by `within`
    within: float = 300.0  # GB/s that a GPU sends to others of its node
    between: float = 25.0  # GB/s that a GPU sends to other nodes
    host: float = 25.0  # GB/s of copies between a GPU and its host
    # bytes that the model cannot have: CUDA context, buffers of NCCL, fragments
    reserve: float = 4 * 2.0**30
    cp: int = 1  # context-parallel ranks
    etp: int = 0  # ranks that share an expert; 0: as many as `tp`
    shards_optimizer: bool = True  # whether replicas share the optimizer's state
    overlaps: bool = False  # whether gradients are reduced beside backward passes
    fused: bool = True  # whether attention keeps no scores
    # whether the embedding and the loss count as a layer each
    ends: tuple[bool, bool] = (False, False)
    # measured over predicted time of F, B and W
    factors: tuple[float, float, float] = (1.0, 1.0, 1.0)

    def __post_init__(self) -> None:
        for name in ('global_batch', 'gpus', 'memory', 'gpus_per_node', 'within', 'between', 'cp'):
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f'{name} {value}: give a number above 0')
        if not self.reserve < self.memory:
            raise ValueError(
                f'{self.memory / 2**30:.3g} GiB of memory less a reserve of '
                f'{self.reserve / 2**30:.3g} GiB leaves nothing: give more memory, or less reserve'
            )

    @property
    def room(self) -> float:
        """Bytes of a GPU that the model can have."""
        return self.memory - self.reserve

    def replicas(self, setup: Setup) -> int:
        """Return the data-parallel size; 0: the GPUs do not divide so."""
        model = setup.tp * setup.pp * self.cp
        return 0 if self.gpus % model else self.gpus // model

    def microbatches(self, setup: Setup) -> int:
        """Return the microbatches of an iteration; 0: the batch does not divide so."""
        step = self.replicas(setup) * setup.micro_batch
        return 0 if not step or self.global_batch % step else self.global_batch // step

    def shape_of(self, setup: Setup) -> Shape:
        """Return the model as `setup` shares it out."""
        dp = self.replicas(setup) * self.cp if self.shards_optimizer else 1
        sizes = {'tp': setup.tp, 'ep': setup.ep, 'micro_batch': setup.micro_batch, 'dp': dp}
        return replace(self.shape, **sizes)

    def expert_ranks(self, setup: Setup) -> int:
        """Return the ranks that share an expert."""
        return self.etp or setup.tp

    def counts(self, setup: Setup, placement: Placement) -> tuple[int, ...]:
        """Return the layers of each stage, embedding, loss and multi-token prediction included."""
        embedding, loss = self.ends
        total, stages = self.shape.layers, placement.num_stages
        if not setup.layers and (total + embedding + loss) % stages:
            raise ValueError(f'{total} layers do not divide among {stages} stages: give others')
        cuts = [*(setup.layers or layers_per_stage(total, placement, embedding, loss))]
        cuts[0] += 1
        cuts[-1] += 1 + self.shape.mtp
        return tuple(cuts)

    def rate(self, ranks: int) -> float:
        """Return bytes a second that a GPU sends within groups of so many neighbours."""
        return 1e9 * (self.within if ranks <= self.gpus_per_node else self.between)

    def why_impossible(self, setup: Setup) -> str:
        """Return why the job cannot be shared out so; empty: it can."""
        dp, etp = self.replicas(setup), self.expert_ranks(setup)
        if not dp:
            sizes = f'tp {setup.tp} x cp {self.cp} x pp {setup.pp}'
            return f'{self.gpus} GPUs do not divide by {sizes}'
        if not self.microbatches(setup):
            step = f'micro batch {setup.micro_batch} x {dp} data parallel'
            return f'a batch of {self.global_batch} does not divide by {step}'
        for count, name in ((self.shape.heads, 'heads'), (self.shape.groups, 'query groups')):
            if count % setup.tp:
                return f'{count} {name} do not divide by tp {setup.tp}'
        if self.shape.experts % setup.ep or setup.tp * self.cp * dp % (setup.ep * etp):
            return f'{self.shape.experts} experts do not divide among ep {setup.ep}'
        return ''


JOB_SIZES = {each.name: each.default for each in fields(Job)}


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

    @property
    def score_flops(self) -> float:
        """FLOPs of attention of all tokens with all; the shape counts those below the diagonal."""
        shape, ranks = self.shape, self.setup.tp * self.job.cp
        return 4 * shape.micro_batch * shape.seq**2 * shape.heads * shape.width / ranks

    def seconds(self, flops: float, moved: float) -> float:
        """Return the time of products of a rank, and of bytes in and out of its memory."""
        memory = self.shape.bandwidth
        return flops / (self.shape.tflops * 1e12) + (moved / (memory * 1e9) if memory else 0.0)

    def scores(self) -> _Again:
        """Return the attention that keeps scores, of all tokens with all."""
        shape, ranks = self.shape, self.setup.tp * self.job.cp
        held = 5 * shape.heads * shape.seq**2 * shape.micro_batch / ranks
        return _Again(self.seconds(self.score_flops, 2 * held), held)

    def experts(self) -> _Again:
        """Return the MLP of an MoE layer."""
        shape = self.shape
        own = self._mlp(shape.expert_ffn or shape.ffn, shape.top_k)
        shared = self._mlp(shape.shared_ffn, 1) if shape.shared_ffn else _Again(0.0, 0.0)
        return _Again(self.exchange + own.seconds + shared.seconds, own.freed + shared.freed)

    def _mlp(self, ffn: int, count: int) -> _Again:
        shape, tokens = self.shape, self.tokens / self.setup.tp
        block = Block.mlp(shape.hidden, ffn or 4 * shape.hidden, shape.model != 'gpt')
        freed = count * _BF16 * tokens * block.inner
        return _Again(
            self.seconds(2 * count * tokens * shape.hidden * block.inner, 2 * freed), freed
        )

    def layer(self, layer: Layer, sparse: bool) -> Layer:
        """Return a layer of the body as it runs, nothing of it twice."""
        job, kind = self.job, layer.kind
        talk = (_COLLECTIVES[kind] - 2 * (sparse and kind in 'tm')) * self.collective
        talk += self.exchange if sparse else 0.0
        forward, backward, held = talk, talk, 0.0
        if not job.fused and kind in 'tm*':
            scores = self.scores()
            more = scores.seconds - self.seconds(self.score_flops / 2, 0.0)
            forward, backward, held = forward + more, backward + 2 * more, scores.freed
        rows, wait = self._rows(kind)
        more = self.seconds(0.0, 2 * rows)
        made = self._shared(layer, forward + more, backward + more)
        return replace(
            made,
            activation=made.activation + rows + held,
            retained=(made.retained or 0.0) + wait,
            parameters=made.parameters + (self._expert_states() if sparse else 0.0),
        )

    def end(self, layer: Layer) -> Layer:
        """Return the embedding, or the output layer, as it runs."""
        backward = self.collective if layer.kind == 'L' else 0.0
        return self._shared(layer, self.collective, backward)

    def saved(self, layer: Layer, sparse: bool) -> tuple[Layer, float]:
        """Return a layer as it runs with the setup's recomputation, and its transient bytes."""
        saving, tp = self.setup.saving, self.setup.tp
        if saving == FULL:
            ranks = tp if self.setup.sequence_parallel else 1
            kept = _BF16 * self.tokens * self.shape.hidden / ranks
            again = _Again(layer.forward, layer.activation - kept)
        elif not self.job.fused:
            again = self.scores()
        elif sparse:
            again = self.experts()
        else:
            again = self._mlp(self.shape.ffn, 1)
            again = again._replace(seconds=again.seconds + 2 * self.collective)
        backward, held = layer.backward + again.seconds, layer.activation - again.freed
        return replace(layer, backward=backward, activation=held), again.freed

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

    def _shared(self, layer: Layer, forward: float, backward: float) -> Layer:
        """Return a layer on one of `cp` ranks with more of F and B, by the measured factors."""
        cp, (f, b, w) = self.job.cp, self.job.factors
        return replace(
            layer,
            forward=f * (layer.forward / cp + forward),
            backward=b * (layer.backward / cp + backward),
            weight=w * layer.weight / cp,
            activation=layer.activation / cp,
            retained=(layer.retained or 0.0) / cp,
            output=layer.output / cp / (self.setup.tp if self.setup.sequence_parallel else 1),
        )


def layer_costs(job: Job, setup: Setup) -> SetupLayers:
    """Return the layers of the model as `setup` shares them out: seconds, bytes of one rank."""
    shape = job.shape_of(setup)
    costing, (first, *body, last) = _Costing(job, setup, shape), layers_of(shape)
    made: list[Layer] = []
    transient = 0.0
    for at, plain in enumerate(body):
        sparse = bool(shape.experts) and at >= shape.dense_first and plain.kind in 'tm'
        if shape.model == 'hybrid':
            sparse = plain.kind == 'E'
        layer = costing.layer(plain, sparse)
        if setup.saving != NONE and plain.kind == 't':
            layer, freed = costing.saved(layer, sparse)
            transient = max(transient, freed)
        made.append(layer)
    return SetupLayers(Layers((costing.end(first), *made, costing.end(last))), transient)
