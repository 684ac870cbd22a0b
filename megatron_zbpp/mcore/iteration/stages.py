"""A model chunk as a stage of the executor, by Megatron's own forward and backward steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_config

from megatron_zbpp.ir import Pass
from megatron_zbpp.mcore import compat, left_behind
from megatron_zbpp.mcore.iteration.arguments import Arguments
from megatron_zbpp.mcore.layers import transformer_engine
from megatron_zbpp.runtime.compat import no_backward
from megatron_zbpp.runtime.key import Key, key_of
from megatron_zbpp.runtime.stage import MaybeTensor
from megatron_zbpp.runtime.weight_grads import WeightGradStore

_INNER = (
    'a backward inside a forward (backward() or torch.autograd.grad in a loss function or a model) '
    'is unsupported because forwards run twice, or before the optimizer step that precedes their '
    'iteration: leave out recompute passes and post-validation, or take a synchronous schedule'
)


@dataclass
class Call:
    """One call of a forward_backward function: its arguments, and what its forwards return.

    Attributes:
        arguments: as Megatron passes them.
        store: of the weight gradients.
        cp_size: of the context-parallel group.
        device: of this rank.
        num_replicas: whose microbatches the passes count.
        replays: whether forwards run twice, or before the step of the iteration before.
        results: what the loss function returned, in microbatch order; filled on the loss rank.
        num_tokens: sum over microbatches of what the loss function counted.
    """

    arguments: Arguments
    store: WeightGradStore
    cp_size: int
    device: torch.device
    num_replicas: int = 1
    replays: bool = False
    results: list[Any] = field(default_factory=list)
    num_tokens: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.num_tokens = torch.zeros([], dtype=torch.int, device=self.device)

    def microbatch(self, p: Pass) -> int:
        """Return the number of the pass's microbatch among those of its replica in a call."""
        return p.microbatch // self.num_replicas % self.arguments.num_microbatches

    def run_step(self, p: Pass, step: Callable, *arguments: Any) -> Any:
        """Run a step of Megatron's that has the forward `p` in it; return its result.

        Raises:
            StopIteration: the data has ended; the message says where.
        """
        try:
            return step(*arguments)
        except StopIteration as error:
            raise StopIteration(
                f'the data iterator has ended at microbatch {self.microbatch(p)} of '
                f'{self.arguments.num_microbatches}: it must go on for as long as iterations do'
            ) from error

    def is_first(self, p: Pass) -> bool:
        """Return what Megatron's steps are told of the first microbatch."""
        given = self.arguments
        first = self.microbatch(p) == p.slice == 0
        return schedules.check_first_val_step(given.first_val_step, given.forward_only, first)


class Read:
    """Gives what `source` gives, and remembers it.

    Attributes:
        items: given so far.
    """

    def __init__(self, source: Iterator) -> None:
        self.items: list[Any] = []
        self._source = source

    def __iter__(self) -> Read:
        return self

    def __next__(self) -> Any:
        self.items.append(next(self._source))
        return self.items[-1]


class ModelStage:
    """One chunk of a Megatron model.

    Args:
        call: the call that it serves.
        model: the chunk, wrapped as the user wrapped it.
        data_iterator: the chunk's.
        vp_stage: its index among the chunks of this rank; None where there is one.
        is_last: whether it computes the loss.

    Attributes, beside those:
        shared: addresses of the memory that several passes save.
        config: of the model.
        delaying: what leaves weight gradients of Transformer Engine's modules to W.
    """

    asks_gradients = False  # within forwards, of the loss function

    def __init__(
        self,
        call: Call,
        model: torch.nn.Module,
        data_iterator: Iterator | None,
        vp_stage: int | None,
        is_last: bool,
    ) -> None:
        self.call = call
        self.model = model
        self.data_iterator = data_iterator
        self.vp_stage = vp_stage
        self._is_last = is_last
        self.shared: Set[int] = frozenset()
        # of forwards that are to run again: random states before it, and what it has read
        self._to_run_again: dict[Key, tuple[tuple, list[Any]]] = {}
        self.config = get_model_config(model)
        self._context = compat.backward_arguments(model, self.config)
        self.delaying = transformer_engine.Delaying(model, call.store)
        no_sync = self.config.no_sync_func  # one for all chunks, or a list of theirs
        if isinstance(no_sync, list | tuple):
            no_sync = no_sync[vp_stage or 0]
        self._no_sync = no_sync or contextlib.nullcontext

    def forward(self, p: Pass, received: MaybeTensor) -> torch.Tensor:
        output, num_tokens = self._forward_step(p, received, self._data(p), self.call.results)
        self.count(num_tokens)
        return output

    def count(self, num_tokens: Any) -> None:
        """Take note of what the loss function has counted in a forward."""
        if self._is_last:
            self.call.num_tokens += num_tokens

    def forward_unsaved(self, p: Pass, received: MaybeTensor) -> torch.Tensor:
        data = self._data(p)
        read = None if data is None else Read(data)
        states = left_behind.random_states()
        with torch.no_grad():
            output, num_tokens = self._forward_step(p, received, read, self.call.results)
        self.count(num_tokens)
        self._to_run_again[key_of(p)] = states, [] if read is None else read.items
        return output

    def recompute(self, p: Pass, received: MaybeTensor) -> torch.Tensor:
        states, items = self._to_run_again.pop(key_of(p))
        data = None if self.data_iterator is None else iter(items)
        logged = left_behind.emptied(compat.logged_mtp_losses())  # the first has been
        with left_behind.drawing_again(states), logged:
            return self._forward_step(p, received, data, [])[0]

    def _forward_step(
        self, p: Pass, received: MaybeTensor, data: Iterator | None, results: list[Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output, and on the last stage how many tokens count."""
        made = self.call.run_step(p, self._by_megatron, p, received, data, results)
        # lists of tensors, of which Megatron's annotations speak, are for several modules at once
        return cast(tuple[torch.Tensor, torch.Tensor], made)

    def _by_megatron(
        self, p: Pass, received: MaybeTensor, data: Iterator | None, results: list[Any]
    ) -> Any:
        call, given = self.call, self.call.arguments
        plain = call.replays and not self.asks_gradients
        with no_backward(_INNER) if plain else contextlib.nullcontext():
            return schedules.forward_step(
                self._step(p),
                data,
                self.model,
                given.num_microbatches,
                received,
                results,
                self.config,
                cp_group_size=call.cp_size,
                collect_non_loss_data=given.collect_non_loss_data,
                is_first_microbatch=call.is_first(p),
                current_microbatch=call.microbatch(p),
                vp_stage=self.vp_stage,
                is_last_stage=self._is_last,
            )

    def _data(self, p: Pass) -> Iterator | None:
        return self.data_iterator

    def _step(self, p: Pass) -> Callable:
        """Return the function that Megatron's forward step calls."""
        return self.call.arguments.forward_step_func

    def backward(
        self, p: Pass, received: MaybeTensor, output: torch.Tensor, gradient: MaybeTensor
    ) -> MaybeTensor:
        with self.delaying.queueing():
            made = schedules.backward_step(received, output, gradient, *self._context)
        return cast(MaybeTensor, made)

    def release(self, output: torch.Tensor) -> None:
        schedules.deallocate_output_tensor(output, self.config.deallocate_pipeline_outputs)

    def grad_sync(self, last: bool) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if last else self._no_sync()
