"""Memory that a dense transformer layer of a launch line holds between its F, B and W.

Counted are the tensors of Reducing Activation Recomputation in Large Transformer Models (arXiv
2205.05198, section 4), and those that a linear layer's weight gradient takes: its input and the
gradient of its output. Of what sequence parallelism gathers, each rank keeps its rows.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass


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
    """Of a layer with fused attention, which keeps no scores.

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
    qkv = query + 2 * query * groups // heads
    ffn = args.ffn_hidden_size or (4 * h * 2 // 3 // 64 * 64 if args.swiglu else 4 * h)
    into_ffn = ffn * (2 if args.swiglu else 1)
    sharded = t if args.sequence_parallel else 1
    element = 2 if args.bf16 or args.fp16 else 4
    # inputs of both norms and of both column-parallel layers; a byte for each element of dropout
    ends = 4 * h * element + (2 * h if args.hidden_dropout else 0)
    inner = (qkv + query + into_ffn + ffn) * element
    activation = ends / sharded + inner / t
    if args.recompute_granularity == 'full':
        activation = h * element / sharded
    retained = 4 * h * element / sharded + inner / t
    tokens = s // args.context_parallel_size * b
    return LayerMemory(activation * tokens, retained * tokens, tokens * h)
