"""Memory that a dense transformer layer of a launch line holds between its F, B and W."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

from megatron_zbpp.partitioning.shapes import Block


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of one layer and one microbatch on a rank.

    Attributes:
        activation: from F to B.
        retained: from B to W.
        unit: s·b·h, the sequence, micro batch and hidden size of this rank.
    """

    activation: float
    retained: float
    unit: int

    def __str__(self) -> str:
        held, waiting = (
            f'{amount / self.unit:.4g} s·b·h ({amount / 2**20:.4g} MiB)'
            for amount in (self.activation, self.retained)
        )
        return (
            f'a dense layer holds about {held} bytes of a microbatch between F and B, {waiting} '
            'between B and W'
        )


def layer_memory(args: Namespace) -> LayerMemory | None:
    """Return the memory of a layer with fused attention.

    Of what sequence parallelism gathers, each rank keeps its rows.

    Args:
        args: Megatron's, not validated.

    Returns:
        None where the sizes are not all given, or layers are not dense: experts, latent attention.
    """
    sizes = (args.hidden_size, args.num_attention_heads, args.seq_length, args.micro_batch_size)
    if not all(sizes) or args.num_experts or args.multi_latent_attention:
        return None
    h, heads, s, b = sizes
    t = args.tensor_model_parallel_size
    query = heads * (args.kv_channels or h // heads)
    groups = args.num_query_groups if args.group_query_attention else heads
    ffn = args.ffn_hidden_size or (4 * h * 2 // 3 // 64 * 64 if args.swiglu else 4 * h)
    blocks = (
        Block.attention(h, query, 2 * query * groups // heads),
        Block.mlp(h, ffn, args.swiglu),
    )
    sharded = t if args.sequence_parallel else 1
    element = 2 if args.bf16 or args.fp16 else 4
    retained = sum(element * (block.rows / sharded + block.inner / t) for block in blocks)
    masks = sum(block.mask for block in blocks) if args.hidden_dropout else 0
    activation = retained + masks / sharded
    if args.recompute_granularity == 'full':
        activation = h * element / sharded
    tokens = s // args.context_parallel_size * b
    return LayerMemory(activation * tokens, retained * tokens, tokens * h)
