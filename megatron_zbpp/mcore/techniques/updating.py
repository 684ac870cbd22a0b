"""Asynchronous schedules in training: the pipeline never drains, passes have stashed weights.

In checkpoints of Megatron's own format each parameter is there again for each older version, or for
the average step that corrects it, by the same layout and another name: so any number of ranks can
load it, and Megatron alone loads the rest. Beside them is how many steps were taken.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.utils import unwrap_model

from megatron_zbpp.ir import Schedule
from megatron_zbpp.ir.graph import R
from megatron_zbpp.mcore.faces import CallContext, Face, Wrap
from megatron_zbpp.mcore.iteration.stages import ModelStage
from megatron_zbpp.mcore.lowered import Lowered
from megatron_zbpp.mcore.patches.registry import Patch, around
from megatron_zbpp.mcore.session import Session
from megatron_zbpp.mcore.techniques.asynchronous_steps import AsynchronousSteps
from megatron_zbpp.mcore.techniques.forwards_in_flight import ForwardsInFlight, require_seen
from megatron_zbpp.runtime.endless import EndlessTraining
from megatron_zbpp.runtime.executor import Executor
from megatron_zbpp.runtime.log import job_log
from megatron_zbpp.runtime.stage import Backward, ForwardStep, StepOutput, Wrapper
from megatron_zbpp.runtime.tables import Tables
from megatron_zbpp.runtime.versions import ByStage, Corrected, OneStorage, Slots, Versions
from megatron_zbpp.techniques.updates.versions import CORRECTED, STASHED, copies, updates_of


class VersionWrapper(Wrapper):
    """Gives the passes of a stage the versions of its weights that they ask for."""

    def __init__(self, versions: Versions, flight: ForwardsInFlight, stage: ModelStage) -> None:
        super().__init__(stage)
        self._versions, self._flight = versions, flight

    def step(self, forward: ForwardStep, inner: Callable[[ForwardStep], StepOutput]) -> StepOutput:
        self._versions.before_forward(forward.p)
        if forward.p.kind == R:  # what it has read and drawn is known
            return inner(forward)
        with self._flight.forward(forward.p, self.stage.model):
            return inner(forward)

    def backward(self, backward: Backward, inner: Callable[[Backward], Any]) -> Any:
        self._versions.before_backward(backward.p)
        return inner(backward)


def maker(session: Session, endless: EndlessTraining, context: CallContext) -> Wrap:
    """Return the maker of wrappers that give passes the weights that they ask for.

    Raise ValueError if copies of tied embeddings would be stepped at two rates (PipeMare's T1).
    """
    arguments, lowered, flight, _, rank, _ = context
    models, calls, updates = arguments.models, lowered.calls, updates_of(lowered.schedule.graph)
    assert calls is not None and updates is not None, 'of an asynchronous schedule'
    assert isinstance(flight, ForwardsInFlight), 'as the plugin chooses'
    if updates.backward == CORRECTED and session.settings.anneal_steps != 0:
        tied = getattr(unwrap_model(models[0]), 'share_embeddings_and_output_weights', False)
        if tied and calls.ahead(0) > updates.every:
            raise ValueError(
                'embeddings are tied, and pipemare would step their copies at the rates of their '
                'stages: give --untie-embeddings-and-output-weights, --pipeline-anneal-steps 0, or '
                f'at least {calls.ahead(0)} microbatches, from which on rates are alike'
            )

    # forwards of later batches: of the first rank, and of this one
    first_ahead, ahead, held = calls.ahead(0), calls.ahead(rank), lowered.placement.stages(rank)

    def make() -> Versions:
        endless.at_end.callback(require_seen(models))
        for model in unwrap_model(models):
            hook = model.register_state_dict_pre_hook(lambda *_: endless.finish_step())
            endless.at_end.callback(hook.remove)
        made = list(map(of_stage, held, models))
        size = sum(nbytes for _, nbytes in made) / 2**20
        job_log.info("copies of weights on the first rank, beside Megatron's: %.4g MiB", size)
        by_stage = {stage: versions for stage, (versions, _) in zip(held, made, strict=True)}
        return by_stage[held[0]] if len(held) == 1 else ByStage(by_stage)

    def of_stage(stage: int, model: torch.nn.Module) -> tuple[Versions, int]:
        """Return the versions of the weights of a stage, and the bytes of their copies at most."""
        parameters = [*model.parameters()]
        nbytes = sum(each.nbytes for each in parameters)
        # whether the optimizer writes to DDP's buffers, wherever parameters are pointed to
        ddp = getattr(model, 'ddp_config', None)
        buffered = bool(getattr(ddp, 'use_distributed_optimizer', False))
        if updates.backward == STASHED:
            delay = updates.delays[stage] if updates.delays else None
            ages = max(updates.delays, default=-(-first_ahead // updates.every))
            if delay == 0:  # all passes of a batch are between two steps
                return OneStorage(parameters, ages=ages), 0
            sizes = updates.every, delay, buffered, ahead
            slots = Slots(parameters, *sizes, endless.finish_step, ages, endless.loaded)
            return slots, nbytes * (copies(lowered.schedule)[stage] - 1 + buffered)
        if updates.backward != CORRECTED:
            return OneStorage(parameters), 0
        # of the distributed optimizer's main copies a rank has a part alone
        stepped = parameters if buffered else [getattr(p, 'main_param', p) for p in parameters]
        if not ahead:
            return OneStorage(parameters, stepped), 0
        decay = session.settings.correction_decay
        corrected = Corrected(parameters, stepped, updates.every, ahead, decay, endless.loaded)
        return corrected, nbytes + sum(4 * each.numel() for each in parameters)

    return functools.partial(VersionWrapper, endless.begin(updates, make), flight)


KEY = 'megatron_zbpp_older_weights'  # of a state dict; names of tensors begin with it
_STEPS = 'steps'
_MODULE = 'megatron.core.dist_checkpointing.serialization'


def checkpoint_patches(endless: EndlessTraining) -> Iterator[Patch]:
    """Yield what saves and loads distributed checkpoints."""
    for name, wrap in (('save', _saving), ('load', _loading)):
        yield Patch(_MODULE, name, around(wrap, endless), everywhere=True)


def _saving(
    endless: EndlessTraining, original: Callable, sharded_state_dict: dict, *more: Any, **named: Any
) -> Any:
    kept = endless.versions.kept() if endless.versions is not None else {}
    ours = {name: _renamed(sharded_state_dict, name, tensors) for name, tensors in kept.items()}
    ours |= {_STEPS: endless.steps}
    return original({**sharded_state_dict, KEY: ours}, *more, **named)


def _loading(
    endless: EndlessTraining,
    original: Callable,
    sharded_state_dict: dict[str, Any],
    checkpoint_dir: str,
    *more: Any,
    **named: Any,
) -> Any:
    sharded = _sharded(sharded_state_dict)
    if not sharded:
        return original(sharded_state_dict, checkpoint_dir, *more, **named)
    parameters = [id(each.data) for each in sharded]  # which loading takes from them
    written: dict[str, Any] = serialization.load_tensors_metadata(checkpoint_dir)
    names = {name.split('.')[1] for name in written if name.startswith(f'{KEY}.')}
    ours = {}
    for name in sorted(names):
        tensors = {
            id(each.data): torch.empty_like(each.data, dtype=written[key].dtype)
            for each in sharded
            if (key := f'{KEY}.{name}.{each.key}') in written
        }
        ours[name] = _renamed(sharded_state_dict, name, tensors)
    found = original({**sharded_state_dict, KEY: ours}, checkpoint_dir, *more, **named)
    loaded = (found[0] if isinstance(found, tuple) else found).pop(KEY, {})
    if not names:
        job_log.info(
            '%s has no older weights: versions are equal at first, as where a training begins',
            checkpoint_dir,
        )
    endless.resume(loaded.get(_STEPS, 0))
    endless.loaded = {
        name: {parameters[int(at)]: tensor for at, tensor in loaded[name].items()} for name in ours
    }
    return found


def _sharded(state: dict[str, Any]) -> list[Any]:
    found = (v for v in nested_values(state) if hasattr(v, 'key'))
    return [v for v in found if isinstance(getattr(v, 'data', None), torch.nn.Parameter)]


def _renamed(
    state: dict[str, Any], name: str, tensors: Mapping[int, torch.Tensor]
) -> dict[str, Any]:
    found = {}
    for at, each in enumerate(_sharded(state)):
        if (data := tensors.get(id(each.data))) is not None:
            key = f'{KEY}.{name}.{each.key}'
            found[str(at)] = replace(each, key=key, data=data, dtype=data.dtype)
    return found


class Updating(Face):
    """The pipeline never drains, and passes have older weights."""

    nest = 50  # weights are in place before anything else of a pass runs
    simulated = False
    no_side_task = 'which is asynchronous: take a synchronous schedule, such as zb-v'
    stays_alone = 'an asynchronous schedule has no first microbatch of its own'

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        settings = session.settings
        self.endless = EndlessTraining(settings.clip is None, settings.async_warmup_steps)
        self.next_iteration = ForwardsInFlight(session, self.endless)
        self.optimizer_steps = AsynchronousSteps(session, self.endless)

    def finish_step(self) -> None:
        self.endless.finish_step()

    def patches(self) -> Iterator[Patch]:
        yield from checkpoint_patches(self.endless)
        yield from self.optimizer_steps.patches()

    def drains(self, forward_only: bool) -> bool:
        return not forward_only and self.endless.warms_up()

    def announced(self, lowered: Lowered) -> Schedule | None:
        schedule, session = lowered.schedule, self.session
        if lowered.calls is not None:
            return None
        job_log.info(
            '%d optimizer steps of %s before', session.settings.async_warmup_steps, schedule.name
        )
        sizes = schedule.num_ranks, schedule.num_microbatches
        return session.programs.lowered(*sizes, forward_only=False).schedule

    def begin(self, context: CallContext) -> Wrap | None:
        if context.arguments.forward_only:
            self.endless.finish_step()  # an evaluation has the newest weights
        if context.lowered.calls is None:
            return None
        return maker(self.session, self.endless, context)

    def tables(self, context: CallContext, tables: Tables) -> Tables:
        assert context.lowered.calls is not None, 'else it is not at work'
        return self.endless.next_tables(context.lowered.calls, context.rank)

    def enter(self, executor: Executor) -> None:
        self.endless.enter(executor)
