"""The word embedding and its copy, where one rank holds both in two chunks, as in a Λ.

Megatron keeps the two equal, and sums their gradients, between first and last rank; Megatron-Bridge
sends one to the other when it has loaded weights, and takes one of two with the same name to be the
other. Megatron's checkpoints that replicas save together take a rank to hold a tensor once, and
local checkpoints give both one tensor. None of them sees such a pair.
"""

from __future__ import annotations

import functools
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
from megatron_zbpp.mcore.patches.registry import Patch

Placements = Callable[[int], Placement]  # of so many pipeline ranks
SUM = '_allreduce_word_embedding_grads'
COPY = '_broadcast_shared_embeddings'
TASKS = 'build_conversion_tasks'
SHARE = 'distribute_main_replicas_with_precomputed_distribution'

_EMBEDDING = 'embedding.word_embeddings.weight'
_LANGUAGE = 'megatron.core.models.common.language_module.language_module:LanguageModule'
_FINALIZE = 'megatron.core.distributed.finalize_model_grads'
_PARALLEL = 'megatron.core.dist_checkpointing.strategies.fully_parallel'
_SAVING = f'{_PARALLEL}:FullyParallelSaveStrategyWrapper.apply_saving_parallelization'
_LOCAL = 'megatron.core.dist_checkpointing.tensor_aware_state_dict:MCoreTensorAwareStateDict'
_CONVERSION = 'megatron.bridge.models.conversion.model_bridge:MegatronModelBridge'


def patches(placement: Placements) -> Iterator[Patch]:
    """Yield the patches that keep the embedding and its copy equal."""
    setup = functools.partial(_tying, placement=placement)
    yield Patch(_LANGUAGE, 'setup_embeddings_and_output_layer', setup)
    yield Patch(_FINALIZE, SUM, _summing_tied_copies, (f'{_FINALIZE}:finalize_model_grads',))
    yield Patch(_PARALLEL, SHARE, _saving_once, (_SAVING,))
    yield Patch(_LOCAL, 'to_state_dict', _loading_apart, late=True)
    yield Patch(_CONVERSION, COPY, _copying_tied, late=True)
    yield Patch(_CONVERSION, TASKS, _of_the_first, late=True)


def _tying(original: Callable, placement: Placements) -> Callable:
    # the latest chunk with an embedding; chunks are built in order
    latest: list[Callable[[], Any]] = []

    @functools.wraps(original)
    def setup_embeddings_and_output_layer(self: LanguageModule) -> None:
        original(self)
        if self.pre_process:
            latest[:] = [weakref.ref(self)]
        elif self.post_process and has_embedding(self):
            ranks = placement(self.config.pipeline_model_parallel_size).only_route
            if ranks[0] == ranks[-1]:
                embedding = latest[0]().shared_embedding_or_output_weight()
                with torch.no_grad():
                    self.shared_embedding_or_output_weight().copy_(embedding)

    return setup_embeddings_and_output_layer


def _summing_tied_copies(original: Callable) -> Callable:
    """Sum where one rank holds both tied embeddings, behind Megatron's reduction of them."""

    @functools.wraps(original)
    def reduce(model: list[torch.nn.Module], *args: Any, **kwargs: Any) -> None:
        copies = tied_copies(model)
        if not copies:
            original(model, *args, **kwargs)
            return
        gradients: list[Any] = [getattr(copy, 'main_grad', copy.grad) for copy in copies]
        one, other = gradients
        one.add_(other)
        other.copy_(one)

    return reduce


def _saving_once(original: Callable) -> Callable:
    """Let a rank that holds both copies of a tied weight save one of them.

    Megatron gives each tensor a rank that saves it for all replicas; that rank would save both
    copies, and the optimizer's state of both, under one name.
    """

    @functools.wraps(original)
    def distribute(sharded_state_dict: Any, *args: Any, **kwargs: Any) -> None:
        original(sharded_state_dict, *args, **kwargs)
        found: set[tuple] = set()
        for each in nested_values(sharded_state_dict):
            if isinstance(each, ShardedTensor) and is_main_replica(each.replica_id):
                shard = each.key, each.global_offset, getattr(each, 'flattened_range', None)
                if shard in found:
                    each.replica_id = 1  # as Megatron marks those that others save
                found.add(shard)

    return distribute


def _loading_apart(original: Callable) -> Callable:
    """Let tied weights that one rank holds have optimizer states of their own.

    A local checkpoint gives what has one name one tensor, which both would then update.
    """

    @functools.wraps(original)
    def to_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
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

    return to_state_dict


def _copying_tied(original: Callable) -> Callable:
    """Copy where one rank holds both tied embeddings, in place of Bridge's broadcast.

    Bridge then takes the last chunk to hold the embedding, and would fill it with memory that
    nobody has written.
    """

    @functools.wraps(original)
    def _broadcast_shared_embeddings(self: Any, megatron_model: Any) -> None:
        models = megatron_model if isinstance(megatron_model, list) else [megatron_model]
        copies = tied_copies(models) if len(models) > 1 else ()
        if not copies:
            original(self, megatron_model)
            return
        embedding, copy = copies
        with torch.no_grad():
            copy.copy_(embedding)

    return _broadcast_shared_embeddings


def _of_the_first(original: Callable) -> Callable:
    """Return Bridge's list of conversions; of two embeddings on one rank that of the first.

    It has one entry for a name, and that of the last chunk stays: of the copy that multi-token
    prediction has, which alone would be filled, and which Bridge leaves out when it saves.
    """

    @functools.wraps(original)
    def build_conversion_tasks(
        self: Any,
        hf_pretrained: Any,
        megatron_model: list[torch.nn.Module],
        *rest: Any,
        **more: Any,
    ) -> list[Any]:
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
        return [
            replace(task, **first)
            if task is not None and task.global_param_name.endswith(_EMBEDDING)
            else task
            for task in tasks
        ]

    return build_conversion_tasks
