"""The output layer on all pipeline ranks in an iteration: the stage before it, S and T.

The last stage hands on its output, and beside it in each row what S and T need of the token: its
target, and the gradient of its loss. That is what the program's loss function says of any losses if
it is linear in them, as those of NVIDIA's scripts are: it is asked with zeros, and again with the
losses, for the report; where the two do not agree, that is an error. (The paper's authors send the
gradients one microbatch later instead.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_config

from megatron_zbpp.ir import F, Pass
from megatron_zbpp.mcore.faces import CallContext, Face, Passes, Wrap
from megatron_zbpp.mcore.iteration.stages import Arguments, Call, ModelStage
from megatron_zbpp.mcore.patches.registry import Patch
from megatron_zbpp.mcore.techniques import vocabulary_shards as shards
from megatron_zbpp.mcore.techniques.vocabulary_shards import DROP, OutputShard, combined, losses_of
from megatron_zbpp.runtime.channels import Message
from megatron_zbpp.runtime.stage import (
    Backward,
    ForwardStep,
    Inputs,
    Outputs,
    ProgramOutput,
    StepOutput,
    Wrapper,
    key_of,
)
from megatron_zbpp.techniques.composition import EMBEDDING, VOCABULARY
from megatron_zbpp.techniques.vocabulary.graph import GRADIENT, HIDDEN, STATISTICS, S, T

_BESIDE = 16  # bytes of a row behind its hidden states: target and gradient, and rows stay aligned


def _packed(hidden: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return hidden states, and behind each row, as bytes, the token's target and gradient."""
    beside = hidden.new_zeros(*hidden.shape[:2], _BESIDE // hidden.itemsize)
    words = beside.view(torch.int32)
    words[..., 0] = targets
    words[..., 1] = weights.view(torch.int32)
    return torch.cat([hidden.detach(), beside], -1)


class OutputWrapper(Wrapper):
    """Hands on the hidden states of a stage whose output layer is on all ranks."""

    asks_gradients = True

    def __init__(self, stage: ModelStage) -> None:
        super().__init__(stage)
        # by `key_of`, between F and B: output with its graph, and gradients of the losses of its
        # rows, (sequence, micro batch, 1)
        self._forwards: dict[tuple, tuple[torch.Tensor, torch.Tensor]] = {}
        # by microbatch: the program's loss function, and gradients of the losses of each slice
        self._loss_functions: dict[int, Any] = {}
        self._weights: dict[int, list[torch.Tensor]] = {}
        self._differs: torch.Tensor | None = None

    def step(self, forward: ForwardStep, inner: Callable[[ForwardStep], StepOutput]) -> StepOutput:
        stage, p = self.stage, forward.p
        if not stage.is_last:
            return inner(forward)
        shard = shard_of(stage.model)
        shard.listening, shard.taken = True, None
        saved = torch.is_grad_enabled()
        try:
            with torch.set_grad_enabled(saved):  # `call` may enable it
                loss, num_tokens = inner(forward._replace(results=[]))
                taken: Any = shard.taken
                weights = self._gradient(taken.losses, loss)
        finally:
            shard.listening, shard.taken = False, None
        if p.kind == F:
            self._weights.setdefault(p.microbatch, []).append(weights)
        targets, rows = (
            _own_rows(each.transpose(0, 1), taken.hidden.size(0), shard.tp)
            for each in (taken.labels, weights)
        )
        packed = _packed(taken.hidden, targets, rows)
        if saved and not stage.call.arguments.forward_only:
            self._forwards[key_of(p)] = taken.hidden, rows[..., None]
            stage.release(taken.hidden)
        return packed, num_tokens * 0

    def call(
        self, p: Pass, data: Iterator | None, model: Any, inner: Callable[..., ProgramOutput]
    ) -> ProgramOutput:
        made = inner(p, data, model)
        if not self.stage.is_last:
            return made
        taken = shard_of(model).taken
        if taken is None or made.output is not taken.losses:
            raise NotImplementedError(
                'the output layer is on all pipeline ranks, so there are no logits: let '
                f'forward_step call the model with labels and return what it gives, {DROP}'
            )
        self._loss_functions.setdefault(p.microbatch, made.whole)
        if not self.stage.call.arguments.forward_only:
            torch.set_grad_enabled(True)  # losses have a graph, though F may run again
        return made

    def _gradient(self, losses: torch.Tensor, loss: Any) -> torch.Tensor:
        """Return the gradient of the losses of tokens; zeros where nothing trains."""
        if self.stage.call.arguments.forward_only:
            return torch.zeros_like(losses)
        return cast(Any, schedules.backward_step(losses, loss, None, *self.stage.context))

    def backward(self, backward: Backward, inner: Callable[[Backward], Any]) -> Any:
        if not self.stage.is_last:
            return inner(backward)
        output, weights = self._forwards.pop(key_of(backward.p))
        gradient, count = cast(torch.Tensor, backward.gradient), weights.size(0)
        group = shard_of(self.stage.model).tp
        # the sum over tensor-parallel ranks, of which this one has `count` rows
        if group.size() > 1 and gradient.size(0) == count:
            dist.all_reduce(gradient, group=group)
        elif group.size() > 1:
            whole, gradient = gradient.contiguous(), gradient.new_empty(count, *gradient.shape[1:])
            dist.reduce_scatter_tensor(gradient, whole, group=group)
        own = (gradient * weights).to(gradient.dtype)
        return inner(backward._replace(output=output, gradient=own))

    def report(self, microbatch: int, losses: torch.Tensor) -> None:
        """Give the program losses of tokens, (micro batch, sequence); check their gradients."""
        loss_func = self._loss_functions.pop(microbatch)
        weights = torch.cat(self._weights.pop(microbatch), 1)
        stage, given = self.stage, self.stage.call.arguments
        losses.requires_grad_(not given.forward_only)
        loss, num_tokens = stage.forward_step(
            lambda data, model: (losses, loss_func), None, None, stage.call.results
        )
        stage.count(num_tokens)
        if given.forward_only:
            return
        differs = (self._gradient(losses, loss) != weights).any()
        self._differs = differs | self._differs if self._differs is not None else differs
        if microbatch == given.num_microbatches - 1 and bool(self._differs):
            raise NotImplementedError(
                'the loss function is not linear in the losses of tokens, whose gradients shards '
                'of the output layer need before the losses are known: weigh losses by what does '
                f'not depend on them, {DROP}'
            )


class Shards:
    """S and T of this rank; `rows` are (its tokens, micro batch) of each slice."""

    def __init__(self, stages: Sequence[ModelStage], rows: Sequence[tuple[int, ...]]) -> None:
        self._stage, self._rows = stages[-1], rows
        last = next((stage for stage in stages if stage.is_last), None)
        self._loss = last and cast(OutputWrapper, last.wrappers[VOCABULARY])
        self._call: Call = self._stage.call
        self._kept: dict[tuple, tuple[shards.Logits, torch.Tensor]] = {}  # by `key_of`
        self._losses: dict[int, list[torch.Tensor]] = {}  # by microbatch, of slices so far

    def logits(self, p: Pass, inputs: Inputs) -> Outputs:
        """S: the logits of the shard, and its part of the gradient of hidden states."""
        shard = shard_of(self._stage.model)
        ((packed,),) = inputs.values()
        assert isinstance(packed, torch.Tensor)
        rows = self._rows[p.slice]
        if packed.size(0) != rows[0]:
            packed = torch.cat(shards.gathered(packed, shard.tp))
        packed = packed.flatten(0, 1)  # a row a token
        width = packed.size(1) - _BESIDE // packed.itemsize
        words = packed[:, width:].contiguous().view(torch.int32)
        weights = words[:, 1].contiguous().view(torch.float32)
        made, (away, there) = shard(packed[:, :width], targets=words[:, 0].long())
        own = made.statistics
        self._kept[key_of(p)] = made, weights

        def part(statistics: Sequence[torch.Tensor]) -> torch.Tensor:
            found = away * shards.share(own, combined(statistics)) - there
            return found.to(away.dtype).view(*rows, -1)

        return {STATISTICS: combined(shards.gathered(own, shard.tp)), GRADIENT: part}  # pyright: ignore[reportReturnType]

    def weight_gradient(self, p: Pass, inputs: Inputs) -> Outputs:
        """T: the gradient of the shard, and on the rank of the loss the losses."""
        ((statistics,),) = inputs.values()
        made, weights = self._kept.pop(key_of(p))
        assert isinstance(statistics, tuple), 'of all ranks'
        whole, ends = combined(statistics), p.slice == len(self._rows) - 1
        if self._loss is not None:
            losses = losses_of(whole).view(self._rows[p.slice]).transpose(0, 1)
            self._losses.setdefault(p.microbatch, []).append(losses)
            if ends:
                self._loss.report(p.microbatch, torch.cat(self._losses.pop(p.microbatch), 1))
        given, shard = self._call.arguments, shard_of(self._stage.model)
        weight = shard.rows
        if given.forward_only or not weight.requires_grad:
            return {}
        # of tied rows, J comes behind it
        last = ends and p.microbatch == given.num_microbatches - 1 and not shard.is_tied
        gradient = shards.weight_gradient(made, whole, weights)
        with self._stage.grad_sync(last):  # hooks of DDP see it as any other gradient
            weight.view_as(weight).backward(gradient)
        return {}


def shard_of(model: torch.nn.Module) -> OutputShard:
    """Return the shard that a chunk holds, whatever wraps it."""
    while not isinstance(getattr(model, 'output_layer', None), OutputShard):
        model = model.module  # pyright: ignore[reportAssignmentType]
    return model.output_layer  # pyright: ignore[reportReturnType]


def _own_rows(rows: torch.Tensor, count: int, group: dist.ProcessGroup) -> torch.Tensor:
    return rows if rows.size(0) == count else rows.chunk(group.size())[group.rank()]


def require(models: Sequence[torch.nn.Module], arguments: Arguments) -> None:
    """Raise NotImplementedError for a model without shards, or a call for more than its losses."""
    layer = getattr(models[-1], 'output_layer', None)
    if arguments.collect_non_loss_data:
        problem = (
            'collect_non_loss_data: the output layer is on all ranks, and there is no output of '
            'the model but its losses: leave it out'
        )
    elif type(layer) is not OutputShard:
        problem = (
            f'the output layer of this {type(models[-1]).__name__} is not on all ranks: build a '
            'GPTModel or HybridModel, once megatron_zbpp.enable() has been called'
        )
    else:
        return
    raise NotImplementedError(f'{problem}, {DROP}')


def exchanges(context: CallContext) -> dict[str, tuple[Message, ...]]:
    """Return the messages of S's collectives, by part of a sequence; edges may be wider."""
    config = get_model_config(context.chunks[-1])
    shared = config.tensor_model_parallel_size if config.sequence_parallel else 1
    width, hidden, gradients = config.hidden_size, [], []
    for message in context.messages:
        assert message.shape is not None, 'sequences of any length are refused'
        rows, micro_batch, _ = message.shape
        beside = _BESIDE // message.dtype.itemsize
        hidden.append(replace(message, shape=(rows, micro_batch, width + beside)))
        gradients.append(replace(message, shape=(rows * shared, micro_batch, width)))
    return {HIDDEN: tuple(hidden), GRADIENT: tuple(gradients)}


class SplitVocabulary(Face):
    """The output layer is on all ranks."""

    nest = 30
    comparable = False

    def patches(self) -> Iterator[Patch]:
        programs = self.session.programs
        both = EMBEDDING in programs.trained
        return shards.patches(programs.num_chunks, self.session.collective, both)

    def begin(self, context: CallContext) -> Wrap:
        require(context.chunks, context.arguments)
        return OutputWrapper

    def passes(self, stages: Sequence[ModelStage], context: CallContext) -> Passes:
        messages = exchanges(context)
        rows = [(message.shape or ())[:-1] for message in messages[GRADIENT]]
        run = Shards(stages, rows)
        return Passes({S: run.logits, T: run.weight_gradient}, messages)
