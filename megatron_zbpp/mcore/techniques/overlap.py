"""Passes by Megatron's combined step, where the experts' all-to-all of one hides behind another.

It takes a forward of one microbatch and a backward of another, layer by layer; or one of them
alone, which in such a run has to go through it, too: the plan of the layers hangs on the output of
the forward, and the backward takes it from there. Weight gradients that wait for W do so as in any
other pass: Megatron's own delay (`delay_wgrad_compute`) would only move them within the step, so
the plans are made without it.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from megatron_zbpp.mcore import compat
from megatron_zbpp.mcore.faces import CallContext, Face, Wrap
from megatron_zbpp.mcore.iteration.stages import Arguments, ModelStage
from megatron_zbpp.mcore.model_settings import OVERLAP
from megatron_zbpp.mcore.patches.registry import replaced
from megatron_zbpp.runtime.stage import Backward, Forward, ForwardStep, StepOutput, Wrapper

_ASKS_FOR_A_PLAN, _MAKES_A_PLAN = 'return_schedule_plan', 'build_schedule_plan'
_OF_FORWARD = 'data_iterator', 'f_model', 'input_tensor'
_OF_BACKWARD = 'b_model', 'b_input_tensor', 'b_output_tensor', 'b_output_tensor_grad'
_ARGUMENTS = (*_OF_FORWARD, *_OF_BACKWARD)  # None where a pass runs alone


class OverlapWrapper(Wrapper):
    """Runs each pass of a stage by Megatron's combined step, in place of what is within."""

    def step(self, forward: ForwardStep, inner: Callable[[ForwardStep], StepOutput]) -> StepOutput:
        stage = self.stage
        once = forward.data is stage.data_iterator and forward.results is stage.call.results
        assert once, 'nothing runs again'
        output, num_tokens, _ = _step(Forward(stage, forward.p, forward.received), None)
        return output, num_tokens

    def backward(self, backward: Backward, inner: Callable[[Backward], Any]) -> Any:
        with self.stage.delaying.queueing():
            *_, made = _step(None, backward)
        return made


def run_together(forward: Forward, backward: Backward) -> tuple[torch.Tensor, Any]:
    """Run both at once; return the output of one, and the input's gradient of the other."""
    ahead, back = cast(ModelStage, forward.stage), cast(ModelStage, backward.stage)
    with back.delaying.queueing():
        made = ahead.call.run_step(forward.p, _step, forward, backward)
    output, num_tokens, gradient = made
    ahead.count(num_tokens)
    return output, gradient


def _step(forward: Forward | None, backward: Backward | None) -> Any:
    given: dict[str, Any] = dict.fromkeys(_ARGUMENTS)
    stages: list[Any] = [each.stage for each in (forward, backward) if each is not None]
    call, config = stages[0].call, stages[0].config
    if forward is not None:
        inputs = stages[0].data_iterator, stages[0].model, forward.received
        given |= dict(zip(_OF_FORWARD, inputs, strict=True))
        given |= {
            'f_model_chunk_id': stages[0].vp_stage,
            'is_first_microbatch': call.is_first(forward.p),
            'current_microbatch': call.microbatch(forward.p),
        }
    if backward is not None:
        inputs = stages[-1].model, *backward[2:]
        given |= dict(zip(_OF_BACKWARD, inputs, strict=True))
    with contextlib.ExitStack() as stack:
        # Megatron's plans find no layer that delays weight gradients: TE's are in our store
        for stage in stages:
            for module in stage.model.modules() if stage.delaying.modules else ():
                settings = getattr(module, 'config', None)
                if getattr(settings, 'delay_wgrad_compute', False):
                    stack.enter_context(replaced(settings, 'delay_wgrad_compute', False))
        return compat.combined_step(config)(
            forward_step_func=call.arguments.forward_step_func,
            num_microbatches=call.arguments.num_microbatches,
            forward_data_store=call.results,
            config=config,
            collect_non_loss_data=call.arguments.collect_non_loss_data,
            **given,
        )


def require(models: Sequence[torch.nn.Module], forward_step_func: Callable) -> None:
    """Raise NotImplementedError, with the cure, for what Megatron's combined step cannot run."""
    cure = f'drop --{OVERLAP.replace("_", "-")}'
    for model in models:
        if not hasattr(model, _MAKES_A_PLAN):
            raise NotImplementedError(
                f'{OVERLAP}: Megatron makes no plan of the layers of a {type(model).__name__} '
                f'(it has no {_MAKES_A_PLAN}); {cure}'
            )
    parameters = inspect.signature(forward_step_func).parameters.values()
    if not any(p.name == _ASKS_FOR_A_PLAN or p.kind is p.VAR_KEYWORD for p in parameters):
        raise NotImplementedError(
            f'{OVERLAP}: the forward_step function takes no {_ASKS_FOR_A_PLAN}, with which '
            f'Megatron asks it for model.{_MAKES_A_PLAN}(...); add it, as pretrain_gpt.py has it, '
            f'or {cure}'
        )


class Overlap(Face):
    """Pairs of a forward and a backward overlap."""

    nest = 10  # it replaces Megatron's steps
    no_hops = 'drop --overlap-moe-expert-parallel-comm'
    takes_wide = True
    together = staticmethod(run_together)

    def settle(self, arguments: Arguments, config: Any, num_ranks: int) -> None:
        self.session.programs.join(getattr(config, OVERLAP, False))

    def begin(self, context: CallContext) -> Wrap | None:
        if not self.session.programs.together or context.arguments.forward_only:
            return None
        require(context.chunks, context.arguments.forward_step_func)
        return OverlapWrapper
