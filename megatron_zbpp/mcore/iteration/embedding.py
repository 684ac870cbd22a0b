"""The word embedding on all pipeline ranks in an iteration: D, I and J, and the first stage.

D calls the program's forward step up to where it calls the model, which tells the tokens, and keeps
what has been read; F calls it again with the same. So tokens are known on all ranks before the
first stage runs, and no other rank needs data.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.utils import unwrap_model

from megatron_zbpp.ir import Pass
from megatron_zbpp.mcore.iteration.stages import Read
from megatron_zbpp.mcore.iteration.vocabulary import VocabularyStage, shard_of
from megatron_zbpp.mcore.vocabulary import InputShard
from megatron_zbpp.runtime.actions import Action, Inputs, Outputs
from megatron_zbpp.runtime.channels import Message
from megatron_zbpp.runtime.key import Key, key_of
from megatron_zbpp.runtime.stage import MaybeTensor
from megatron_zbpp.techniques.vocabulary.graph import (
    EMBEDDING,
    EMBEDDING_GRADIENT,
    LOOKUP,
    READ,
    SCATTER,
    TOKENS,
)

_DROP = 'or leave out --pipeline-vocab-parallel'


class _Called(BaseException):
    """A model has been called; not an error, so that no program takes it for one."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments


class EmbeddingStage(VocabularyStage):
    """One chunk of a Megatron model whose embedding and output layer are on all ranks."""

    def __init__(self, *of_stage: Any) -> None:
        super().__init__(*of_stage)
        self.inner: Any = unwrap_model(self.model)
        self.is_first: bool = self.inner.pre_process  # the one behind the embedding
        self._read: dict[int, list[Any]] = {}  # by microbatch

    def read(self, p: Pass) -> torch.Tensor:
        """Return the tokens of a microbatch, (micro batch, sequence).

        Raises:
            NotImplementedError: forward_step does not call the model with them.
        """
        data = None if self.data_iterator is None else Read(self.data_iterator)
        tokens = self.call.run_step(p, self._tokens, data)
        self._read[p.microbatch] = [] if data is None else data.items
        shard = input_shard(self.inner)
        shard.tokens = tokens if shard.tokens is None else shard.tokens
        return tokens

    def _tokens(self, data: Iterator | None) -> torch.Tensor:
        bind = inspect.signature(self.inner.forward).bind

        def stop(_: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            raise _Called(bind(*args, **kwargs).arguments)

        tokens = None
        handle = self.inner.register_forward_pre_hook(stop, prepend=True, with_kwargs=True)
        try:
            self.call.arguments.forward_step_func(data, self.model)
        except _Called as called:
            tokens = called.arguments.get('input_ids')
        finally:
            handle.remove()
        given = self.call.arguments
        if tokens is None or tokens.size(0) != given.micro_batch_size:
            raise NotImplementedError(
                'the embedding is on all pipeline ranks, which get the tokens first: let '
                f'forward_step call the model with input_ids of a whole microbatch, {_DROP}'
            )
        return tokens.contiguous()

    def _by_megatron(
        self, p: Pass, received: MaybeTensor, data: Iterator | None, results: list[Any]
    ) -> Any:
        if not self.is_first:
            return super()._by_megatron(p, received, data, results)
        input_shard(self.inner).given = received
        try:
            return super()._by_megatron(p, None, data, results)
        finally:
            input_shard(self.inner).given = None

    def _data(self, p: Pass) -> Iterator | None:
        if not self.is_first or self.data_iterator is None:
            return self.data_iterator
        return iter(self._read.pop(p.microbatch, ()))  # the first slice reads for all


class Lookups:
    """D, I and J of this rank.

    Tied rows have gradients of T, too. Which of T and J comes first depends on the schedule, and
    sums round, so those of J are summed apart until the last one, behind all T.

    Args:
        stages: of this rank, in the order of its chunks.
        lengths: tokens of each slice; of a whole sequence, one.
    """

    def __init__(self, stages: Sequence[Any], lengths: Sequence[int]) -> None:
        self._lengths = lengths
        self._stage: EmbeddingStage = stages[-1]
        self._first = next((stage for stage in stages if stage.is_first), None)
        self._shard = input_shard(self._stage.inner)
        self._is_tied = shard_of(self._stage.model).is_tied
        self._of_slices: Sequence[torch.Tensor] = ()  # tokens of the microbatch that D reads
        self._tokens: dict[Key, torch.Tensor] = {}
        self._sum: torch.Tensor | None = None

    @property
    def actions(self) -> dict[str, Action]:
        """By kind of pass."""
        return {READ: self._read, LOOKUP: self._look_up, SCATTER: self._scatter}

    def _read(self, p: Pass, inputs: Inputs) -> Outputs:
        assert self._first is not None, 'D is on the first stage'
        if p.slice == 0:
            self._of_slices = self._first.read(p).split(self._lengths, 1)
        return {TOKENS: self._of_slices[p.slice].contiguous()}

    def _look_up(self, p: Pass, inputs: Inputs) -> Outputs:
        ((tokens,),) = inputs.values()
        assert isinstance(tokens, torch.Tensor)
        if not self._stage.call.arguments.forward_only:
            self._tokens[key_of(p)] = tokens
        with torch.no_grad():
            return {EMBEDDING: self._shard(tokens, self._shard.look_up)}

    def _scatter(self, p: Pass, inputs: Inputs) -> Outputs:
        ((gradient,),) = inputs.values()
        assert isinstance(gradient, torch.Tensor)
        tokens = self._tokens.pop(key_of(p))
        if not self._shard.rows.requires_grad:
            return {}
        last = p.microbatch == self._stage.call.arguments.num_microbatches - 1
        last = last and p.slice == 0  # of which the gradient comes last
        if self._is_tied and not last:
            self._sum = self._shard.summed(self._sum, tokens, gradient)
            return {}
        if self._sum is not None:
            self._shard.add(self._sum)
        with self._stage.grad_sync(last):
            self._shard.scatter(tokens, gradient)
        return {}


def of_executor(
    stages: Sequence[Any], of_slices: Sequence[Message]
) -> tuple[dict[str, Action], dict[str, tuple[Message, ...]]]:
    """Return the actions of D, I and J, and the messages of their collectives.

    Args:
        stages: of this rank, in the order of its chunks.
        of_slices: hidden states of each, (its tokens, micro batch, hidden size).
    """
    shapes = [each.shape for each in of_slices if each.shape is not None]
    rows = input_shard(stages[-1].inner).rows
    words = tuple(Message((b, s), torch.int64, rows.device) for s, b, _ in shapes)
    looked_up = tuple(Message((b, s, h), rows.dtype, rows.device) for s, b, h in shapes)
    messages = {TOKENS: words, EMBEDDING: looked_up, EMBEDDING_GRADIENT: looked_up}
    return Lookups(stages, [s for s, *_ in shapes]).actions, messages


def input_shard(model: Any) -> InputShard:
    """Return the shard of a chunk, unwrapped."""
    return model.embedding.word_embeddings
