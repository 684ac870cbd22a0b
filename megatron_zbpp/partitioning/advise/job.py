"""A job to give advice on, and a setup of it: how GPUs are shared out and what they run."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from megatron_zbpp.ir import Placement
from megatron_zbpp.ir.layout import layers_per_stage
from megatron_zbpp.partitioning.shapes import Shape

NONE, SELECTIVE, FULL = SAVINGS = ('none', 'selective', 'full')
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
        """Return the layers of each stage, embedding, loss and multi-token prediction included.

        Raises:
            ValueError: the layers do not divide.
        """
        embedding, loss = self.ends
        total, stages = self.shape.layers, placement.num_stages
        if not setup.layers and (total + embedding + loss) % stages:
            raise ValueError(f'{total} layers do not divide among {stages} stages: give others')
        layers = setup.layers or layers_per_stage(total, placement, embedding, loss)
        cuts = [*layers]
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
