"""Which layers a stage holds, and where Megatron finds that out.

Megatron asks `TransformerConfig.pipeline_model_parallel_layout` for layer counts, offsets, layer
numbers and so the names in sharded checkpoints. Its own layout can express loops only;
`StageLayout` answers the same questions for any placement.

Where the loss is: see `programs`; where the first stage is: see `patches.placement`.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.utils import get_attr_wrapped_model

from megatron_zbpp.ir import Placement
from megatron_zbpp.ir.layout import layout_string
from megatron_zbpp.mcore import building, compat, model_settings

# They divide their pattern among the stages, and have no layout.
_HYBRID_MODELS = ('HybridModel', 'MambaModel')
# of TransformerConfig: which decoder layers are others than the rest
_PATTERNS = (
    'moe_layer_freq',
    'linear_attention_freq',
    'window_attn_skip_freq',
    'no_rope_freq',
    'heterogeneous_block_specs',
)
# Megatron's arguments that place layers, by their names in Megatron-Bridge
BRIDGE_FIELDS = {
    'pipeline_model_parallel_layout': 'pipeline_model_parallel_layout',
    'decoder_first_pipeline_num_layers': 'num_layers_in_first_pipeline_stage',
    'decoder_last_pipeline_num_layers': 'num_layers_in_last_pipeline_stage',
    'account_for_embedding_in_pipeline_split': 'account_for_embedding_in_pipeline_split',
    'account_for_loss_in_pipeline_split': 'account_for_loss_in_pipeline_split',
}
LETTERS = {
    LayerType.embedding: 'E',
    LayerType.decoder: 't',
    LayerType.mtp: 'm',
    LayerType.loss: 'L',
}


class StageLayout(PipelineParallelLayerLayout):
    """Megatron's layer layout for any placement.

    While the plugin is enabled, `TransformerConfig` makes one of a layout in Megatron's own
    language, whose stages are in model order as ever.

    Args:
        placement: which rank holds which stage, all ranks the same number of chunks.
        layout: the layers of each stage, as Megatron's flag or as lists.

    Attributes:
        stages: the layers of each, in model order.

    Raises:
        ValueError: another number of stages than the placement has, or multi-token prediction in a
            stage before the loss where that is not laid out in a loop.
    """

    # not among its vars: Megatron-Bridge sets all of those anew in a copy, down to their own
    __slots__ = ('placement',)

    def __init__(self, placement: Placement, layout: str | list) -> None:
        stages = self.parse_str_to_list(layout) if isinstance(layout, str) else layout
        if len(stages) != placement.num_stages:
            raise ValueError(
                f'pipeline_model_parallel_layout {layout} has {len(stages)} stages, but the '
                f'schedule places {placement.num_stages} ({placement.num_ranks} ranks of '
                f'{placement.num_chunks}): give that many, divided by |'
            )
        self.placement = placement
        held = map(placement.stages, range(placement.num_ranks))
        by_chunk = [stages[stage] for chunk in zip(*held, strict=True) for stage in chunk]
        super().__init__(by_chunk, placement.num_ranks)
        self.input_data = layout
        self.stages = [
            self.layout[rank][chunk]
            for rank, chunk in zip(placement.only_route, placement.chunks, strict=True)
        ]
        self.flatten_layout = [layer for stage in self.stages for layer in stage]
        if not placement.is_loop and any(LayerType.mtp in stage for stage in self.stages[:-1]):
            raise ValueError(
                f'pipeline_model_parallel_layout {layout} has multi-token prediction (m) before '
                "the stage of the loss: Megatron finds that stage's copy of the embedding in a "
                'loop only; take a schedule that has one, such as zb-h1 or zb-interleaved, or put '
                'm before L in the last stage'
            )

    @property
    def num_layers(self) -> list[int]:
        """Transformer layers of each stage, in model order."""
        return [stage.count(LayerType.decoder) for stage in self.stages]

    def get_layer_offset(
        self,
        layer_type: LayerType = LayerType.decoder,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
    ) -> int:
        """Return layers of `layer_type` in all stages before this one, in model order."""
        if pp_rank is None:
            pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        own = self.placement.stages(pp_rank)[self._chunk(vp_stage)]
        return sum(stage.count(layer_type) for stage in self.stages[:own])

    def get_num_layers_to_build(
        self,
        layer_type: LayerType = LayerType.decoder,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
    ) -> int:
        """Return the layers of `layer_type` in this stage."""
        return super().get_num_layers_to_build(layer_type, self._chunk(vp_stage), pp_rank)

    def _chunk(self, vp_stage: int | None) -> int:
        """Return `vp_stage`; where it was not passed, the chunk that is being built."""
        chunk = building.chunk_being_built() if vp_stage is None else vp_stage
        if chunk is None and self.placement.num_chunks > 1:
            raise ValueError(
                f'vp_stage is None, but each rank has {self.placement.num_chunks} model chunks: '
                'pass the index of the chunk'
            )
        return chunk or 0


def text_of_stages(layout: str | list) -> str:
    """Return the stages of a layout as Megatron's flag writes them, repetitions written out.

    >>> text_of_stages('Et*2|(t|)*2tL')
    'Ett|t|t|tL'

    Args:
        layout: as the flag, or as lists.
    """
    (stages,) = PipelineParallelLayerLayout(layout, 1).layout
    return '|'.join(''.join(LETTERS[layer] for layer in stage) for stage in stages)


def text_of(model: torch.nn.Module, placement: Placement) -> str | None:
    """Return the layers of each stage in the language of Megatron's flag, as `Ett|tt|ttL`.

    None where no layout can be given: for hybrid models, and others than Megatron's.

    Args:
        model: a chunk, unwrapped.
        placement: of the stages.
    """
    if not isinstance(model, LanguageModule) or _hybrid(model) is not None:
        return None
    return text_by_config(model.config, placement)


def text_by_config(config: Any, placement: Placement) -> str:
    """Return the layers of each stage of a model that is not hybrid, as `text_of`.

    Args:
        config: of the model.
        placement: of the stages.
    """
    layout = config.pipeline_model_parallel_layout
    if isinstance(layout, StageLayout):
        return '|'.join(''.join(LETTERS[layer] for layer in stage) for stage in layout.stages)
    chunks = placement.num_chunks
    counts = [
        get_num_layers_to_build(config, chunk if chunks > 1 else None, rank)
        for rank, chunk in zip(placement.only_route, placement.chunks, strict=True)
    ]
    return layout_string(counts, getattr(config, 'mtp_num_layers', None) or 0)


def layers_alike(config: Any) -> bool:
    """Return whether the decoder layers of a model of this config do the same.

    >>> from types import SimpleNamespace
    >>> [layers_alike(SimpleNamespace(moe_layer_freq=x)) for x in (1, [1, 1], [0, 1], 2)]
    [True, True, False, False]
    """
    given = (getattr(config, name, None) for name in _PATTERNS)
    return not any(_varies(value) for value in given)


def _varies(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return len(set(value)) > 1
    return value is True or (isinstance(value, int) and value > 1)


def _hybrid(model: torch.nn.Module) -> str | None:
    """Return which of the hybrid models it is; None: it is none."""
    return next((c.__name__ for c in type(model).__mro__ if c.__name__ in _HYBRID_MODELS), None)


def require_placed(model: torch.nn.Module, placement: Placement, config: Any = None) -> None:
    """Check that the layers of `model` are where the schedule has its stages.

    What is none of Megatron's language models places its layers by itself.

    Args:
        model: unwrapped; it may be about to be built.
        placement: of the schedule.
        config: of the model; default: its own.

    Raises:
        NotImplementedError: its class knows no other places than a loop's.
        ValueError: it is laid out as for Megatron's own schedules, in a loop.
    """
    if placement.is_loop or not isinstance(model, LanguageModule):
        return
    name = _hybrid(model)
    if name is not None and compat.segments_module() is not None:
        return  # their pattern is their layout; see patches.placement
    if name is not None:
        reason, cure = model_settings.IN_A_LOOP
        raise NotImplementedError(f'{name} does not work with this schedule: {reason}; {cure}')
    layout = (config or model.config).pipeline_model_parallel_layout
    if not isinstance(layout, StageLayout) or layout.placement != placement:
        raise ValueError(
            f'the layers of this {type(model).__name__} are not laid out for the schedule: call '
            'megatron_zbpp.enable() before the TransformerConfig is made, and give it '
            f'pipeline_model_parallel_layout with {placement.num_stages} stages in model order, '
            'divided by |'
        )


def has_embedding(model: Any) -> bool:
    """Return whether this chunk holds the word embedding, or a copy that is to stay equal to it.

    The output layer is one where it is tied, the embedding of multi-token prediction always.
    """
    return (
        model.pre_process
        or getattr(model, 'mtp_process', False)
        or (model.post_process and model.share_embeddings_and_output_weights)
    )


def tied_copies(model: list[torch.nn.Module]) -> tuple[torch.nn.Parameter, ...]:
    """Return the word embedding and its copy, where two chunks here hold both."""
    chunks: list[Any] = [
        get_attr_wrapped_model(m, 'pre_process', return_model_obj=True) for m in model
    ]
    holders = [chunk for chunk in chunks if has_embedding(chunk)]
    if len(holders) < 2:
        return ()
    return tuple(holder.shared_embedding_or_output_weight() for holder in holders)
