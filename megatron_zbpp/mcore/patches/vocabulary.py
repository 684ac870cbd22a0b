"""The output layer on all pipeline ranks: each has a shard in the last chunk that it builds.

The rank of the loss makes the layer as Megatron does, with the values that it draws, and gives each
rank its rows before DDP takes notice of any parameter. In checkpoints it is one tensor as ever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel import ColumnParallelLinear

from megatron_zbpp.mcore.patches.registry import Patch
from megatron_zbpp.mcore.vocabulary import OutputShard, gathered

_GPT = 'megatron.core.models.gpt.gpt_model:GPTModel'
_PADDING = 128  # Megatron's default of --make-vocab-size-divisible-by

Collective = Callable[[str], AbstractContextManager]


def patches(num_chunks: int, collective: Collective) -> Iterator[Patch]:
    """Yield what divides the output layer.

    Args:
        num_chunks: that each rank builds.
        collective: around what waits for other ranks.
    """
    yield Patch(_GPT, '__init__', functools.partial(_dividing, num_chunks, collective))


def _dividing(num_chunks: int, collective: Collective, original: Callable) -> Callable:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.config.pipeline_model_parallel_size > 1 and self.vp_stage in (None, num_chunks - 1):
            with collective('shards of the output layer'):
                divide(self)

    return __init__


def divide(model: Any) -> None:
    """Give the chunk of each pipeline rank its shard: a collective.

    Raises:
        NotImplementedError: the output layer cannot be divided; the message names the cure.
    """
    groups, last = model.pg_collection, model.post_process
    size = groups.mp.size()
    if problem := _problem(model, size):
        raise NotImplementedError(f'{problem}, or leave out --pipeline-vocab-parallel')
    config, device = model.config, torch.empty(0, device=torch.cuda.current_device()).device
    places: list[Any] = [None] * groups.pp.size()
    dist.all_gather_object(places, groups.mp.rank(), group=groups.pp)
    shape = model.vocab_size // size, config.hidden_size
    rows, parts = torch.empty(shape, dtype=config.params_dtype, device=device), None
    if last:
        whole = torch.cat(gathered(model.output_layer.weight.detach().to(device), groups.tp))
        parts = [whole.chunk(size)[place].contiguous() for place in places]
    source = dist.get_process_group_ranks(groups.pp)[-1]
    dist.scatter(rows, parts, source, group=groups.pp)
    model.output_layer = OutputShard(model, rows)
    if last:
        model.compute_language_model_loss = model.output_layer.loss


def _problem(model: Any, size: int) -> str | None:
    """Return why shards do not do what this output layer and its loss do, and the cure."""
    name, layer = type(model).__name__, getattr(model, 'output_layer', None)
    if model.share_embeddings_and_output_weights:
        return (
            f'share_embeddings_and_output_weights: the output layer of this {name} is the '
            'embedding, which is on the first stage alone: give '
            '--untie-embeddings-and-output-weights'
        )
    if type(model).compute_language_model_loss is not LanguageModule.compute_language_model_loss:
        return (
            f'compute_language_model_loss: {name} has a loss of its own (label smoothing, '
            "distillation), of which shards know nothing: take Megatron's"
        )
    if layer is not None and (type(layer) is not ColumnParallelLinear or layer.gather_output):
        return (
            f'output_layer: that of this {name} is a {type(layer).__name__} that does more than '
            "Megatron's (logits asked for, or capped): take Megatron's"
        )
    if model.vocab_size % size:
        words = lcm(_PADDING, model.pg_collection.pp.size())
        return (
            f'a vocabulary of {model.vocab_size} words does not divide among {size} ranks: give '
            f'--make-vocab-size-divisible-by {words}'
        )
    return None
