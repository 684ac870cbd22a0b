"""WHERE: which rank holds which stage, and which layers a stage has.

>>> layout = ModelLayout(Placement.wave(2, 2), (2, 2, 2, 2))
>>> layout.text, layout.stages(0)
('Ett|tt|tt|ttL', (0, 3))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property


@dataclass(frozen=True)
class Placement:
    """Stages by the rank that holds them.

    >>> v = Placement.v(2)
    >>> v.only_route, v.stages(0)
    ((0, 1, 1, 0), (0, 3))
    >>> two = Placement.two_way(2)
    >>> two.rank_of(0, microbatch=0), two.rank_of(0, microbatch=1), two.stages(0)
    (0, 1, (0, 1))

    Attributes:
        first_route: rank of each stage, in model order. Rank r's chunks are its stages in that
            order. Readers ask `only_route`, `routes` or `rank_of`.
        name: `loop`, `v`, `wave`, ...: for people; placements with equal ranks are equal.
        opposite: rank of each stage on a second route, for schedules whose microbatches run
            against each other, each on a copy of the model; empty: there is one route.
        route: which route a microbatch takes, 0 or 1: microbatch i takes entry i mod their number.
    """

    first_route: tuple[int, ...]
    name: str = field(default='custom', compare=False)
    opposite: tuple[int, ...] = ()
    route: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        for ranks in self.routes:
            held = set(ranks)
            if not held or min(held) != 0 or max(held) != len(held) - 1:
                raise ValueError(
                    f'placement {ranks} is not valid: give each rank 0..p-1 at least one stage'
                )
            if len(ranks) != self.num_stages or len(held) != self.num_ranks:
                raise ValueError(
                    f'routes {self.first_route} and {ranks} differ in stages or ranks: give both '
                    'alike'
                )
        if not self.route or not set(self.route) <= set(range(len(self.routes))):
            raise ValueError(
                f'route {self.route} is not valid: give 0{" or 1" * bool(self.opposite)} for each '
                'microbatch'
            )

    @property
    def routes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of the stages on each route."""
        return (self.first_route, self.opposite) if self.opposite else (self.first_route,)

    @property
    def is_one_way(self) -> bool:
        """True where all microbatches take one route, so that each stage is on one rank."""
        return not self.opposite

    @property
    def only_route(self) -> tuple[int, ...]:
        """The rank of each stage, where that is the same for all microbatches.

        Raises:
            ValueError: it is not.
        """
        if not self.is_one_way:
            raise ValueError(
                f'placement {self.name!r} has two routes, and what is asked for is for one: take a '
                'schedule with one route, such as dualpipe-v'
            )
        return self.first_route

    @property
    def num_stages(self) -> int:
        return len(self.first_route)

    @cached_property
    def num_ranks(self) -> int:
        return max(self.first_route) + 1

    @cached_property
    def _stages(self) -> tuple[tuple[int, ...], ...]:
        held: list[set[int]] = [set() for _ in range(self.num_ranks)]
        for ranks in self.routes:
            for stage, rank in enumerate(ranks):
                held[rank].add(stage)
        return tuple(tuple(sorted(stages)) for stages in held)

    def stages(self, rank: int) -> tuple[int, ...]:
        """Return the stages that `rank` holds, in model order: entry c is its chunk c."""
        return self._stages[rank]

    def partner(self, rank: int) -> int:
        """Return the rank that keeps activations of `rank`, or for which it keeps some.

        (BPipe, ICML 2023: of a chain the first rank holds most, and the last least.)
        """
        return self.num_ranks - 1 - rank

    def route_of(self, microbatch: int) -> int:
        """Return the route that `microbatch` takes."""
        return self.route[microbatch % len(self.route)]

    def shade(self, stage: int, microbatch: int) -> tuple[int, int]:
        """Return by which shade of how many pictures show it: its route of two, else its chunk."""
        if self.is_one_way:
            return self.chunk_of(stage), self.num_chunks
        return self.route_of(microbatch), len(self.routes)

    def rank_of(self, stage: int, microbatch: int) -> int:
        """Return the rank that runs `stage` of `microbatch`.

        Behind the last stage comes what each rank has one of: see `ir.graph.Task`.
        """
        return self.on_route(self.route_of(microbatch), stage)

    def on_route(self, route: int, stage: int) -> int:
        """Return the rank that runs `stage` of microbatches on `route`."""
        return self.routes[route][stage] if stage < self.num_stages else stage - self.num_stages

    @cached_property
    def chunks(self) -> tuple[int, ...]:
        """Chunk of each stage on the first route: Megatron's vp_stage.

        That is its index among the stages of its rank.
        """
        ranks = enumerate(self.first_route)
        return tuple(self._stages[rank].index(stage) for stage, rank in ranks)

    def chunk_of(self, stage: int) -> int:
        """Return the chunk of `stage`; the first for what each rank has one of."""
        return self.chunks[stage] if stage < self.num_stages else 0

    @cached_property
    def num_chunks(self) -> int:
        """Most chunks that any rank holds."""
        return max(map(len, self._stages))

    @property
    def is_loop(self) -> bool:
        """True where stages go around the ranks, as Megatron's own do."""
        return self.routes == Placement.loop(self.num_ranks, self.num_chunks).routes

    def reversed(self) -> Placement:
        """Return the same placement with rank r renamed to p-1-r (a V becomes a Λ and back)."""
        return self.renamed(range(self.num_ranks)[::-1])

    def renamed(self, names: Sequence[int]) -> Placement:
        """Return the same placement with rank r renamed to `names[r]`."""
        ranks, opposite = (
            tuple(names[rank] for rank in route) for route in (self.first_route, self.opposite)
        )
        return Placement(ranks, self.name, opposite, self.route)

    def folded(self) -> Placement:
        """Return the placement of one replica where D = 2P ranks are two replicas of P ranks.

        Ranks that hold the same stages are the replicas of one rank: of a V, where each route is a
        loop. A microbatch goes on in the other replica at the turn. With one route it is the
        placement itself.

        >>> Placement.two_way(4).folded().only_route
        (0, 1, 1, 0)

        Raises:
            ValueError: the ranks are no pairs that hold the same stages.
        """
        if self.is_one_way:
            return self
        held = [self.stages(rank) for rank in range(self.num_ranks)]
        names = {stages: name for name, stages in enumerate(dict.fromkeys(held))}
        if any(held.count(stages) != 2 for stages in names):
            raise ValueError(
                f'placement {self.routes} cannot be two replicas because its ranks are no pairs '
                'that hold the same stages: give both routes the mirror image of each other'
            )
        return Placement(tuple(names[held[rank]] for rank in self.first_route), 'folded')

    @classmethod
    def loop(cls, num_ranks: int, num_chunks: int = 1) -> Placement:
        """Return stage s on rank s mod p, as Megatron (PTD-P, arXiv 2104.04473, section 2.2)."""
        return cls(tuple(range(num_ranks)) * num_chunks, 'loop')

    @classmethod
    def wave(cls, num_ranks: int, num_chunks: int = 2) -> Placement:
        """Return down, up, down, ...: stages snake over the ranks (Hanayo, arXiv 2308.15762)."""
        down = tuple(range(num_ranks))
        ranks = sum((down[::-1] if chunk % 2 else down for chunk in range(num_chunks)), ())
        return cls(ranks, 'v' if num_chunks == 2 else 'wave')

    @classmethod
    def v(cls, num_ranks: int) -> Placement:
        """Return stages s and 2p-1-s on rank s (ZB-V, arXiv 2401.10241, section 6)."""
        return cls.wave(num_ranks, 2)

    @classmethod
    def two_way(cls, num_ranks: int) -> Placement:
        """Return two loops against each other (Chimera, arXiv 2107.06925)."""
        return cls.loop(num_ranks).both_ways()

    def both_ways(self) -> Placement:
        """Return this one against its mirror image, microbatches by turns on either.

        Raises:
            ValueError: a rank would hold a stage twice.
        """
        mirrored = self.reversed().first_route
        if any(a == b for a, b in zip(self.first_route, mirrored, strict=True)):
            raise ValueError(
                f'{self.num_ranks} ranks cannot run both ways because the middle one would hold a '
                'stage twice: give an even number of ranks'
            )
        return Placement(self.first_route, 'two-way', mirrored, (0, 1))


def layers_per_stage(
    num_layers: int,
    placement: Placement,
    embedding: int = 0,
    loss: int = 0,
    fixed: Mapping[int, int] | None = None,
    setting: str = '--num-layers',
) -> list[int]:
    """Return transformer layers of each stage, in model order, as even as can be.

    Embedding and loss, with layers of multi-token prediction, count as so many layers, by which
    their stages get fewer; `fixed` are layers of some stages, whatever counts there. What does not
    divide is spread evenly over the ranks, and an end that has work which does not count as a layer
    comes last. Errors name the `setting` of the number of layers.
    """
    stages, fixed = placement.num_stages, fixed or {}
    taken = [0] * stages
    taken[0] += embedding
    most = (num_layers + embedding) // max(stages - 1, 1)  # where the last stage has no layer
    taken[-1] += min(loss, most)
    free = [stage for stage in range(stages) if stage not in fixed]
    rest = num_layers - sum(fixed.values())
    base, extra = divmod(rest + sum(taken[stage] for stage in free), max(len(free), 1))
    counts = [fixed.get(stage, base - taken[stage]) for stage in range(stages)]
    loads = [0] * placement.num_ranks  # of what does not divide
    holders = [tuple(route[s] for route in placement.routes) for s in range(stages)]
    spared = {0: not embedding, stages - 1: not loss}
    for _ in range(extra if free else 0):
        stage = min(free, key=lambda s: (spared.get(s, False), sum(loads[r] for r in holders[s])))
        free.remove(stage)
        counts[stage] += 1
        for rank in holders[stage]:
            loads[rank] += 1
    fewest = min(count + own for count, own in zip(counts, taken, strict=True))
    if fewest < 1 or min(counts) < 0 or sum(counts) != num_layers:
        given = f', of which {dict(fixed)} (layers by stage) are given' if fixed else ''
        raise ValueError(
            f'{num_layers} layers cannot be placed on {stages} stages ({placement.num_ranks} ranks '
            f'of {placement.num_chunks}{given}): give each stage a layer '
            f'({setting}), or use fewer pipeline ranks or a schedule with fewer chunks '
            f'(as a plan, zbpp plan --num-layers {num_layers})'
        )
    return counts


def layout_string(layers: Sequence[int], mtp_num_layers: int = 0) -> str:
    """Return the layout of stages with so many layers each, in the language of Megatron's own flag.

    >>> layout_string(layers_per_stage(8, Placement.v(2), loss=2), mtp_num_layers=2)
    'Ett|ttt|tt|tmmL'
    """
    return f'E{"|".join("t" * count for count in layers)}{"m" * mtp_num_layers}L'


@dataclass(frozen=True)
class ModelLayout:
    """Parts of a model by the rank that builds them.

    Attributes:
        placement: which rank holds which stage, in Megatron's ranks.
        layers: transformer layers of each stage, in model order.
        mtp_num_layers: of multi-token prediction, on the last stage.
    """

    placement: Placement
    layers: tuple[int, ...]
    mtp_num_layers: int = 0

    @property
    def num_chunks(self) -> int:
        """Model chunks of each rank, for `virtual_pipeline_model_parallel_size` if above 1."""
        return self.placement.num_chunks

    @property
    def text(self) -> str | None:
        """The `TransformerConfig.pipeline_model_parallel_layout`; None where there is one stage."""
        if self.placement.num_stages == 1:
            return None
        return layout_string(self.layers, self.mtp_num_layers)

    def stages(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a pipeline rank, a chunk each."""
        return self.placement.stages(rank)

    def is_first(self, stage: int) -> bool:
        """Check that the stage begins with the embedding, for `pre_process`."""
        return stage == 0

    def is_last(self, stage: int) -> bool:
        """Check that the stage ends with the loss, for `post_process`."""
        return stage == self.placement.num_stages - 1
