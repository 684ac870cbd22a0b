"""Which layers a stage holds, and where Megatron finds that out.

Megatron asks `TransformerConfig.pipeline_model_parallel_layout` for layer counts, offsets, layer
numbers and so the names in sharded checkpoints. Its own layout can express loops only;
`StageLayout` answers the same questions for any placement. NVIDIA's builders call some of their
specification functions without `vp_stage`; so the chunk that is being built is noted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import TransformerBlock, get_num_layers_to_build
from megatron.core.utils import get_attr_wrapped_model

from megatron_zbpp.ir import Placement
from megatron_zbpp.ir.placement import layout_string
from megatron_zbpp.mcore import compat, model_settings

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
_LETTERS = {
    LayerType.embedding: 'E',
    LayerType.decoder: 't',
    LayerType.mtp: 'm',
    LayerType.loss: 'L',
}


class StageLayout(PipelineParallelLayerLayout):
    """Megatron's layer layout for any placement.

    While the plugin is enabled, `TransformerConfig` makes one of a layout in Megatron's own
    language, whose stages are in model order as ever.
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
        self.stages = [  # the layers of each, in model order
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
        self, layer_type: Any = LayerType.decoder, vp_stage: Any = None, pp_rank: Any = None
    ) -> int:
        """Return layers of `layer_type` in all stages before this one, in model order."""
        if pp_rank is None:
            pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        own = self.placement.stages(pp_rank)[self._chunk(vp_stage)]
        return sum(stage.count(layer_type) for stage in self.stages[:own])

    def get_num_layers_to_build(
        self, layer_type: Any = LayerType.decoder, vp_stage: Any = None, pp_rank: Any = None
    ) -> int:
        """Return the layers of `layer_type` in this stage."""
        return super().get_num_layers_to_build(layer_type, self._chunk(vp_stage), pp_rank)

    def _chunk(self, vp_stage: int | None) -> int:
        """Return `vp_stage`; where it was not passed, the chunk that is being built."""
        chunk = chunk_being_built() if vp_stage is None else vp_stage
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
    """
    (stages,) = PipelineParallelLayerLayout(layout, 1).layout
    return _written(stages)


def text_of(model: torch.nn.Module, placement: Placement) -> str | None:
    """Return the layers of each stage, as `Ett|tt|ttL`, by one unwrapped chunk of a model.

    None where no layout can be given: for hybrid models, and others than Megatron's.
    """
    plain = isinstance(model, LanguageModule) and _hybrid(model) is None
    return text_by_config(model.config, placement) if plain else None


def text_by_config(config: Any, placement: Placement) -> str:
    """Return the layers of each stage of a model that is not hybrid, as `text_of`."""
    layout = config.pipeline_model_parallel_layout
    if isinstance(layout, StageLayout):
        return _written(layout.stages)
    chunks = placement.num_chunks
    counts = [
        get_num_layers_to_build(config, chunk if chunks > 1 else None, rank)
        for rank, chunk in zip(placement.only_route, placement.chunks, strict=True)
    ]
    return layout_string(counts, getattr(config, 'mtp_num_layers', None) or 0)


def _written(stages: list[list[LayerType]]) -> str:
    return '|'.join(''.join(_LETTERS[layer] for layer in stage) for stage in stages)


def layers_alike(config: Any) -> bool:
    """Return True if all decoder layers of a model of this config do the same.

    >>> from types import SimpleNamespace
    >>> [layers_alike(SimpleNamespace(moe_layer_freq=x)) for x in (1, [1, 1], [0, 1], 2)]
    [True, True, False, False]
    """
    for value in (getattr(config, name, None) for name in _PATTERNS):
        several = len({*value}) > 1 if isinstance(value, list | tuple) else False
        if several or value is True or (isinstance(value, int) and value > 1):
            return False
    return True


def _hybrid(model: torch.nn.Module) -> str | None:
    return next((c.__name__ for c in type(model).__mro__ if c.__name__ in _HYBRID_MODELS), None)


def require_placed(model: torch.nn.Module, placement: Placement, config: Any = None) -> None:
    """Check that the layers of `model` are where the schedule has its stages.

    `model` is unwrapped, and may be about to be built, of `config`. What is none of Megatron's
    language models places its layers by itself.
    """
    if placement.is_loop or not isinstance(model, LanguageModule):
        return
    name = _hybrid(model)
    if name is not None:
        if compat.segments_module() is not None:
            return  # their pattern is their layout; see patches.placement
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
    """Return True if this chunk holds the word embedding, or a copy that is to stay equal to it.

    The output layer is one where it is tied, the embedding of multi-token prediction always.
    """
    return (
        model.pre_process
        or getattr(model, 'mtp_process', False)
        or (model.post_process and model.share_embeddings_and_output_weights)
    )


def tied_copies(model: list[torch.nn.Module]) -> tuple[torch.nn.Parameter, ...]:
    """Return the word embedding and its copy, where two chunks here hold both."""
    chunks = (get_attr_wrapped_model(m, 'pre_process', return_model_obj=True) for m in model)
    holders: list[Any] = [chunk for chunk in chunks if has_embedding(chunk)]
    several = holders if len(holders) > 1 else []
    return tuple(holder.shared_embedding_or_output_weight() for holder in several)


_being_built: list[int] = []  # chunks


def chunk_being_built() -> int | None:
    """Return the index among this rank's chunks of the one that is being built; None: none is."""
    return _being_built[-1] if _being_built else None


def of_one_chunk(build: Callable) -> Callable:
    """Wrap what builds each chunk of a rank: it raises if the model ignores which chunk it is."""

    @functools.wraps(build)
    def build_chunk(*args: Any, **kwargs: Any) -> Any:
        chunk = kwargs.get('vp_stage')
        if chunk is None:
            return build(*args, **kwargs)
        _being_built.append(chunk)
        try:
            model = build(*args, **kwargs)
        finally:
            _being_built.pop()
        _require_chunk(model, chunk, name_of(build))
        return model

    return build_chunk


def name_of(build: Callable) -> str:
    """Return the name of a provider, through partial functions."""
    while isinstance(build, functools.partial):
        build = build.func
    return getattr(build, '__qualname__', type(build).__name__)


def _require_chunk(model: torch.nn.Module, chunk: int, builder: str) -> None:
    for module in model.modules():
        config: Any = getattr(module, 'config', None)
        if not isinstance(module, TransformerBlock | LanguageModule):
            continue
        if config.pipeline_model_parallel_size > 1 and getattr(module, 'vp_stage', chunk) != chunk:
            raise NotImplementedError(
                f'{builder} does not pass vp_stage={chunk} to the {type(model).__name__} that it '
                'builds, so that its layers take themselves for those of another chunk: pass it, '
                'or take a schedule with one chunk a rank, such as zb-h1'
            )
