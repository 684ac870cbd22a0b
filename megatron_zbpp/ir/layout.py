"""Which layers a stage holds, in the language of Megatron's own flag.

>>> layout = ModelLayout(Placement.wave(2, 2), (2, 2, 2, 2))
>>> layout.text, layout.stages(0)
('Ett|tt|tt|ttL', (0, 3))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_zbpp.ir.placement import Placement


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
