"""Layer specs for `--spec`: what Megatron has for GPUs only, in plain torch."""

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region


class SequenceParallelNorm(torch.nn.LayerNorm):
    """A norm whose gradients Megatron sums over the tensor-parallel ranks, as TE's."""

    def __init__(self, config, hidden_size, eps=1e-5, **_):
        super().__init__(hidden_size, eps=eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel


class GatheringAttention(torch.nn.Module):
    """Causal attention for a sequence that context-parallel ranks share.

    Each gathers the keys and values of all; going back, their gradients are summed and scattered.
    """

    def __init__(self, config, layer_number, attn_mask_type, attention_type, **_):
        super().__init__()

    def forward(self, query, key, value, attention_mask, **_):
        """All are [sequence of this rank, batch, heads, width]; [sequence, batch, hidden]."""
        group = parallel_state.get_context_parallel_group()
        of_ranks = [_positions(len(query), rank, group.size()) for rank in range(group.size())]
        mask = of_ranks[group.rank()][:, None] >= torch.cat(of_ranks)
        key, value = (
            gather_from_sequence_parallel_region(part.contiguous(), group=group)
            .repeat_interleave(query.size(2) // part.size(2), dim=2)
            .permute(1, 2, 0, 3)
            for part in (key, value)
        )
        attended = torch.nn.functional.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3), key, value, attn_mask=mask
        )
        return attended.permute(2, 0, 1, 3).flatten(2)


def _positions(length: int, rank: int, size: int) -> torch.Tensor:
    """Of a rank's tokens in the sequence: of 2 size equal parts it has one from each end."""
    half = length // 2
    parts = [torch.arange(half) + part * half for part in (rank, 2 * size - 1 - rank)]
    return torch.cat(parts)


sequence_parallel, context = get_gpt_layer_local_spec(), get_gpt_layer_local_spec()
sequence_parallel.submodules.input_layernorm = SequenceParallelNorm
sequence_parallel.submodules.pre_mlp_layernorm = SequenceParallelNorm
context.submodules.self_attention.submodules.core_attention = GatheringAttention
