"""A model chunk as a stage of the executor, by Megatron's own forward and backward steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_config

from megatron_zbpp.ir import Pass
from megatron_zbpp.mcore import compat
from megatron_zbpp.mcore.layers import transformer_engine
from megatron_zbpp.runtime.compat import no_backward
from megatron_zbpp.runtime.stage import (
    Backward,
    ForwardStep,
    MaybeTensor,
    ProgramOutput,
    StepOutput,
    Wrapper,
    folded,
    overridden,
)
from megatron_zbpp.runtime.weight_grads import WeightGradStore

_SIZES = 'num_microbatches', 'seq_length', 'micro_batch_size', 'decoder_seq_length'


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Arguments of one call of a forward_backward function, as Megatron names them."""

    forward_step_func: Callable
    data_iterator: Iterator | list[Iterator | None] | None
    model: torch.nn.Module | list[torch.nn.Module]
    num_microbatches: int
    seq_length: int
    micro_batch_size: int
    decoder_seq_length: Any = None  # where Megatron passes it on, it is an int or None
    forward_only: bool = False
    collect_non_loss_data: bool = False
    first_val_step: bool | None = None
    adjust_tensor_shapes_fn: Callable | None = None
    p2p_communicator: Any = None  # its ring of neighbours would not do
    pg_collection: Any = None
    force_all_reduce: bool = False

    def same_size(self, other: Arguments) -> bool:
        """Return True if two calls have as many microbatches, of one shape."""
        return all(getattr(self, size) == getattr(other, size) for size in _SIZES)

    @property
    def models(self) -> list[torch.nn.Module]:
        """The chunks of this rank."""
        return self.model if isinstance(self.model, list) else [self.model]

    @property
    def iterators(self) -> list[Iterator | None]:
        """The data of each chunk."""
        data = self.data_iterator
        return data if isinstance(data, list) else [data] * len(self.models)


def same(one: list, other: list) -> bool:
    """Return True if both lists have the same objects."""
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


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
    num_routes: int = 1  # ways through the ranks, of which passes count the microbatches by turns
    replays: bool = False  # whether forwards run twice, or before the step of the iteration before
    # what the loss function returned, in microbatch order; filled on the loss rank
    results: list[Any] = field(default_factory=list)
    # sum over microbatches of what the loss function counted
    num_tokens: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.num_tokens = torch.zeros([], dtype=torch.int, device=self.device)

    def microbatch(self, p: Pass) -> int:
        """Return the number of the pass's microbatch among those of its replica in a call."""
        return p.microbatch // self.num_routes % self.arguments.num_microbatches

    def run_step(self, p: Pass, step: Callable, *arguments: Any) -> Any:
        """Run a step of Megatron's that has the forward `p` in it; return its result."""
        try:
            return step(*arguments)
        except StopIteration as error:
            raise StopIteration(
                f'the data iterator has ended at microbatch {self.microbatch(p)} of '
                f'{self.arguments.num_microbatches}: it must go on for as long as iterations do'
            ) from error

    def is_first(self, p: Pass) -> bool:
        """Return the flag of the first microbatch for Megatron's steps."""
        val, forward_only = self.arguments.first_val_step, self.arguments.forward_only
        first = self.microbatch(p) == p.slice == 0
        return schedules.check_first_val_step(val, forward_only, first)


def noting(source: Iterator, note: Callable[[Any], object]) -> Iterator:
    """Yield the items of `source`, which may have no `__iter__`; each is noted first."""
    while True:
        try:
            item = next(source)
        except StopIteration:
            return
        note(item)
        yield item


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
        self.model, self.data_iterator = model, data_iterator
        self.vp_stage, self.is_last = vp_stage, is_last
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
        within = [*self.wrappers.values()]
        guarded = call.replays and not any(wrapper.asks_gradients for wrapper in within)
        step = no_backward(_INNER)(self._megatron_step) if guarded else self._megatron_step
        self._readers = overridden(within, 'reads')
        self._step = folded(within, 'step', step)
        calls = folded(within, 'call', self._call_program)
        self._program = calls if overridden(within, 'call') else None  # None: called as it is
        back = folded(within, 'backward', lambda each: self._megatron_backward(*each[2:]))
        self._back = back if overridden(within, 'backward') else None
        deallocate = partial(
            schedules.deallocate_output_tensor,
            deallocate_pipeline_outputs=self.config.deallocate_pipeline_outputs,
        )
        self.release = folded(within, 'release', deallocate)

    def forward(self, p: Pass, received: MaybeTensor, saved: bool = True) -> torch.Tensor:
        data = self.data_iterator
        for reads in self._readers:
            data = reads(p, data)
        step = ForwardStep(p, received, data, self.call.results, saved)
        output, num_tokens = self.call.run_step(p, self._step, step)
        self.count(num_tokens)
        return output

    def forward_without_graph(self, p: Pass, received: MaybeTensor) -> torch.Tensor:
        return self.forward(p, received, saved=False)

    def recompute(self, p: Pass, received: MaybeTensor) -> torch.Tensor:
        return self.call.run_step(p, self._step, ForwardStep(p, received, None, []))[0]

    def count(self, num_tokens: Any) -> None:
        """Take note of what the loss function has counted in a forward."""
        if self.is_last:
            self.call.num_tokens += num_tokens

    def _megatron_step(self, forward: ForwardStep) -> StepOutput:
        p, received, data, results, _ = forward
        step, program = self.call.arguments.forward_step_func, self._program
        if program is not None:
            step = lambda *inputs: program(p, *inputs)[:2]  # noqa: E731
        return self.forward_step(step, data, received, results, p)

    def forward_step(
        self, step: Callable, data: Any, received: Any, results: list[Any], p: Pass | None = None
    ) -> StepOutput:
        """Run Megatron's forward step of this chunk in `p`, or of its loss alone, behind passes."""
        call, given = self.call, self.call.arguments
        made: Any = schedules.forward_step(
            step,
            data,
            self.model,
            given.num_microbatches,
            received,
            results,
            self.config,
            call.cp_size,
            p is not None and given.collect_non_loss_data,
            is_first_microbatch=p is not None and call.is_first(p),
            current_microbatch=None if p is None else call.microbatch(p),
            vp_stage=self.vp_stage,
            is_last_stage=p is None or self.is_last,
        )
        return made

    def _call_program(self, p: Pass, data: Iterator | None, model: Any) -> ProgramOutput:
        output, loss = self.call.arguments.forward_step_func(data, model)
        return ProgramOutput(output, loss, loss)

    def backward(
        self, p: Pass, received: MaybeTensor, output: torch.Tensor, gradient: MaybeTensor
    ) -> MaybeTensor:
        if self._back is not None:
            return self._back(Backward(self, p, received, output, gradient))
        return self._megatron_backward(received, output, gradient)

    def _megatron_backward(
        self, received: MaybeTensor, output: torch.Tensor, gradient: MaybeTensor
    ) -> MaybeTensor:
        with self.delaying.queueing():
            made: Any = schedules.backward_step(received, output, gradient, *self.context)
        return made

    def grad_sync(self, last: bool) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if last else self._no_sync()
