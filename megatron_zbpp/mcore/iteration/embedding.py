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
        self._read: dict[int, list[Any]] = {}  # by microbatch

    @property
    def is_first(self) -> bool:
        """True if it is the one behind the embedding."""
        return self.inner.pre_process

    def read(self, p: Pass) -> torch.Tensor:
        """Return the tokens of a microbatch, (micro batch, sequence).

        Raises:
            NotImplementedError: forward_step does not call the model with them.
        """
        data = None if self.data_iterator is None else Read(self.data_iterator)
        tokens = self.call.run_step(p, self._tokens, data)
        self._read[p.microbatch] = [] if data is None else data.items
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
        self,
        p: Pass,
        received: torch.Tensor | None,
        data: Iterator | None,
        results: list[Any],
    ) -> Any:
        if not self.is_first:
            return super()._by_megatron(p, received, data, results)
        items, shard = self._read.pop(p.microbatch), input_shard(self.inner)
        shard.given = received
        try:
            return super()._by_megatron(p, None, None if data is None else iter(items), results)
        finally:
            shard.given = None


class Lookups:
    """D, I and J of this rank.

    Tied rows have gradients of T, too. Which of T and J comes first depends on the schedule, and
    sums round, so those of J are summed apart until the last one, behind all T.

    Args:
        stages: of this rank, in the order of its chunks.
    """

    def __init__(self, stages: Sequence[Any]) -> None:
        self._stage: EmbeddingStage = stages[-1]
        self._first = next((stage for stage in stages if stage.is_first), None)
        self._shard = input_shard(self._stage.inner)
        self._is_tied = shard_of(self._stage.model).is_tied
        self._tokens: dict[int, torch.Tensor] = {}
        self._sum: torch.Tensor | None = None

    @property
    def actions(self) -> dict[str, Action]:
        """By kind of pass."""
        return {READ: self._read, LOOKUP: self._look_up, SCATTER: self._scatter}

    def _read(self, p: Pass, inputs: Inputs) -> Outputs:
        assert self._first is not None, 'D is on the first stage'
        return {TOKENS: self._first.read(p)}

    def _look_up(self, p: Pass, inputs: Inputs) -> Outputs:
        ((tokens,),) = inputs.values()
        assert isinstance(tokens, torch.Tensor)
        if not self._stage.call.arguments.forward_only:
            self._tokens[p.microbatch] = tokens
        with torch.no_grad():
            return {EMBEDDING: self._shard.look_up(tokens)}

    def _scatter(self, p: Pass, inputs: Inputs) -> Outputs:
        ((gradient,),) = inputs.values()
        assert isinstance(gradient, torch.Tensor)
        tokens = self._tokens.pop(p.microbatch)
        if not self._shard.rows.requires_grad:
            return {}
        last = p.microbatch == self._stage.call.arguments.num_microbatches - 1
        if self._is_tied and not last:
            self._sum = self._shard.summed(self._sum, tokens, gradient)
            return {}
        if self._sum is not None:
            self._shard.add(self._sum)
        with self._stage.grad_sync(last):
            self._shard.scatter(tokens, gradient)
        return {}


def of_executor(
    stages: Sequence[Any], whole: Message
) -> tuple[dict[str, Action], dict[str, tuple[Message, ...]]]:
    """Return the actions of D, I and J, and the messages of their collectives.

    Args:
        stages: of this rank, in the order of its chunks.
        whole: hidden states of a sequence, (sequence, micro batch, hidden size).
    """
    assert whole.shape is not None, 'sequences of any length are refused'
    sequence, micro_batch, hidden = whole.shape
    words = Message((micro_batch, sequence), torch.int64, whole.device)
    dtype = input_shard(stages[-1].inner).rows.dtype
    looked_up = Message((micro_batch, sequence, hidden), dtype, whole.device)
    messages = {TOKENS: words, EMBEDDING: looked_up, EMBEDDING_GRADIENT: looked_up}
    return Lookups(stages).actions, {name: (each,) for name, each in messages.items()}


def input_shard(model: Any) -> InputShard:
    """Return the shard of a chunk, unwrapped."""
    return model.embedding.word_embeddings
