"""The protocol of a stage: what the executor asks of it, and of two of its passes run as one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch

from megatron_zbpp.ir import Pass

MaybeTensor = torch.Tensor | None
"""What a stage receives or returns; None at an end of the model."""


class Stage(Protocol):
    """The protocol of one stage of the model; it keeps no state between passes."""

    def forward(self, p: Pass, received: MaybeTensor) -> torch.Tensor:
        """Return the output of the stage; `received` is None on the first one.

        The last returns its loss: where no backward follows, that may be anything.
        """
        ...

    def forward_unsaved(self, p: Pass, received: MaybeTensor) -> torch.Tensor:
        """Return the output of the stage, of which nothing is kept: `recompute` makes it again."""
        ...

    def recompute(self, p: Pass, received: MaybeTensor) -> torch.Tensor:
        """Make the same output again, to the bit, with its graph; leave nothing else behind."""
        ...

    def backward(
        self, p: Pass, received: MaybeTensor, output: torch.Tensor, gradient: MaybeTensor
    ) -> MaybeTensor:
        """Return the gradient with respect to `received`; `gradient` is None on the last stage."""
        ...

    def release(self, output: torch.Tensor) -> None:
        """Release the data of `output`, which has been passed on; its graph is still needed."""

    def grad_sync(self, last: bool) -> AbstractContextManager[None]:
        """Enter what accumulates gradients; `last`: these parameters get no more after it."""
        ...


class Forward(NamedTuple):
    """A forward that is to run: arguments of `Stage.forward`, and whose it is."""

    stage: Stage
    p: Pass
    received: MaybeTensor


class Backward(NamedTuple):
    """A backward that is to run: arguments of `Stage.backward`, and whose it is."""

    stage: Stage
    p: Pass
    received: MaybeTensor
    output: torch.Tensor
    gradient: MaybeTensor


RunTogether = Callable[[Forward, Backward], tuple[torch.Tensor, MaybeTensor]]
"""Runs both as one; returns what each would."""
