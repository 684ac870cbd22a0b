"""Which layers a stage holds, and where Megatron finds that out.

Megatron asks `TransformerConfig.pipeline_model_parallel_layout` for layer counts, offsets, layer
numbers and so the names in sharded checkpoints. Its own layout can express loops only;
`StageLayout` answers the same questions for any placement. With it no Megatron function changes.

A schedule whose placement ends on rank 0 (every V) is run with its ranks reversed, as a Λ: loss and
embedding are on the last rank, where Megatron's loss logging, evaluation, token counts and output
casts expect the loss. What remains is the embedding group: see `embedding_ranks`.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.utils import get_attr_wrapped_model

from megatron_zbpp.ir import Placement, Schedule


def for_megatron(schedule: Schedule) -> Schedule:
    """`schedule` with its ranks reversed if that brings the loss to the last rank.

    Raises:
        ValueError: the loss is on neither end; Megatron reports from the last rank.
    """
    last = schedule.num_ranks - 1
    for candidate in (schedule, schedule.reversed()):
        if candidate.placement.ranks[-1] == last:
            return candidate
    raise ValueError(
        f'{schedule.name} places the last stage on rank {schedule.placement.ranks[-1]}: '
        f'Megatron needs it on the first or last rank (0 or {last})'
    )


def embedding_ranks(placement: Placement, pp_ranks: list[int]) -> list[int]:
    """Ranks among `pp_ranks` that hold the embedding or its copy in the output layer.

    For `get_embedding_ranks` of `initialize_model_parallel`, through `functools.partial`. One rank
    that holds both needs no group: `tie_embeddings` and the plugin keep its two copies equal.
    """
    return sorted({pp_ranks[placement.ranks[0]], pp_ranks[placement.ranks[-1]]})


def layers_per_stage(
    num_layers: int, placement: Placement, embedding: bool = False, loss: bool = False
) -> list[int]:
    """Transformer layers of each stage, in model order, as even as can be.

    Args:
        num_layers: of the model.
        placement: of the schedule.
        embedding: whether the embedding counts as a layer, so that its stage gets one fewer.
        loss: the same for the output layer and loss.

    Returns:
        One count per stage, summing to `num_layers`; what does not divide goes to inner stages.

    Raises:
        ValueError: too few layers for so many stages.
    """
    stages = placement.num_stages
    taken = [0] * stages
    taken[0] += embedding
    taken[-1] += loss
    base, extra = divmod(num_layers + sum(taken), stages)
    counts = [base - own for own in taken]
    for stage in sorted(range(stages), key=lambda s: s in (0, stages - 1))[:extra]:
        counts[stage] += 1
    if min(count + own for count, own in zip(counts, taken, strict=True)) < 1:
        raise ValueError(
            f'{num_layers} layers cannot be placed on {stages} stages '
            f'({placement.num_ranks} ranks of {placement.num_chunks}): give each stage a layer '
            '(--num-layers), or use fewer pipeline ranks or a schedule with fewer chunks'
        )
    return counts


class StageLayout(PipelineParallelLayerLayout):
    """A layer layout for any placement, for `TransformerConfig.pipeline_model_parallel_layout`.

    Args:
        placement: which rank holds which stage, all ranks the same number of chunks.
        layers: transformer layers of each stage, in model order.
    """

    def __init__(self, placement: Placement, layers: list[int]) -> None:
        self.placement = placement
        stages = [[LayerType.decoder] * count for count in layers]
        stages[0] = [LayerType.embedding, *stages[0]]
        stages[-1] = [*stages[-1], LayerType.loss]
        held = map(placement.stages, range(placement.num_ranks))
        by_chunk = [stages[stage] for chunk in zip(*held, strict=True) for stage in chunk]
        super().__init__(by_chunk, placement.num_ranks)
        self.flatten_layout = [layer for stage in stages for layer in stage]

    def get_layer_offset(
        self,
        layer_type: LayerType = LayerType.decoder,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
    ) -> int:
        """Layers of `layer_type` in all stages before this one, in model order."""
        if pp_rank is None:
            from megatron.core import parallel_state

            pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        own = self.placement.stages(pp_rank)[vp_stage or 0]
        return sum(
            self.layout[self.placement.ranks[stage]][self.placement.chunks[stage]].count(layer_type)
            for stage in range(own)
        )


def tied_copies(model: list[torch.nn.Module]) -> tuple[torch.nn.Parameter, ...]:
    """The word embedding and the output layer's copy, where this rank holds both in two chunks."""
    chunks = [get_attr_wrapped_model(m, 'pre_process', return_model_obj=True) for m in model]
    ends = [c for c in chunks if c.pre_process != c.post_process]
    if len(ends) < 2 or not all(c.share_embeddings_and_output_weights for c in ends):
        return ()
    return tuple(c.shared_embedding_or_output_weight() for c in ends)


def tie_embeddings(model: list[torch.nn.Module]) -> None:
    """Makes the output layer's weight a copy of the embedding's; before wrapping in DDP.

    Megatron does it by an all-reduce between the first and the last rank; where one rank holds both
    it does not see the pair.
    """
    copies = tied_copies(model)
    if copies:
        embedding, output = copies
        with torch.no_grad():
            output.copy_(embedding)
        # as Megatron marks them: own buckets in DDP, counted once in the gradient norm
        embedding.shared_embedding = output.shared_embedding = True
