"""Asynchronous schedules in training: the pipeline never drains, passes have stashed weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from megatron.core.utils import unwrap_model

from megatron_zbpp.ir import Schedule
from megatron_zbpp.mcore.faces import CallContext, Face, Wrap
from megatron_zbpp.mcore.iteration.batch import NextIteration
from megatron_zbpp.mcore.iteration.stages import ModelStage
from megatron_zbpp.mcore.lowered import Lowered
from megatron_zbpp.mcore.patches.registry import Patch
from megatron_zbpp.mcore.session import Session
from megatron_zbpp.mcore.techniques import stashed_checkpoints
from megatron_zbpp.mcore.techniques.forwards_in_flight import ForwardsInFlight
from megatron_zbpp.mcore.techniques.weight_watch import require_seen
from megatron_zbpp.runtime.endless import EndlessTraining
from megatron_zbpp.runtime.executor import Executor
from megatron_zbpp.runtime.log import job_log
from megatron_zbpp.runtime.stage import Backward, ForwardStep, MaybeTensor, StepOutput, Wrapper
from megatron_zbpp.runtime.tables import Tables
from megatron_zbpp.runtime.versions import ByStage, Corrected, OneStorage, Slots, Versions
from megatron_zbpp.techniques.updates.graph import CORRECTED, STASHED
from megatron_zbpp.techniques.updates.versions import copies, updates_of


class VersionWrapper(Wrapper):
    """Gives the passes of a stage the versions of its weights that they ask for."""

    def __init__(self, versions: Versions, flight: ForwardsInFlight, stage: ModelStage) -> None:
        super().__init__(stage)
        self._versions, self._flight = versions, flight

    def step(self, forward: ForwardStep, inner: Callable[[ForwardStep], StepOutput]) -> StepOutput:
        self._versions.before_forward(forward.p)
        with self._flight.forward(forward.p, self.stage.model):
            return inner(forward)

    def backward(self, backward: Backward, inner: Callable[[Backward], MaybeTensor]) -> MaybeTensor:
        self._versions.before_backward(backward.p)
        return inner(backward)


def make_versions(
    session: Session, lowered: Lowered, rank: int, models: list[torch.nn.Module]
) -> Versions:
    """Return the versions of the weights of this rank's stages, before the first call."""
    endless = session.endless
    assert endless is not None, 'of an asynchronous schedule'
    endless.at_end.callback(require_seen(models))
    for model in unwrap_model(models):
        hook = model.register_state_dict_pre_hook(lambda *_: endless.finish_step())
        endless.at_end.callback(hook.remove)
    stages = lowered.schedule.placement.stages(rank)
    made = [
        _versions_of(stage, session, lowered, rank, model)
        for stage, model in zip(stages, models, strict=True)
    ]
    size = sum(nbytes for _, nbytes in made) / 2**20
    job_log.info("copies of weights on the first rank, beside Megatron's: %.4g MiB", size)
    of_stage = {stage: versions for stage, (versions, _) in zip(stages, made, strict=True)}
    return of_stage[stages[0]] if len(stages) == 1 else ByStage(of_stage)


def _versions_of(
    stage: int, session: Session, lowered: Lowered, rank: int, model: torch.nn.Module
) -> tuple[Versions, int]:
    """Return the versions of the weights of a stage, and the bytes of their copies at most."""
    schedule, calls = lowered.schedule, lowered.calls
    endless, updates = session.endless, updates_of(schedule.graph)
    assert endless is not None and updates is not None, 'else there is one version'
    assert calls is not None, 'of an asynchronous schedule'
    parameters = [*model.parameters()]
    nbytes = sum(each.nbytes for each in parameters)
    # whether the optimizer writes to DDP's buffers, wherever parameters are pointed to
    ddp = getattr(model, 'ddp_config', None)
    buffered = bool(getattr(ddp, 'use_distributed_optimizer', False))
    ahead = calls.ahead(rank)
    if updates.backward == STASHED:
        delay = updates.delays[stage] if updates.delays else None
        ages = max(updates.delays, default=-(-calls.ahead(0) // updates.every))
        if delay == 0:  # all passes of a batch are between two steps
            return OneStorage(parameters, ages=ages), 0
        sizes = updates.every, delay, buffered, ahead
        slots = Slots(parameters, *sizes, endless.finish_step, ages, endless.loaded)
        return slots, nbytes * (copies(schedule)[stage] - 1 + buffered)
    if updates.backward != CORRECTED:
        return OneStorage(parameters), 0
    # of the distributed optimizer's main copies a rank has a part alone
    stepped = parameters if buffered else [getattr(p, 'main_param', p) for p in parameters]
    if not ahead:
        return OneStorage(parameters, stepped), 0
    decay = session.settings.correction_decay
    averages = sum(4 * each.numel() for each in parameters)
    corrected = Corrected(parameters, stepped, updates.every, ahead, decay, endless.loaded)
    return corrected, nbytes + averages


def _require_equal_rates(session: Session, lowered: Lowered, models: list[torch.nn.Module]) -> None:
    """Raise ValueError where copies of tied embeddings would be stepped at two rates (T1)."""
    updates, calls = updates_of(lowered.schedule.graph), lowered.calls
    assert updates is not None and calls is not None, 'of an asynchronous schedule'
    if updates.backward != CORRECTED or session.settings.anneal_steps == 0:
        return
    tied = getattr(unwrap_model(models[0]), 'share_embeddings_and_output_weights', False)
    if tied and calls.ahead(0) > updates.every:
        raise ValueError(
            'embeddings are tied, and pipemare would step their copies at the rates of their '
            'stages: give --untie-embeddings-and-output-weights, --pipeline-anneal-steps 0, or at '
            f'least {calls.ahead(0)} microbatches, from which on rates are alike'
        )


def maker(
    session: Session,
    flight: NextIteration,
    lowered: Lowered,
    models: list[torch.nn.Module],
    rank: int,
) -> Wrap:
    """Return the maker of wrappers that give passes the weights that they ask for.

    Raises:
        ValueError: copies of tied embeddings would be stepped at two rates.
    """
    endless, updates = session.endless, updates_of(lowered.schedule.graph)
    assert endless is not None and updates is not None, 'of an asynchronous schedule'
    assert isinstance(flight, ForwardsInFlight), 'as the plugin chooses'
    _require_equal_rates(session, lowered, models)
    make = functools.partial(make_versions, session, lowered, rank, models)
    return functools.partial(VersionWrapper, endless.begin(updates, make), flight)


class Updating(Face):
    """The pipeline never drains, and passes have older weights."""

    nest = 50  # weights are in place before anything else of a pass runs
    stays_alone = 'an asynchronous schedule has no first microbatch of its own'

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        settings = session.settings
        self._endless = EndlessTraining(settings.clip is None, settings.async_warmup_steps)

    @property
    def endless(self) -> EndlessTraining:
        return self._endless

    def next_iteration(self) -> NextIteration:
        return ForwardsInFlight(self.session)

    def patches(self) -> Iterator[Patch]:
        return stashed_checkpoints.patches(self._endless)

    def drains(self, forward_only: bool) -> bool:
        return not forward_only and self._endless.warms_up()

    def announced(self, lowered: Lowered) -> Schedule:
        schedule, session = lowered.schedule, self.session
        if lowered.calls is not None:
            return schedule
        job_log.info(
            '%d optimizer steps of %s before', session.settings.async_warmup_steps, schedule.name
        )
        sizes = schedule.num_ranks, schedule.num_microbatches
        return session.programs.lowered(*sizes, forward_only=False).schedule

    def begin(self, context: CallContext) -> Wrap | None:
        if context.arguments.forward_only:
            self._endless.finish_step()  # an evaluation has the newest weights
        if context.lowered.calls is None:
            return None
        flight, models = context.next_iteration, context.arguments.models
        return maker(self.session, flight, context.lowered, models, context.rank)

    def tables(self, context: CallContext, tables: Tables) -> Tables:
        assert context.lowered.calls is not None, 'else it is not at work'
        return self._endless.next_tables(context.lowered.calls, context.rank)

    def enter(self, executor: Executor) -> None:
        self._endless.enter(executor)


FACE = Updating
