"""The GPT of the training benchmark, see `runners.Model`. Importing this imports Megatron."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

from benchmarks.gpt import build
from megatron_zbpp.ir import Placement
from megatron_zbpp.ir.placement import layers_per_stage, layout_string
from megatron_zbpp.runtime.weight_grads import WeightGradStore

_WORDS = 1024


@contextmanager
def _virtual(chunks: int) -> Iterator[None]:
    """Inside, Megatron's own layout gives each chunk its layers, and not those of the first."""
    before = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    parallel_state.set_virtual_pipeline_model_parallel_world_size(chunks if chunks > 1 else before)
    try:
        yield
    finally:
        parallel_state.set_virtual_pipeline_model_parallel_world_size(before)


class Gpt:
    """Megatron's GPTModel in fp32 with its local layers; a microbatch is one sample.

    Args:
        layers, hidden, sequence: its shape.
        head: size of an attention head.
        words: of the vocabulary.
        layout: of the layers, in Megatron's language; default: even.
        rotary: whether positions turn queries and keys, instead of being learned.
        tied: whether the output layer is the embedding.
        more: fields of Megatron's config.
    """

    micro_batch = 1
    forward_step = staticmethod(build.forward_step)

    def __init__(
        self,
        layers: int,
        hidden: int,
        head: int,
        sequence: int,
        words: int = _WORDS,
        layout: str | None = None,
        rotary: bool = False,
        tied: bool = False,
        **more: Any,
    ) -> None:
        self.sequence = sequence
        self._layers, self._hidden, self._head, self._words = layers, hidden, head, words
        self._layout, self._rotary, self._tied, self._more = layout, rotary, tied, more

    def chunks(self, placement: Placement, store: WeightGradStore) -> list[GPTModel]:
        held = placement.stages(dist.get_rank())
        layout = self._layout or layout_string(layers_per_stage(self._layers, placement))
        config = TransformerConfig(
            num_layers=self._layers,
            hidden_size=self._hidden,
            num_attention_heads=self._hidden // self._head,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            pipeline_dtype=torch.float32,
            pipeline_model_parallel_size=placement.num_ranks,
            pipeline_model_parallel_layout=layout,
            deallocate_pipeline_outputs=True,
            gradient_accumulation_fusion=False,
            **self._more,
        )
        spec = get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts, normalization=config.normalization
        )
        with _virtual(len(held)):
            return [
                GPTModel(
                    config,
                    spec,
                    vocab_size=self._words,
                    max_sequence_length=self.sequence,
                    pre_process=stage == 0,
                    post_process=stage == placement.num_stages - 1,
                    position_embedding_type='rope' if self._rotary else 'learned_absolute',
                    share_embeddings_and_output_weights=self._tied,
                    vp_stage=vp if len(held) > 1 else None,
                )
                for vp, stage in enumerate(held)
            ]

    def data(self, num_microbatches: int) -> Iterator[dict[str, torch.Tensor]]:
        words = torch.randint(self._words, (1, self.sequence + 1))
        positions = torch.arange(self.sequence).unsqueeze(0)
        return itertools.repeat(
            {'tokens': words[:, :-1], 'labels': words[:, 1:], 'positions': positions}
        )

    def ready(self) -> AbstractContextManager[None]:
        return nullcontext()
