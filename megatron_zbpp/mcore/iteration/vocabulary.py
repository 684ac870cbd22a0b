"""The output layer on all pipeline ranks in an iteration: the stage before it, S and T.

The last stage hands on its output, and beside it in each row what S and T need of the token: its
target, and the gradient of its loss. That is what the program's loss function says of any losses if
it is linear in them, as those of NVIDIA's scripts are: it is asked with zeros, and again with the
losses, for the report; where the two do not agree, that is an error. (The paper's authors send the
gradients one microbatch later instead.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules

from megatron_zbpp.ir import F, Pass
from megatron_zbpp.mcore.iteration.arguments import Arguments
from megatron_zbpp.mcore.iteration.stages import Call, ModelStage
from megatron_zbpp.mcore.session import Session
from megatron_zbpp.mcore.vocabulary import (
    Logits,
    OutputShard,
    combined,
    gathered,
    losses_of,
    share,
    weight_gradient,
)
from megatron_zbpp.runtime.actions import Action, Inputs, Outputs
from megatron_zbpp.runtime.channels import Message
from megatron_zbpp.runtime.key import Key, key_of
from megatron_zbpp.runtime.stage import MaybeTensor
from megatron_zbpp.techniques.vocabulary.graph import GRADIENT, HIDDEN, STATISTICS, S, T

_BESIDE = 16  # bytes of a row behind its hidden states: target and gradient, and rows stay aligned
_DROP = 'or leave out --pipeline-vocab-parallel'


def exchanged(message: Message, shared: int) -> dict[str, Message]:
    """Return the messages of collectives.

    Args:
        message: what neighbours exchange.
        shared: ranks among which sequence parallelism shares out its rows.
    """
    assert message.shape is not None, 'sequences of any length are refused'
    *rows, width = message.shape
    beside = _BESIDE // message.dtype.itemsize
    whole = (rows[0] * shared, *rows[1:], width)
    return {
        HIDDEN: Message((*rows, width + beside), message.dtype, message.device),
        GRADIENT: Message(whole, message.dtype, message.device),
    }


def _packed(hidden: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return hidden states, and behind each row, as bytes, the token's target and gradient."""
    beside = hidden.new_zeros(*hidden.shape[:2], _BESIDE // hidden.itemsize)
    words = beside.view(torch.int32)
    words[..., 0] = targets
    words[..., 1] = weights.view(torch.int32)
    return torch.cat([hidden.detach(), beside], -1)


class _Tokens(NamedTuple):
    """Inputs of S, a row a token."""

    hidden: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor


def _unpacked(packed: torch.Tensor) -> _Tokens:
    packed = packed.flatten(0, 1)
    width = packed.size(1) - _BESIDE // packed.itemsize
    words = packed[:, width:].contiguous().view(torch.int32)
    weights = words[:, 1].contiguous().view(torch.float32)
    return _Tokens(packed[:, :width], words[:, 0].long(), weights)


class _Forward(NamedTuple):
    """A microbatch of the last stage between F and B.

    Attributes:
        hidden: its output, with its graph.
        weights: gradients of the losses of its rows, (sequence, micro batch, 1).
    """

    hidden: torch.Tensor
    weights: torch.Tensor


class VocabularyStage(ModelStage):
    """One chunk of a Megatron model whose output layer is on all ranks."""

    asks_gradients = True

    def __init__(self, *of_stage: Any) -> None:
        super().__init__(*of_stage)
        self._forwards: dict[Key, _Forward] = {}
        # by microbatch: the program's loss function, and gradients of the losses of each slice
        self._loss_functions: dict[int, Any] = {}
        self._weights: dict[int, list[torch.Tensor]] = {}
        self._differs: torch.Tensor | None = None

    @property
    def is_last(self) -> bool:
        """True if it is the one before the output layer."""
        return self._is_last

    def _by_megatron(
        self, p: Pass, received: MaybeTensor, data: Iterator | None, results: list[Any]
    ) -> Any:
        if not self._is_last:
            return super()._by_megatron(p, received, data, results)
        shard = shard_of(self.model)
        shard.listening, shard.taken = True, None
        saved = torch.is_grad_enabled()
        try:
            with torch.set_grad_enabled(saved):  # `checked` may enable it
                loss, num_tokens = super()._by_megatron(p, received, data, [])
                taken = shard.taken
                assert taken is not None, 'the step has looked'
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
        if saved and not self.call.arguments.forward_only:
            self._forwards[key_of(p)] = _Forward(taken.hidden, rows[..., None])
            self.release(taken.hidden)
        return packed, num_tokens * 0

    def _step(self, p: Pass) -> Callable:
        step = super()._step(p)
        if not self._is_last:
            return step

        def checked(data: Iterator | None, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
            output, loss_func = step(data, model)
            taken = shard_of(model).taken
            if taken is None or output is not taken.losses:
                raise NotImplementedError(
                    'the output layer is on all pipeline ranks, so there are no logits: let '
                    'forward_step call the model with labels and return what it gives, '
                    f'{_DROP}'
                )
            self._remember(p, loss_func)
            if not self.call.arguments.forward_only:  # losses have a graph, though F may run again
                torch.set_grad_enabled(True)
            return output, loss_func

        return checked

    def _remember(self, p: Pass, loss_func: Any) -> None:
        """Keep the first loss function of a microbatch: the program's own, of whole sequences."""
        self._loss_functions.setdefault(p.microbatch, loss_func)

    def _gradient(self, losses: torch.Tensor, loss: Any) -> torch.Tensor:
        """Return the gradient of the losses of tokens; zeros where nothing trains."""
        if self.call.arguments.forward_only:
            return torch.zeros_like(losses)
        found = schedules.backward_step(losses, loss, None, *self._context)
        assert isinstance(found, torch.Tensor)
        return found

    def backward(
        self, p: Pass, received: MaybeTensor, output: torch.Tensor, gradient: MaybeTensor
    ) -> MaybeTensor:
        if self._is_last:
            assert gradient is not None, 'of its output'
            output, weights = self._forwards.pop(key_of(p))
            own = _own_part(gradient, weights.size(0), shard_of(self.model).tp)
            gradient = (own * weights).to(own.dtype)
        return super().backward(p, received, output, gradient)

    def _loss(self, losses: torch.Tensor, loss_func: Any, results: list[Any]) -> Any:
        """Return the loss of a microbatch and its tokens, as Megatron weighs them."""
        return schedules.forward_step(
            lambda data, model: (losses, loss_func),
            None,
            self.model,
            self.call.arguments.num_microbatches,
            None,
            results,
            self.config,
            cp_group_size=self.call.cp_size,
            vp_stage=self.vp_stage,
            is_last_stage=True,
        )

    def report(self, microbatch: int, losses: torch.Tensor) -> None:
        """Give the losses of tokens, (micro batch, sequence), to the program's loss function.

        Raises:
            NotImplementedError: their gradients are not those that shards have been told.
        """
        loss_func = self._loss_functions.pop(microbatch)
        weights = torch.cat(self._weights.pop(microbatch), 1)
        given = self.call.arguments
        losses.requires_grad_(not given.forward_only)
        loss, num_tokens = self._loss(losses, loss_func, self.call.results)
        self.count(num_tokens)
        if given.forward_only:
            return
        differs = (self._gradient(losses, loss) != weights).any()
        self._differs = differs if self._differs is None else self._differs | differs
        if microbatch == given.num_microbatches - 1 and bool(self._differs):
            raise NotImplementedError(
                'the loss function is not linear in the losses of tokens, whose gradients shards '
                'of the output layer need before the losses are known: weigh losses by what does '
                f'not depend on them, {_DROP}'
            )


def of_executor(
    session: Session,
    pipeline: dist.ProcessGroup,
    of_slices: Sequence[Message],
    stages: Mapping[int, ModelStage],
    beside: Callable[..., tuple[dict[str, Action], dict[str, tuple[Message, ...]]]] | None,
) -> dict[str, Any]:
    """Return what the executor gets for S and T.

    Args:
        session: that keeps the collectives.
        pipeline: ranks of it.
        of_slices: what neighbours exchange, by slice; one: sequences are whole.
        stages: of this rank, in the order of its chunks.
        beside: makes those of other shards, of the stages and of hidden states by slice.
    """
    own = [stage for stage in stages.values() if isinstance(stage, VocabularyStage)]
    config = own[-1].config
    shared = config.tensor_model_parallel_size if config.sequence_parallel else 1
    found = [exchanged(message, shared) for message in of_slices]
    messages = {name: tuple(each[name] for each in found) for name in found[0]}
    shapes = [message.shape or () for message in messages[GRADIENT]]
    actions = Shards(own, [shape[:-1] for shape in shapes]).actions
    if beside is not None:
        further, exchanges = beside(own, messages[GRADIENT])
        actions |= further
        messages |= exchanges
    return {
        'actions': actions,
        'collectives': session.collectives(pipeline, messages),
    }


class Shards:
    """S and T of this rank.

    Args:
        stages: of this rank, in the order of its chunks.
        rows: of each slice: (its tokens, micro batch).
    """

    def __init__(self, stages: Sequence[VocabularyStage], rows: Sequence[tuple[int, ...]]) -> None:
        self._stage, self._rows = stages[-1], rows
        self._loss = next((stage for stage in stages if stage.is_last), None)
        self._call: Call = self._stage.call
        self._kept: dict[Key, tuple[Logits, torch.Tensor]] = {}
        self._losses: dict[int, list[torch.Tensor]] = {}  # by microbatch, of slices so far

    @property
    def actions(self) -> dict[str, Action]:
        """By kind of pass."""
        return {S: self._logits, T: self._weight_gradient}

    def _logits(self, p: Pass, inputs: Inputs) -> Outputs:
        """S: the logits of the shard, and its part of the gradient of hidden states."""
        shard = shard_of(self._stage.model)
        ((packed,),) = inputs.values()
        assert isinstance(packed, torch.Tensor)
        rows = self._rows[p.slice]
        if packed.size(0) != rows[0]:
            packed = torch.cat(gathered(packed, shard.tp))
        hidden, targets, weights = _unpacked(packed)
        made, (away, there) = shard(hidden, targets=targets)
        own = made.statistics
        self._kept[key_of(p)] = made, weights

        def part(statistics: Sequence[torch.Tensor]) -> torch.Tensor:
            found = away * share(own, combined(statistics)) - there
            return found.to(away.dtype).view(*rows, -1)

        return {STATISTICS: combined(gathered(own, shard.tp)), GRADIENT: part}  # pyright: ignore[reportReturnType]

    def _weight_gradient(self, p: Pass, inputs: Inputs) -> Outputs:
        """T: the gradient of the shard, and on the rank of the loss the losses."""
        ((statistics,),) = inputs.values()
        made, weights = self._kept.pop(key_of(p))
        assert isinstance(statistics, tuple), 'of all ranks'
        whole = combined(statistics)
        if self._loss is not None:
            losses = losses_of(whole).view(self._rows[p.slice]).transpose(0, 1)
            self._losses.setdefault(p.microbatch, []).append(losses)
            if p.slice == len(self._rows) - 1:
                self._loss.report(p.microbatch, torch.cat(self._losses.pop(p.microbatch), 1))
        given, shard = self._call.arguments, shard_of(self._stage.model)
        weight = shard.rows
        if given.forward_only or not weight.requires_grad:
            return {}
        last = (p.microbatch, p.slice) == (given.num_microbatches - 1, len(self._rows) - 1)
        last = last and not shard.is_tied  # J comes behind it
        gradient = weight_gradient(made, whole, weights)
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


def _own_part(gradient: torch.Tensor, count: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum over tensor-parallel ranks, of which this one has `count` rows."""
    if group.size() == 1:
        return gradient
    if gradient.size(0) == count:
        dist.all_reduce(gradient, group=group)
        return gradient
    own = gradient.new_empty(count, *gradient.shape[1:])
    dist.reduce_scatter_tensor(own, gradient.contiguous(), group=group)
    return own


def require(models: Sequence[torch.nn.Module], arguments: Arguments) -> None:
    """Raise for a model without shards, or a call for more than its losses.

    Args:
        models: chunks of this rank, unwrapped.
        arguments: of the call.

    Raises:
        NotImplementedError: names what, and the cure.
    """
    layer, problem = getattr(models[-1], 'output_layer', None), None
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
    if problem is not None:
        raise NotImplementedError(f'{problem}, {_DROP}')
