"""The shape of a model, and what its dense layers hold between F, B and W, on device and host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_zbpp.analysis.memory import live
from megatron_zbpp.ir import Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.graph import HOST
from megatron_zbpp.mcore.model_settings import HYBRID
from megatron_zbpp.partitioning.shapes import Block, Shape
from megatron_zbpp.runtime.activations import copies

_SURE = 0.9  # of what is reckoned: that much leaves, whatever small tensors stay


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of one layer and one microbatch on a rank."""

    activation: float  # from F to B
    retained: float  # from B to W
    unit: int  # s·b·h, the sequence, micro batch and hidden size of this rank

    def __str__(self) -> str:
        held, waiting = (
            f'{amount / self.unit:.4g} s·b·h ({amount / 2**20:.4g} MiB)'
            for amount in (self.activation, self.retained)
        )
        return (
            f'a dense layer holds about {held} bytes of a microbatch between F and B, {waiting} '
            'between B and W'
        )


def shape_of(model: Any, length: int, **more: Any) -> Shape:
    """Return the shape of a model by Megatron's arguments, validated or not, or by its config.

    `length`: tokens of a sequence. `more`: fields of the shape, in place of the model's.
    """

    def first(*names: str, default: Any = 0) -> Any:
        return next((value for name in names if (value := getattr(model, name, None))), default)

    hidden, heads = first('hidden_size'), first('num_attention_heads')
    layers = more.get('layers') or first('num_layers')
    pattern = more.get('pattern', first(*HYBRID[:2], default=''))
    pattern = pattern.partition('/')[0].replace('|', '')
    if not hidden or not heads or not (layers or pattern):
        raise ValueError(
            'slices: how many layers and heads of which size the model has is not said, so no '
            'sizes can be found: give the tokens of each slice'
        )
    latent, experts = first('multi_latent_attention'), first('num_moe_experts', 'num_experts')
    gated = first('gated_linear_unit', 'swiglu')
    usual = 8 * hidden // 3 // 64 * 64 if gated else 4 * hidden
    grouped = getattr(model, 'group_query_attention', True)
    kind = 'hybrid' if pattern else 'mla' if latent else 'moe' if experts else ''
    every = first('moe_layer_freq', default=1)
    dense = every.count(0) if isinstance(every, list) else layers - layers // every
    sizes: dict[str, Any] = {
        'ffn': first('ffn_hidden_size', default=usual),
        'groups': 0 if latent else first('num_query_groups') if grouped else 0,
        'head_dim': first('qk_head_dim' if latent else 'kv_channels', default=hidden // heads),
        'experts': experts,
        'top_k': min(first('moe_router_topk', default=2), experts) if experts else 2,
        'expert_ffn': first('moe_ffn_hidden_size'),
        'shared_ffn': first('moe_shared_expert_intermediate_size'),
        'dense_first': dense if experts and not pattern else 0,
        'pattern': pattern,
    }
    if latent:
        sizes |= {
            'q_rank': first('q_lora_rank'),
            'kv_rank': first('kv_lora_rank', default=512),
            'rope_dim': first('qk_pos_emb_head_dim', default=64),
            'v_dim': first('v_head_dim'),
        }
    kind = kind or ('llama' if gated else 'gpt')
    known = Shape(kind, len(pattern) or layers, hidden, heads, 1, length, 1.0, **sizes)
    return replace(known, **more)


def layer_memory(settings: Any) -> LayerMemory | None:
    """Return the memory of a layer with fused attention.

    Of what sequence parallelism gathers, each rank keeps its rows. None where the sizes are not all
    given, or layers are not dense: experts, latent attention.
    """

    def get(name: str) -> Any:
        return getattr(settings, name, None)

    h, s, b = get('hidden_size'), get('seq_length'), get('micro_batch_size')
    if not (h and get('num_attention_heads') and s and b):
        return None
    if get('num_experts') or get('multi_latent_attention'):
        return None
    shape, t = shape_of(settings, s, layers=1, pattern=''), get('tensor_model_parallel_size')
    query, both = shape.heads * shape.width, 2 * (shape.groups or shape.heads) * shape.width
    blocks = Block.attention(h, query, both), Block.mlp(h, shape.ffn, get('swiglu'))
    sharded = t if get('sequence_parallel') else 1
    element = 2 if get('bf16') or get('fp16') else 4
    retained = sum(element * (block.rows / sharded + block.inner / t) for block in blocks)
    masks = sum(block.mask for block in blocks) if get('hidden_dropout') else 0
    activation = retained + masks / sharded
    if get('recompute_granularity') == 'full':
        activation = h * element / sharded
    tokens = s // get('context_parallel_size') * b
    return LayerMemory(activation * tokens, retained * tokens, tokens * h)


def require_host_memory(settings: Any, schedule: Schedule, environment: Mapping[str, str]) -> None:
    """Raise ValueError where the host cannot hold the activations of all ranks of this node.

    Without the environment of torchrun nothing is known of the node.
    """
    names = ('RANK', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'WORLD_SIZE')
    if not any(on_host(schedule, 1.0)) or any(name not in environment for name in names):
        return
    layer, room = layer_memory(settings), copies.room()
    if layer is None or room is None:
        return
    rank, local, on_node, size = (int(environment[name]) for name in names)
    held = on_host(schedule, layer.activation * settings.num_layers / schedule.num_stages)
    pipelines = max(1, size // schedule.num_ranks)  # pipeline ranks are the outermost
    first = rank - local
    needed = sum(held[(each // pipelines) % len(held)] for each in range(first, first + on_node))
    if _SURE * needed > room.nbytes:
        raise ValueError(
            f'{schedule.name} needs about {needed / 2**30:.3g} GiB of host memory for the '
            f'{on_node} ranks of this node, which has {room} left: offload fewer chunks, put '
            'fewer of the first pipeline ranks on one node, or give the job more memory'
        )


def on_host(schedule: Schedule, activation: float) -> tuple[float, ...]:
    """Return the most bytes of each rank on the host; `activation`: of a microbatch on a stage."""
    costs = Costs.uniform(schedule.placement)
    each = (activation,) * schedule.num_stages
    costs = costs.with_amounts(activation=each, retained=each)
    return tuple(max(held, default=0.0) for held in live(schedule, costs, HOST))
