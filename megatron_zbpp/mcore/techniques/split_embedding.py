"""The word embedding on all pipeline ranks in an iteration: D, I and J, and the first stage.

D calls the program's forward step up to where it calls the model, which tells the tokens, and keeps
what has been read; F calls it again with the same. So tokens are known on all ranks before the
first stage runs, and no other rank needs data.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, cast

import torch
from megatron.core.utils import unwrap_model

from megatron_zbpp.ir import Pass
from megatron_zbpp.mcore.faces import CallContext, Face, Passes, Wrap
from megatron_zbpp.mcore.iteration.stages import ModelStage, noting
from megatron_zbpp.mcore.techniques.split_vocabulary import exchanges, shard_of
from megatron_zbpp.mcore.techniques.vocabulary_shards import DROP, InputShard
from megatron_zbpp.runtime.channels import Message
from megatron_zbpp.runtime.stage import ForwardStep, Inputs, Outputs, StepOutput, Wrapper, key_of
from megatron_zbpp.techniques.composition import EMBEDDING as NAME
from megatron_zbpp.techniques.vocabulary import graph


class _Called(BaseException):
    """A model has been called; not an error, so that no program takes it for one."""


class EmbeddingWrapper(Wrapper):
    """Reads tokens for all ranks, and gives the first stage the rows that all have looked up."""

    def __init__(self, stage: ModelStage) -> None:
        super().__init__(stage)
        self.inner: Any = unwrap_model(stage.model)
        self.is_first: bool = self.inner.pre_process  # the one behind the embedding
        self._read: dict[int, list[Any]] = {}  # by microbatch

    def read(self, p: Pass) -> torch.Tensor:
        """Return the tokens of a microbatch, (micro batch, sequence)."""
        source = self.stage.data_iterator
        self._read[p.microbatch] = items = []
        data = None if source is None else noting(source, items.append)
        tokens, shard = self.stage.call.run_step(p, self._tokens, data), input_shard(self.inner)
        shard.tokens = tokens if shard.tokens is None else shard.tokens
        return tokens

    def _tokens(self, data: Iterator | None) -> torch.Tensor:
        bind, given = inspect.signature(self.inner.forward).bind, self.stage.call.arguments
        arguments: dict[str, Any] = {}

        def stop(_: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            arguments.update(bind(*args, **kwargs).arguments)
            raise _Called

        hook = self.inner.register_forward_pre_hook(stop, prepend=True, with_kwargs=True)
        with hook, suppress(_Called):  # the hook is removed at the end
            given.forward_step_func(data, self.stage.model)
        tokens = arguments.get('input_ids')
        if tokens is None or tokens.size(0) != given.micro_batch_size:
            raise NotImplementedError(
                'the embedding is on all pipeline ranks, which get the tokens first: let '
                f'forward_step call the model with input_ids of a whole microbatch, {DROP}'
            )
        return tokens.contiguous()

    def reads(self, p: Pass, data: Iterator | None) -> Iterator | None:
        if not self.is_first or data is None:
            return data
        return iter(self._read.pop(p.microbatch, ()))  # the first slice reads for all

    def step(self, forward: ForwardStep, inner: Callable[[ForwardStep], StepOutput]) -> StepOutput:
        if not self.is_first:
            return inner(forward)
        input_shard(self.inner).given = forward.received
        try:
            return inner(forward._replace(received=None))
        finally:
            input_shard(self.inner).given = None


class Lookups:
    """D, I and J of this rank, for `lengths` tokens of each slice.

    Tied rows have gradients of T, too. Which of T and J comes first depends on the schedule, and
    sums round, so those of J are summed apart until the last one, behind all T.
    """

    def __init__(self, stages: Sequence[ModelStage], lengths: Sequence[int]) -> None:
        self._lengths, self._stage = lengths, stages[-1]
        wrappers = [cast(EmbeddingWrapper, stage.wrappers[NAME]) for stage in stages]
        self._first = next((each for each in wrappers if each.is_first), None)
        self._shard = input_shard(wrappers[-1].inner)
        self._is_tied = shard_of(self._stage.model).is_tied
        self._of_slices: Sequence[torch.Tensor] = ()  # tokens of the microbatch that D reads
        self._tokens: dict[tuple, torch.Tensor] = {}  # by `key_of`
        self._sum: torch.Tensor | None = None

    def read(self, p: Pass, inputs: Inputs) -> Outputs:
        assert self._first is not None, 'D is on the first stage'
        if p.slice == 0:
            self._of_slices = self._first.read(p).split(self._lengths, 1)
        return {graph.TOKENS: self._of_slices[p.slice].contiguous()}

    def look_up(self, p: Pass, inputs: Inputs) -> Outputs:
        ((tokens,),) = inputs.values()
        assert isinstance(tokens, torch.Tensor)
        if not self._stage.call.arguments.forward_only:
            self._tokens[key_of(p)] = tokens
        with torch.no_grad():
            return {graph.EMBEDDING: self._shard(tokens, self._shard.look_up)}

    def scatter(self, p: Pass, inputs: Inputs) -> Outputs:
        ((gradient,),) = inputs.values()
        assert isinstance(gradient, torch.Tensor)
        tokens = self._tokens.pop(key_of(p))
        if not self._shard.rows.requires_grad:
            return {}
        m = self._stage.call.arguments.num_microbatches
        last = p.microbatch == m - 1 and p.slice == 0  # of which the gradient comes last
        if self._is_tied and not last:
            self._sum = self._shard.summed(self._sum, tokens, gradient)
            return {}
        if self._sum is not None:
            self._shard.add(self._sum)
        with self._stage.grad_sync(last):
            self._shard.scatter(tokens, gradient)
        return {}


def input_shard(model: Any) -> InputShard:
    """Return the shard of a chunk, unwrapped."""
    return model.embedding.word_embeddings


class SplitEmbedding(Face):
    """The word embedding is on all ranks, beside the output layer."""

    nest = 40  # whatever else looks at what the first stage has received is within

    def begin(self, context: CallContext) -> Wrap:
        return EmbeddingWrapper

    def passes(self, stages: Sequence[ModelStage], context: CallContext) -> Passes:
        # hidden states of each part, (its tokens, micro batch, hidden size)
        shapes = [
            each.shape for each in exchanges(context)[graph.GRADIENT] if each.shape is not None
        ]
        rows = input_shard(unwrap_model(stages[-1].model)).rows
        words = tuple(Message((b, s), torch.int64, rows.device) for s, b, _ in shapes)
        looked_up = tuple(Message((b, s, h), rows.dtype, rows.device) for s, b, h in shapes)
        messages = {graph.TOKENS: words, graph.EMBEDDING: looked_up}
        messages[graph.EMBEDDING_GRADIENT] = looked_up
        lookups = Lookups(stages, [s for s, *_ in shapes])
        actions = {graph.READ: lookups.read, graph.LOOKUP: lookups.look_up}
        return Passes({**actions, graph.SCATTER: lookups.scatter}, messages)
