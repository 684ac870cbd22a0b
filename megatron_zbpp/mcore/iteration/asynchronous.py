"""A model chunk whose passes have the version of the weights that they ask for."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.utils import unwrap_model

from megatron_zbpp.ir import Pass, Schedule
from megatron_zbpp.mcore.iteration.stages import ModelStage
from megatron_zbpp.mcore.session import Session
from megatron_zbpp.runtime.versions import Corrected, OneStorage, Slots, Versions
from megatron_zbpp.techniques.updates.graph import CORRECTED, STASHED
from megatron_zbpp.techniques.updates.versions import delays, updates_of


def make_versions(
    session: Session, schedule: Schedule, rank: int, models: list[torch.nn.Module]
) -> Versions:
    """Return the versions of the weights of this rank's stage, before the first call.

    Raises:
        NotImplementedError: the optimizer has a part of the weights alone, of which T2 needs all.
    """
    endless, updates = session.endless, updates_of(schedule.graph)
    assert endless is not None and updates is not None, 'else there is one version'
    for model in unwrap_model(models):
        model.register_state_dict_pre_hook(lambda *_: endless.finish_step())
    (stage,) = schedule.placement.stages(rank)
    tau = endless.tau = delays(schedule)[stage].mean
    parameters = [each for model in models for each in model.parameters()]
    buffered = getattr(getattr(models[0], 'ddp_config', None), 'use_distributed_optimizer', False)
    if updates.backward == STASHED:
        delay = updates.delays[stage] if updates.delays else None
        return Slots(parameters, updates.every, delay, buffered, endless.finish_step)
    if updates.backward == CORRECTED and buffered:
        raise NotImplementedError(
            'use_distributed_optimizer does not go with pipemare, since a rank needs all of the '
            'weights to correct them: drop --use-distributed-optimizer, or take paci'
        )
    if updates.backward == CORRECTED and tau > 0:
        stepped = [getattr(each, 'main_param', each) for each in parameters]
        return Corrected(parameters, stepped, tau, session.settings.correction_decay)
    return OneStorage(parameters)


class VersionedStage(ModelStage):
    """One chunk of a Megatron model with several versions of its weights.

    Args:
        versions: of the weights.
        of_stage: arguments of `ModelStage`.
    """

    def __init__(self, versions: Versions, *of_stage: Any) -> None:
        super().__init__(*of_stage)
        self._versions = versions

    def forward(self, p: Pass, received: torch.Tensor | None) -> torch.Tensor:
        self._versions.before_forward(p)
        return super().forward(p, received)

    def backward(
        self,
        p: Pass,
        received: torch.Tensor | None,
        output: torch.Tensor,
        gradient: torch.Tensor | None,
    ) -> torch.Tensor | None:
        self._versions.before_backward(p)
        return super().backward(p, received, output, gradient)
