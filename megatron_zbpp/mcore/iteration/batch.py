"""One global batch: its passes, and what Megatron does after them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_zbpp.mcore import compat, own_offloading
from megatron_zbpp.mcore.iteration.arguments import Arguments
from megatron_zbpp.mcore.iteration.stages import Call
from megatron_zbpp.mcore.layers import transformer_engine
from megatron_zbpp.mcore.layers.dummy_gradients import dropped_gradient
from megatron_zbpp.mcore.lowered import Lowered
from megatron_zbpp.mcore.session import Session
from megatron_zbpp.post_validation import protocol
from megatron_zbpp.runtime.executor import Executor
from megatron_zbpp.runtime.log import rank_log
from megatron_zbpp.runtime.measure import Iteration
from megatron_zbpp.runtime.weight_grads import WeightGradStore

if TYPE_CHECKING:
    from megatron_zbpp.mcore.reading import Reading

_UNUSED = (
    'rank %d: no layer left its weight gradient to a W pass, so that W passes have '
    'nothing to do: results are right, and the schedule gains nothing by them. Layers that can are '
    "Megatron's ColumnParallelLinear and RowParallelLinear, and Transformer Engine's: report it "
    'if these are'
)
_complete: WeakSet[torch.nn.Module] = WeakSet()  # chunks that have been looked at


def every_weight_gradient(
    models: Sequence[torch.nn.Module], store: WeightGradStore
) -> AbstractContextManager[None]:
    """Enter an iteration of training, which is looked at if it is the first of these chunks.

    A weight that autograd did not visit took no part in it: an expert without tokens, a layer that
    is not used. One that it visited got a gradient: as such, or added to `main_grad`. Where W
    passes had nothing to compute, that is said: gradients are right, but nothing is gained.

    Raises:
        RuntimeError: afterwards; names the parameters that got none.
    """
    fresh = [model for model in models if model not in _complete]
    return _looking(fresh, store) if fresh else contextlib.nullcontext()


@contextlib.contextmanager
def _looking(models: Sequence[torch.nn.Module], store: WeightGradStore) -> Iterator[None]:
    visits: dict[str, bool] = {}  # by name, whether autograd brought a gradient
    parameters = {
        name if len(models) == 1 else f'chunk {k}: {name}': parameter
        for k, model in enumerate(models)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }

    def visit(name: str, gradient: torch.Tensor | None) -> None:
        visits[name] = visits.get(name, False) or gradient is not None

    handles = [
        parameter.register_hook(functools.partial(visit, name))
        for name, parameter in parameters.items()
    ]
    try:
        with transformer_engine.strays() as strays:
            yield
    finally:
        for handle in handles:
            handle.remove()
    waiting = {
        id(parameter) for model in models for parameter in transformer_engine.left_over(model)
    }
    missing = [
        name
        for name, parameter in parameters.items()
        if id(parameter) in waiting or not (visits.get(name, True) or _has_main_grad(parameter))
    ]
    if missing or strays:
        raise RuntimeError(_message(missing, strays))
    _complete.update(models)
    if not store.used and any(p.ndim > 1 and 'embedding' not in n for n, p in parameters.items()):
        rank_log.warning(_UNUSED, dist.get_rank())


def _has_main_grad(parameter: torch.nn.Parameter) -> bool:
    return getattr(parameter, 'grad_added_to_main_grad', hasattr(parameter, 'main_grad'))


def _message(missing: Sequence[str], strays: Sequence[tuple[torch.Size, ...]]) -> str:
    said = 'weight gradients were put off in the first iteration, and no W pass computed them: '
    if missing:
        said += ', '.join(missing)
    else:
        shapes = ', '.join(
            ' and '.join(str(tuple(s)) for s in each) for each in dict.fromkeys(strays)
        )
        said += f"Transformer Engine's, of layers that model.modules() does not find, from {shapes}"
    return said + (
        ". Use layers that the schedule can split (without Transformer Engine's op fuser), or a "
        'schedule without W passes such as 1f1b; please report it'
    )


@dataclass(frozen=True)
class Batch:
    """One global batch of one module, ready to run on this rank."""

    groups: ProcessGroupCollection
    pipeline: dist.ProcessGroup
    config: Any
    call: Call
    lowered: Lowered
    executor: Executor
    reading: Reading | None = None  # where what chunks read is compared

    def timed(self) -> contextlib.AbstractContextManager[None]:
        """Enter Megatron's own timer around the passes."""
        return _timed(self.config)

    def run(self, session: Session) -> None:
        """Run the passes that are left of it."""
        arguments = self.call.arguments
        looked_at = arguments.models if self.executor.splits else ()
        for guest in () if arguments.forward_only else session.guests:
            guest.before(compat.training_step())
            if guest.skips_gradients:
                looked_at = ()  # some get none
        if session.store.left_out is not None and not arguments.forward_only:
            wanted = compat.hooks_want_gradients(arguments.models)
            session.store.dropped = dropped_gradient if wanted else None
        with (
            session.watchdog.passes(self.executor),
            every_weight_gradient(looked_at, session.store),
        ):
            self._gather_parameters()
            self.executor.run()

    def finish(self, session: Session) -> list[Any]:
        """Do what comes after the passes; return the loss function's results on the last rank."""
        config, arguments = self.config, self.call.arguments
        if self.reading is not None:
            self.reading.compare(self.lowered.placement, self.pipeline, session.collective)
        own_offloading.end(config, session.announced)
        if config.finalize_model_grads_func is not None and not arguments.forward_only:
            with session.watchdog.collective(
                'reduction of gradients among replicas and tied layers'
            ):
                config.finalize_model_grads_func(
                    arguments.models,
                    self.call.num_tokens if config.calculate_per_token_loss else None,
                    pg_collection=self.groups,
                    force_all_reduce=arguments.force_all_reduce,
                )
        if getattr(config, 'cuda_graph_impl', None) == 'local':
            schedules.create_cudagraphs()  # in the order of the first iteration; later it does none
        iteration = Iteration(
            self.lowered.schedule, self.pipeline, self.executor.record, self.executor.clock
        )
        if arguments.forward_only:
            session.latest = iteration
        else:
            early = session.post_validation
            if session.filler is not None and not (early is not None and early.policy.engaged):
                session.filler.at_end()
            session.on_iteration_end(iteration)
        return self.call.results

    def _gather_parameters(self) -> None:
        """Send for what forwards of chunks that have run none will wait for: other ranks' shards.

        Megatron's interleaved schedule does so where --overlap-param-gather keeps parameters; its
        1F1B does not: there one part of the parameters sends for the next.
        """
        functions, arguments = self.config.param_sync_func, self.call.arguments
        models = arguments.models
        if functions is None or arguments.forward_only or len(models) == 1:
            return
        begun = {p.stage for p in self.executor.record.passes}
        stages = self.lowered.placement.stages(self.pipeline.rank())
        for chunk, (stage, model) in enumerate(zip(stages, models, strict=True)):
            if stage not in begun:
                start = functions[chunk] if isinstance(functions, list | tuple) else functions
                start(model.parameters())


class NextIteration(protocol.NextIteration, Protocol):
    """The iteration that Megatron asks for next, whose forwards may have begun, and its data."""

    def replayed(self, iterator: Iterator | None) -> Iterator | None:
        """Return the iterator that replaces `iterator`: first data that was read and not used."""
        ...

    def take(self, arguments: Arguments) -> Batch | None:
        """Return the batch that was begun for this call; None: there is none."""
        ...

    def stands(self) -> bool:
        """Return whether passes that have ended count; else all is set back for them to run again.

        All ranks get the same.
        """
        ...


@contextlib.contextmanager
def _timed(config: Any) -> Iterator[None]:
    if config.timers is None:
        yield
        return
    config.timers('forward-backward', log_level=1).start(barrier=config.barrier_with_L1_time)
    yield
    config.timers('forward-backward').stop()
