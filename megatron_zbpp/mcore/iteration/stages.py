"""A model chunk as a stage of the executor, by Megatron's own forward and backward steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_config

from megatron_zbpp.ir import Pass
from megatron_zbpp.mcore import compat
from megatron_zbpp.mcore.iteration.arguments import Arguments
from megatron_zbpp.mcore.layers import transformer_engine
from megatron_zbpp.runtime.compat import no_backward
from megatron_zbpp.runtime.stage import (
    Backward,
    ForwardStep,
    MaybeTensor,
    ProgramOutput,
    StepOutput,
    Wrapper,
)
from megatron_zbpp.runtime.weight_grads import WeightGradStore

_INNER = (
    'a backward inside a forward (backward() or torch.autograd.grad in a loss function or a model) '
    'is unsupported because forwards run twice, or before the optimizer step that precedes their '
    'iteration: leave out recompute passes and post-validation, or take a synchronous schedule'
)


@dataclass
class Call:
    """One call of a forward_backward function: its arguments, and what its forwards return."""

    arguments: Arguments  # as Megatron passes them
    store: WeightGradStore  # of the weight gradients
    cp_size: int  # of the context-parallel group
    device: torch.device  # of this rank
    num_replicas: int = 1  # whose microbatches the passes count
    replays: bool = False  # whether forwards run twice, or before the step of the iteration before
    # what the loss function returned, in microbatch order; filled on the loss rank
    results: list[Any] = field(default_factory=list)
    # sum over microbatches of what the loss function counted
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
        """Return the flag of the first microbatch for Megatron's steps."""
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
    """One chunk of a Megatron model, within the wrappers of the schedule's techniques."""

    def __init__(
        self,
        call: Call,  # the call that it serves
        model: torch.nn.Module,  # the chunk, wrapped as the user wrapped it
        data_iterator: Iterator | None,  # the chunk's
        vp_stage: int | None,  # its index among the chunks of this rank; None where there is one
        is_last: bool,  # whether it computes the loss
        # make the wrappers, the innermost first, by the name of the technique
        wraps: Mapping[str, Callable[[ModelStage], Wrapper]] | None = None,
    ) -> None:
        self.call = call
        self.model = model
        self.data_iterator = data_iterator
        self.vp_stage = vp_stage
        self.is_last = is_last
        self.config = get_model_config(model)
        # further arguments of Megatron's backward step
        self.context = compat.backward_arguments(model, self.config)
        # leaves weight gradients of Transformer Engine's modules to W
        self.delaying = transformer_engine.Delaying(model, call.store)
        no_sync = self.config.no_sync_func  # one for all chunks, or a list of theirs
        if isinstance(no_sync, list | tuple):
            no_sync = no_sync[vp_stage or 0]
        self._no_sync = no_sync or contextlib.nullcontext
        self.wrappers = {name: wrap(self) for name, wrap in (wraps or {}).items()}
        self._plain = call.replays and not any(w.asks_gradients for w in self.wrappers.values())
        self._step: Callable[[ForwardStep], StepOutput] = self._megatron_step
        self._program: Callable[..., ProgramOutput] = self._call_program
        self._back: Callable[[Backward], MaybeTensor] = self._megatron_backward
        self._release: Callable[[Any], None] = self._deallocate
        for wrapper in self.wrappers.values():
            self._step = partial(wrapper.step, inner=self._step)
            self._program = partial(wrapper.call, inner=self._program)
            self._back = partial(wrapper.backward, inner=self._back)
            self._release = partial(wrapper.release, inner=self._release)

    def forward(self, p: Pass, received: MaybeTensor) -> torch.Tensor:
        return self._forward(p, received)

    def forward_unsaved(self, p: Pass, received: MaybeTensor) -> torch.Tensor:
        return self._forward(p, received, saved=False)

    def _forward(self, p: Pass, received: MaybeTensor, saved: bool = True) -> torch.Tensor:
        data = self.data_iterator
        for wrapper in self.wrappers.values():
            data = wrapper.reads(p, data)
        step = ForwardStep(p, received, data, self.call.results, saved)
        output, num_tokens = self.call.run_step(p, self._step, step)
        self.count(num_tokens)
        return output

    def recompute(self, p: Pass, received: MaybeTensor) -> torch.Tensor:
        return self.call.run_step(p, self._step, ForwardStep(p, received, None, []))[0]

    def count(self, num_tokens: Any) -> None:
        """Take note of what the loss function has counted in a forward."""
        if self.is_last:
            self.call.num_tokens += num_tokens

    def _megatron_step(self, forward: ForwardStep) -> StepOutput:
        p, call = forward.p, self.call
        with no_backward(_INNER) if self._plain else contextlib.nullcontext():
            return self.forward_step(
                lambda data, model: self._program(p, data, model)[:2],
                forward.data,
                forward.received,
                forward.results,
                collect_non_loss_data=call.arguments.collect_non_loss_data,
                is_first_microbatch=call.is_first(p),
                current_microbatch=call.microbatch(p),
                is_last_stage=self.is_last,
            )

    def forward_step(
        self, step: Callable, data: Iterator | None, received: Any, results: list[Any], **more: Any
    ) -> StepOutput:
        """Run Megatron's forward step of this chunk, with `step` as the program's."""
        made = schedules.forward_step(
            step,
            data,
            self.model,
            self.call.arguments.num_microbatches,
            received,
            results,
            self.config,
            cp_group_size=self.call.cp_size,
            vp_stage=self.vp_stage,
            **more,
        )
        return cast(StepOutput, made)

    def _call_program(self, p: Pass, data: Iterator | None, model: Any) -> ProgramOutput:
        output, loss = self.call.arguments.forward_step_func(data, model)
        return ProgramOutput(output, loss, loss)

    def backward(
        self, p: Pass, received: MaybeTensor, output: torch.Tensor, gradient: MaybeTensor
    ) -> MaybeTensor:
        return self._back(Backward(self, p, received, output, gradient))

    def _megatron_backward(self, backward: Backward) -> MaybeTensor:
        _, _, received, output, gradient = backward
        with self.delaying.queueing():
            made = schedules.backward_step(received, output, gradient, *self.context)
        return cast(MaybeTensor, made)

    def release(self, output: torch.Tensor) -> None:
        self._release(output)

    def _deallocate(self, output: torch.Tensor) -> None:
        schedules.deallocate_output_tensor(output, self.config.deallocate_pipeline_outputs)

    def grad_sync(self, last: bool) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if last else self._no_sync()
