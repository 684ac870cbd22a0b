"""The forward_backward function that stands in Megatron's table while the plugin is enabled."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config, unwrap_model

from megatron_zbpp.ir import Placement
from megatron_zbpp.mcore import compat, layout, own_offloading, refusals, superseded
from megatron_zbpp.mcore.iteration import combined
from megatron_zbpp.mcore.iteration.alike import agreement
from megatron_zbpp.mcore.iteration.announcement import announce
from megatron_zbpp.mcore.iteration.built import require_all_layers
from megatron_zbpp.mcore.iteration.completeness import every_weight_gradient
from megatron_zbpp.mcore.iteration.ranges import profiled
from megatron_zbpp.mcore.iteration.stages import Call, ModelStage
from megatron_zbpp.mcore.patches import transformer_engine
from megatron_zbpp.mcore.patches.registry import Patch
from megatron_zbpp.mcore.programs import Lowered
from megatron_zbpp.mcore.session import Session
from megatron_zbpp.runtime.activations.store import ActivationStore
from megatron_zbpp.runtime.channels import Message
from megatron_zbpp.runtime.clock import clock_for
from megatron_zbpp.runtime.executor import Executor
from megatron_zbpp.runtime.observe.measure import Iteration

_MODULE = 'megatron.core.pipeline_parallel.schedules'
_PIPELINED = (
    'forward_backward_pipelining_with_interleaving',
    'forward_backward_pipelining_without_interleaving',
)


class Begun(Protocol):
    """What has been run of iterations before Megatron asked for them."""

    def take(self, arguments: Arguments) -> Batch | None:
        """Return the batch that was begun for this call; None: there is none."""
        ...

    def replayed(self, iterator: Iterator | None) -> Iterator | None:
        """Return what is read instead of the data `iterator`."""
        ...


def patches(session: Session, begun: Begun) -> Iterator[Patch]:
    """Yield Megatron's two pipelined functions.

    Args:
        session: whose schedule runs.
        begun: asked before each iteration.
    """

    def ours(original: Callable) -> Callable:
        function = functools.partial(forward_backward, session, begun, original)
        return functools.update_wrapper(function, original)

    for name in _PIPELINED:
        yield Patch(_MODULE, name, ours, (f'{_MODULE}:get_forward_backward_func',))


def forward_backward(
    session: Session, begun: Begun, original: Callable, **arguments: Any
) -> list[Any]:
    """Run one global batch by the session's schedule; arguments and result are Megatron's.

    Several modules in one pipeline, which have process groups each, go to `original`.
    """
    pg_collection = arguments.get('pg_collection')
    if pg_collection is not None and not isinstance(pg_collection, ProcessGroupCollection):
        _refuse_delayed(arguments.get('model'))
        return original(**arguments)
    call = Arguments(**arguments)
    batch = begun.take(call) or prepare(session, begun, call)[0]
    return batch.run(session)


def _refuse_delayed(model: torch.nn.Module | list[torch.nn.Module] | None) -> None:
    """Raise for modules whose weight gradients only our W passes would compute.

    Raises:
        NotImplementedError: the model was built for one of our schedules.
    """
    for module in model if isinstance(model, list) else [model]:
        if module is not None and transformer_engine.delaying_modules(module):
            raise NotImplementedError(
                "several modules in one pipeline run by Megatron's own schedule, which would lose "
                'the weight gradients that Transformer Engine delays for ours: call '
                'megatron_zbpp.enable() for models of one module only'
            )


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Of one call of a forward_backward function, as Megatron names them."""

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

    @property
    def models(self) -> list[torch.nn.Module]:
        """The chunks of this rank."""
        return self.model if isinstance(self.model, list) else [self.model]

    @property
    def iterators(self) -> list[Iterator | None]:
        """The data of each chunk."""
        if isinstance(self.data_iterator, list):
            return self.data_iterator
        return [self.data_iterator] * len(self.models)


@dataclass(frozen=True)
class Batch:
    """One global batch of one module, ready to run on this rank."""

    arguments: Arguments
    groups: ProcessGroupCollection
    config: Any
    call: Call
    lowered: Lowered
    executor: Executor

    def run(self, session: Session) -> list[Any]:
        """Run what is left of it; return the loss function's results on the last rank."""
        looked_at = self.arguments.models if self.executor.splits else ()
        if session.freezing is not None and not self.arguments.forward_only:
            session.freezing.begin(compat.training_step())
            session.store.shown = compat.hooks_want_gradients(self.arguments.models)
            if session.freezing.active:
                looked_at = ()  # some get none
        with (
            _timed(self.config),
            session.watchdog.passes(self.executor),
            every_weight_gradient(looked_at),
        ):
            self._gather_parameters()
            record = self.executor.run()
        config, forward_only = self.config, self.arguments.forward_only
        own_offloading.end(config, session.announced)
        if config.finalize_model_grads_func is not None and not forward_only:
            with session.watchdog.collective(
                'reduction of gradients among replicas and tied layers'
            ):
                config.finalize_model_grads_func(
                    self.arguments.models,
                    self.call.num_tokens if config.calculate_per_token_loss else None,
                    pg_collection=self.groups,
                    force_all_reduce=self.arguments.force_all_reduce,
                )
        if getattr(config, 'cuda_graph_impl', None) == 'local':
            schedules.create_cudagraphs()  # in the order of the first iteration; later it does none
        iteration = Iteration(self.lowered.schedule, self.groups.pp, record, self.executor.clock)
        if forward_only:
            session.latest = iteration
        else:
            early = session.post_validation
            if session.side is not None and not (early is not None and early.policy.engaged):
                session.side.at_end()
            session.on_iteration_end(iteration)
        return self.call.results

    def _gather_parameters(self) -> None:
        """Send for what forwards of chunks that have run none will wait for: other ranks' shards.

        Megatron's interleaved schedule does so where --overlap-param-gather keeps parameters; its
        1F1B does not: there one part of the parameters sends for the next.
        """
        functions, models = self.config.param_sync_func, self.arguments.models
        if functions is None or self.arguments.forward_only or len(models) == 1:
            return
        begun = {p.stage for p in self.executor.record.passes}
        stages = self.lowered.placement.stages(self.groups.pp.rank())
        for chunk, (stage, model) in enumerate(zip(stages, models, strict=True)):
            if stage not in begun:
                start = functions[chunk] if isinstance(functions, list | tuple) else functions
                start(model.parameters())


def prepare(
    session: Session, begun: Begun, arguments: Arguments, ranks_ahead: int = 0
) -> tuple[Batch, int]:
    """Return a batch, and how many of its instructions come ahead.

    Args:
        session: whose schedule it is.
        begun: gives what its stages read.
        arguments: of the call.
        ranks_ahead: how many ranks of the chain go ahead.
    """
    groups = arguments.pg_collection or compat.default_groups()
    models = arguments.models
    config = get_model_config(models[0])
    programs = session.programs
    splits, recomputes = programs.splits(groups.pp.size()), programs.recomputes(groups.pp.size())
    in_order = bool(getattr(config, own_offloading.SETTING, False)) and programs.in_order(
        groups.pp.size(), None if arguments.forward_only else arguments.num_microbatches
    )
    refuse_unsupported(
        config, arguments.adjust_tensor_shapes_fn, splits, recomputes, programs.joins, in_order
    )
    programs.join(getattr(config, refusals.OVERLAP, False))
    call = Call(
        session.store,
        arguments.forward_step_func,
        arguments.num_microbatches,
        groups.cp.size(),
        _device(),
        arguments.forward_only,
        arguments.collect_non_loss_data,
        arguments.first_val_step,
    )
    message = _message(arguments, config, groups, call.device)
    sizes = groups.pp.size(), arguments.num_microbatches
    alike = agreement(sizes[1], len(models), message, arguments.forward_only, config)
    alike['side task'] = session.side is not None
    if session.freezing is not None:
        alike['step resumed at'] = session.freezing.first
    session.agree(alike | programs.fingerprint(*sizes), groups.pp)
    lowered = programs.lowered(*sizes, arguments.forward_only)
    as_one = programs.together and not arguments.forward_only
    if as_one:
        combined.require(
            unwrap_model(models), arguments.forward_step_func, lowered.moves, recomputes
        )
    if not arguments.forward_only and not session.announced:
        session.announced = True
        announce(lowered.schedule, config)
        if session.auto is not None:
            chunk = cast(torch.nn.Module, unwrap_model(models[0]))
            session.auto.layout = layout.text_of(chunk, lowered.placement)
            session.auto.layers_alike = layout.layers_alike(getattr(chunk, 'config', None))
    rank = groups.pp.rank()
    make = combined.CombinedStage if as_one else ModelStage
    stages = _stages(make, call, arguments, begun, lowered.placement, rank)
    if models[0] not in session.compared:
        session.compared.add(models[0])
        collective = session.watchdog.collective
        require_all_layers(unwrap_model(models), lowered.placement, groups.pp, collective)
    program, count = lowered.program(rank, ranks_ahead)
    executor = Executor(
        program,
        stages,
        session.channels(groups.pp, lowered.placement, call.device, message.shape is None),
        message,
        session.store,
        clock_for(call.device, counting=session.counting),
        profiled,
        _activations(session, lowered, models, call, groups.pp),
        None if arguments.forward_only else session.side,
        combined.as_one if as_one else None,
    )
    return Batch(arguments, groups, config, call, lowered, executor), count


def _activations(
    session: Session,
    lowered: Lowered,
    models: list[torch.nn.Module],
    call: Call,
    pp_group: torch.distributed.ProcessGroup,
) -> ActivationStore | None:
    """Return what moves activations, where the schedule does and there is a backward."""
    if call.forward_only or not lowered.moves:
        return None
    store = session.activations(call.device, pp_group, lowered.partners)
    store.tell(everything=torch.distributed.get_rank() == 0)
    store.keep(parameter for model in models for parameter in model.parameters())
    return store


def _device() -> torch.device:
    """Return this rank's, where Megatron puts what it receives, wherever parameters are."""
    return torch.empty(0, device=torch.cuda.current_device()).device


def _message(
    arguments: Arguments, config: Any, groups: ProcessGroupCollection, device: torch.device
) -> Message:
    """Return what neighbours exchange; as Megatron has it, all shapes vary where some may."""
    if config.variable_seq_lengths or getattr(config, 'mtp_standalone', False):
        return Message(None, config.pipeline_dtype, device)
    # Megatron's function for several chunks takes no notice of the decoder's
    decoder: Any = arguments.decoder_seq_length if len(arguments.models) == 1 else None
    (shape,) = schedules.get_tensor_shapes(
        seq_length=arguments.seq_length,
        micro_batch_size=arguments.micro_batch_size,
        decoder_seq_length=decoder,
        config=config,
        tp_group=groups.tp,
        cp_group=groups.cp,
    )
    return Message(shape, config.pipeline_dtype, device)


def refuse_unsupported(
    config: Any,
    adjust_tensor_shapes_fn: Callable | None,
    splits: bool,
    recomputes: bool = False,
    joins: bool = False,
    in_order: bool = False,
) -> None:
    """Raise for what would be silently wrong, with the cure.

    Args:
        config: of the model.
        adjust_tensor_shapes_fn: of the call.
        splits: whether the schedule has W passes.
        recomputes: whether it runs forwards again.
        joins: whether it can run a forward and a backward as one.
        in_order: whether it runs back as Megatron's own offloading takes for granted.

    Raises:
        NotImplementedError: names the setting.
    """
    found = refusals.refused(
        config, splits=splits, recomputes=recomputes, joins=joins, in_order=in_order
    )
    for refusal in found:
        raise NotImplementedError(
            f"does not work with --pipeline-schedule: {refusal}, or use Megatron's own schedule"
        )
    superseded.require_none(config)
    if adjust_tensor_shapes_fn is not None:
        raise NotImplementedError(
            'adjust_tensor_shapes_fn does not work with --pipeline-schedule: its shapes are for '
            "ranks, not for stages; use Megatron's own schedule"
        )


def _stages(
    make: type[ModelStage],
    call: Call,
    arguments: Arguments,
    begun: Begun,
    placement: Placement,
    rank: int,
) -> dict[int, ModelStage]:
    """Return the stages of this rank by number.

    Raises:
        ValueError: the model was not built for this placement.
    """
    held = placement.stages(rank)
    models = arguments.models
    for model in models:
        layout.require_placed(cast(torch.nn.Module, unwrap_model(model)), placement)
    if len(models) != len(held):
        raise ValueError(
            f'rank {rank} has {len(models)} model chunks, but the schedule places {len(held)} '
            'there: build as many as the num_chunks of what megatron_zbpp.enable() returns'
        )
    return {
        stage: make(
            call,
            models[chunk],
            begun.replayed(arguments.iterators[chunk]),
            chunk if len(held) > 1 else None,
            stage == placement.num_stages - 1,
        )
        for chunk, stage in enumerate(held)
    }


@contextlib.contextmanager
def _timed(config: Any) -> Iterator[None]:
    """Megatron's own timer around the passes."""
    if config.timers is None:
        yield
        return
    config.timers('forward-backward', log_level=1).start(barrier=config.barrier_with_L1_time)
    yield
    config.timers('forward-backward').stop()
