"""The word embedding and its copy, where one rank holds both in two chunks, as in a Λ.

Megatron keeps the two equal, and sums their gradients, between first and last rank; Megatron-Bridge
sends one to the other when it has loaded weights, and takes one of two with the same name to be the
other. Megatron's checkpoints that replicas save together take a rank to hold a tensor once, and
local checkpoints give both one tensor. None of them sees such a pair.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.models.common.language_module.language_module import LanguageModule

from megatron_zbpp.ir import Placement
from megatron_zbpp.mcore.layout import has_embedding, tied_copies
from megatron_zbpp.mcore.patches.registry import Patch, around

Placements = Callable[[int], Placement]  # of so many pipeline ranks
SUM = '_allreduce_word_embedding_grads'

_EMBEDDING = 'embedding.word_embeddings.weight'
_LANGUAGE = 'megatron.core.models.common.language_module.language_module:LanguageModule'
_FINALIZE = 'megatron.core.distributed.finalize_model_grads'
_PARALLEL = 'megatron.core.dist_checkpointing.strategies.fully_parallel'
_SAVING = f'{_PARALLEL}:FullyParallelSaveStrategyWrapper.apply_saving_parallelization'
_LOCAL = 'megatron.core.dist_checkpointing.tensor_aware_state_dict:MCoreTensorAwareStateDict'
_CONVERSION = 'megatron.bridge.models.conversion.model_bridge:MegatronModelBridge'


def patches(placement: Placements) -> Iterator[Patch]:
    """Yield the patches that keep the embedding and its copy equal."""
    yield Patch(_LANGUAGE, 'setup_embeddings_and_output_layer', around(_tying, placement, []))
    users = (f'{_FINALIZE}:finalize_model_grads',)
    yield Patch(_FINALIZE, SUM, around(_summing_tied_copies), users)
    share = 'distribute_main_replicas_with_precomputed_distribution'
    yield Patch(_PARALLEL, share, around(_saving_once), (_SAVING,))
    yield Patch(_LOCAL, 'to_state_dict', around(_loading_apart), late=True)
    yield Patch(_CONVERSION, '_broadcast_shared_embeddings', around(_copying_tied), late=True)
    yield Patch(_CONVERSION, 'build_conversion_tasks', around(_of_the_first), late=True)


def _tying(placement: Placements, latest: list, original: Callable, self: LanguageModule) -> None:
    original(self)
    if self.pre_process:
        latest[:] = [weakref.ref(self)]  # the chunk with an embedding: they are built in order
    elif self.post_process and has_embedding(self):
        ranks = placement(self.config.pipeline_model_parallel_size).only_route
        if ranks[0] == ranks[-1]:
            embedding = latest[0]().shared_embedding_or_output_weight()
            with torch.no_grad():
                self.shared_embedding_or_output_weight().copy_(embedding)


def _summing_tied_copies(
    original: Callable, model: list[torch.nn.Module], *args: Any, **kwargs: Any
) -> None:
    """Sum where one rank holds both tied embeddings, behind Megatron's reduction of them."""
    gradients: list[Any] = [getattr(copy, 'main_grad', copy.grad) for copy in tied_copies(model)]
    if not gradients:
        original(model, *args, **kwargs)
        return
    one, other = gradients
    one.add_(other)
    other.copy_(one)


def _saving_once(original: Callable, sharded_state_dict: Any, *args: Any, **kwargs: Any) -> None:
    """Let a rank that holds both copies of a tied weight save one of them, not both by one name."""
    original(sharded_state_dict, *args, **kwargs)
    found: set[tuple] = set()
    for each in nested_values(sharded_state_dict):
        if isinstance(each, ShardedTensor) and is_main_replica(each.replica_id):
            shard = each.key, each.global_offset, getattr(each, 'flattened_range', None)
            if shard in found:
                each.replica_id = 1  # as Megatron marks those that others save
            found.add(shard)


def _loading_apart(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Let tied weights of one rank have optimizer states apart, which have one tensor as loaded."""
    loaded = original(self, *args, **kwargs)
    found: set[int] = set()

    def own(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or id(value) not in found:
            found.add(id(value))
            return value
        return value.clone()

    # with mismatched keys behind it, if they are asked for
    dict_list_map_inplace(own, loaded[0] if isinstance(loaded, tuple) else loaded)
    return loaded


def _copying_tied(original: Callable, self: Any, megatron_model: Any) -> None:
    """Copy where one rank holds both: Bridge would fill the embedding with unwritten memory."""
    models = megatron_model if isinstance(megatron_model, list) else [megatron_model]
    copies = tied_copies(models) if len(models) > 1 else ()
    if not copies:
        original(self, megatron_model)
        return
    embedding, copy = copies
    with torch.no_grad():
        copy.copy_(embedding)


def _of_the_first(
    original: Callable, self: Any, hf_pretrained: Any, megatron_model: Any, *rest: Any, **more: Any
) -> list[Any]:
    """Return Bridge's conversions; of two embeddings on one rank that of the first."""
    tasks = original(self, hf_pretrained, megatron_model, *rest, **more)
    copies = tied_copies(megatron_model) if len(megatron_model) > 1 else ()
    if not copies:
        return tasks
    stage, module = next(
        (stage, module)
        for stage, model in enumerate(megatron_model)
        for module in model.modules()
        if getattr(module, 'weight', None) is copies[0]
    )
    first = {'vp_stage': stage, 'megatron_module': module, 'param_weight': copies[0]}
    for at, task in enumerate(tasks):
        if task is not None and task.global_param_name.endswith(_EMBEDDING):
            tasks[at] = replace(task, **first)
    return tasks
