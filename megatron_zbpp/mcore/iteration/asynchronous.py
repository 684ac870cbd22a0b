"""A model chunk whose passes have the version of the weights that they ask for."""

from __future__ import annotations

from typing import Any

import torch

from megatron_zbpp.ir import Pass
from megatron_zbpp.mcore.iteration.stages import ModelStage
from megatron_zbpp.runtime.versions import Versions


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
