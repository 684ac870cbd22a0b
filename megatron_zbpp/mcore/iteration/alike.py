"""Settings that all ranks of a pipeline must have alike, or they would wait forever."""

from __future__ import annotations

from typing import Any

from megatron_zbpp.runtime.channels import Message
from megatron_zbpp.version import __version__

# of TransformerConfig: what gives stages their shape, and what makes ranks communicate
_CONFIG = (
    'num_layers',
    'hidden_size',
    'ffn_hidden_size',
    'num_attention_heads',
    'num_query_groups',
    'num_moe_experts',
    'moe_router_topk',
    'params_dtype',
    'tensor_model_parallel_size',
    'context_parallel_size',
    'expert_model_parallel_size',
    'sequence_parallel',
    'calculate_per_token_loss',
    'overlap_moe_expert_parallel_comm',
)


def agreement(
    num_microbatches: int,
    num_chunks: int,
    message: Message,
    forward_only: bool,
    config: Any,
) -> dict[str, object]:
    """Return name and value of each, but for the schedule.

    From its name and m a release makes the same passes everywhere: they need not be compared.

    Args:
        num_microbatches: m.
        num_chunks: of the model on this rank.
        message: what neighbours exchange.
        forward_only: whether this is an evaluation.
        config: of the model.
    """
    return {
        'number of microbatches': num_microbatches,
        'forward only': forward_only,
        'model chunks on each rank': num_chunks,
        'message shape (sequence, micro batch, hidden)': message.shape and tuple(message.shape),
        'message dtype': message.dtype,
        **{name: getattr(config, name, None) for name in _CONFIG},
        'layers (by rank and chunk)': _layers(config),
        'megatron_zbpp': __version__,
    }


def _layers(config: Any) -> object:
    """Return lengths of a layout's chunks, embedding and loss counted; as it is what is none.

    A `ModelParallelConfig` that is no `TransformerConfig` knows no layout.
    """
    by_rank = getattr(getattr(config, 'pipeline_model_parallel_layout', None), 'layout', None)
    return by_rank and tuple(tuple(len(chunk) for chunk in chunks) for chunks in by_rank)
