"""The output layer, and the embedding, on all pipeline ranks: shards in each rank's last chunk.

The rank that has a layer makes it as Megatron does, with the values that it draws, and gives each
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
from megatron.core.transformer.module import MegatronModule

from megatron_zbpp.mcore import compat
from megatron_zbpp.mcore.patches.registry import Patch
from megatron_zbpp.mcore.techniques.vocabulary_shards import InputShard, OutputShard, gathered
from megatron_zbpp.techniques.composition import BOTH

_PADDING = 128  # Megatron's default of --make-vocab-size-divisible-by

Collective = Callable[[str], AbstractContextManager]


def patches(num_chunks: int, collective: Collective, both: bool) -> Iterator[Patch]:
    """Yield what divides the output layer."""
    init = functools.partial(_dividing, num_chunks, collective, both)
    for module, name in compat.models_and_stacks()[0]:
        if name != 'BertModel':  # it has several losses
            yield Patch(f'{module}:{name}', '__init__', init)


def _dividing(num_chunks: int, collective: Collective, both: bool, original: Callable) -> Callable:
    first: list[Any] = []  # the chunk of this rank with the embedding

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.config.pipeline_model_parallel_size == 1:
            return
        vp_stage = getattr(self, 'vp_stage', None)  # MambaModel of 0.16 has one chunk
        if vp_stage in (None, 0):
            first.clear()
        if self.pre_process:
            first.append(self)
        if vp_stage in (None, num_chunks - 1):
            with collective('shards of the output layer'):
                divide(self, both, *first)
            first.clear()
        if both:  # tied rows have one gradient, and no second weight
            self.share_embeddings_and_output_weights = False

    return __init__


def divide(model: Any, both: bool = False, first: Any = None) -> None:
    """Give the chunk of each pipeline rank its shards: a collective.

    Raises:
        NotImplementedError: the output layer cannot be divided; the message names the cure.
    """
    groups, last = model.pg_collection, model.post_process
    told: list[str | None] = [None] * groups.pp.size()  # the layer is on one rank alone
    dist.all_gather_object(told, _problem(model, groups.mp.size(), both), group=groups.pp)
    if problem := next(filter(None, told), None):
        raise NotImplementedError(f'{problem}, or leave out --pipeline-vocab-parallel')
    tied = model.share_embeddings_and_output_weights
    layer = model.output_layer if last and not tied else None
    if both:
        embedding = None if first is None else first.embedding.word_embeddings
        rows = _own_rows(model, embedding)
        _put_embedding(model, first, InputShard(groups, rows, embedding))
    if tied:
        model.output_layer = OutputShard(model, None, model.embedding.word_embeddings)
    else:
        model.output_layer = OutputShard(model, _own_rows(model, layer))
    if last:
        model.compute_language_model_loss = model.output_layer.loss


def _put_embedding(model: Any, first: Any, shard: InputShard) -> None:
    if first is not model:
        model.embedding = MegatronModule(model.config)
        if first is not None:
            whole = first.embedding.word_embeddings
            first.embedding.word_embeddings = InputShard(model.pg_collection, None, whole)
    model.embedding.word_embeddings = shard


def _own_rows(model: Any, layer: Any) -> torch.Tensor:
    """Return this rank's rows of a layer's weight, which one pipeline rank has: `layer`."""
    groups, size = model.pg_collection, model.pg_collection.mp.size()
    device = torch.empty(0, device=torch.cuda.current_device()).device
    told: list[Any] = [None] * groups.pp.size()
    dist.all_gather_object(told, (groups.mp.rank(), layer is not None), group=groups.pp)
    shape = model.vocab_size // size, model.config.hidden_size
    rows, parts = torch.empty(shape, dtype=model.config.params_dtype, device=device), None
    if layer is not None:
        whole = torch.cat(gathered(layer.weight.detach().to(device), groups.tp))
        parts = [whole.chunk(size)[place].contiguous() for place, _ in told]
    (root,) = [rank for rank, (_, has) in enumerate(told) if has]
    dist.scatter(rows, parts, dist.get_process_group_ranks(groups.pp)[root], group=groups.pp)
    return rows


def _problem(model: Any, size: int, both: bool) -> str | None:
    name, layer = type(model).__name__, getattr(model, 'output_layer', None)
    if model.share_embeddings_and_output_weights and not both:
        return (
            f'share_embeddings_and_output_weights: the output layer of this {name} is the '
            'embedding, which is on the first stage alone: give --pipeline-vocab-parallel '
            f'{BOTH}, or --untie-embeddings-and-output-weights'
        )
    if type(model).compute_language_model_loss is not LanguageModule.compute_language_model_loss:
        return (
            f'compute_language_model_loss: {name} has a loss of its own (label smoothing, '
            "distillation), of which shards know nothing: take Megatron's"
        )
    scale = '_scale_logits'  # none until 0.16
    if getattr(type(model), scale, None) is not getattr(LanguageModule, scale, None):
        return f"{scale}: {name} scales or caps its logits, which shards do not: take Megatron's"
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
