"""Recomputation in training: F keeps no graph, and R runs the same forward again, to the bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_zbpp.ir.graph import R
from megatron_zbpp.mcore import compat, side_effects
from megatron_zbpp.mcore.faces import CallContext, Face, Wrap
from megatron_zbpp.mcore.iteration.stages import ModelStage, noting
from megatron_zbpp.runtime.stage import ForwardStep, Key, StepOutput, Wrapper, key_of

# random states before a forward, and the items that it has read
_Begun = dict[Key, tuple[tuple, list[Any]]]


class RecomputeWrapper(Wrapper):
    """Runs forwards of a stage again, on the items that they have read."""

    def __init__(self, begun: _Begun, stage: ModelStage) -> None:
        super().__init__(stage)
        self._begun = begun

    def step(self, forward: ForwardStep, inner: Callable[[ForwardStep], StepOutput]) -> StepOutput:
        if forward.p.kind == R:
            states, items = self._begun.pop(key_of(forward.p))
            data = None if self.stage.data_iterator is None else iter(items)
            logged = side_effects.emptied(compat.logged_mtp_losses())  # the first has been
            with side_effects.put_back(), logged:
                side_effects.set_random_states(*states)
                return inner(forward._replace(data=data))
        if forward.saved:
            return inner(forward)
        items: list[Any] = []
        read = None if forward.data is None else noting(forward.data, items.append)
        states = side_effects.random_states()
        with torch.no_grad():
            made = inner(forward._replace(data=read))
        self._begun[key_of(forward.p)] = states, items
        return made


class Recompute(Face):
    """Some forwards run again."""

    nest = 60  # it runs all the others again, on the data that they have chosen

    def __init__(self, session: Any) -> None:
        super().__init__(session)
        self._begun: _Begun = {}  # of forwards whose R may come in a later call

    def begin(self, context: CallContext) -> Wrap:
        begun = {} if context.arguments.forward_only else self._begun
        return functools.partial(RecomputeWrapper, begun)
