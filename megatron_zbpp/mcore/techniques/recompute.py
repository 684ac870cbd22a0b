"""Recomputation in training: F keeps no graph, and R runs the same forward again, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_zbpp.ir.graph import R
from megatron_zbpp.mcore import compat, side_effects
from megatron_zbpp.mcore.faces import CallContext, Face, Wrap
from megatron_zbpp.mcore.iteration.stages import ModelStage, Read
from megatron_zbpp.runtime.key import Key, key_of
from megatron_zbpp.runtime.stage import ForwardStep, StepOutput, Wrapper


class RecomputeWrapper(Wrapper):
    """Runs forwards of a stage again, on the items that they have read."""

    def __init__(self, stage: ModelStage) -> None:
        super().__init__(stage)
        # random states before a forward, and the items that it has read
        self._begun: dict[Key, tuple[tuple, list[Any]]] = {}

    def step(self, forward: ForwardStep, inner: Callable[[ForwardStep], StepOutput]) -> StepOutput:
        if forward.p.kind == R:
            states, items = self._begun.pop(key_of(forward.p))
            data = None if self.stage.data_iterator is None else iter(items)
            logged = side_effects.emptied(compat.logged_mtp_losses())  # the first has been
            with side_effects.drawing_again(states), logged:
                return inner(forward._replace(data=data))
        if forward.saved:
            return inner(forward)
        read = None if forward.data is None else Read(forward.data)
        states = side_effects.random_states()
        with torch.no_grad():
            made = inner(forward._replace(data=read))
        self._begun[key_of(forward.p)] = states, [] if read is None else read.items
        return made


class Recompute(Face):
    """Some forwards run again."""

    nest = 60  # it runs all the others again, on the data that they have chosen

    def begin(self, context: CallContext) -> Wrap:
        return RecomputeWrapper


FACE = Recompute
