"""Versions of the weights: the memory that parameters have while a forward or a backward runs.

Autograd's graphs save parameters, or views of their memory. So either each version has memory of
its own, to which parameters are pointed before a forward and again before its backward, or there is
one memory, which steps write to unseen by the graphs. To mix both would be silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TypeVar

import torch

from megatron_zbpp.ir import Pass
from megatron_zbpp.ir.graph import R
from megatron_zbpp.runtime.compat import unseen_by_autograd
from megatron_zbpp.runtime.stage import Key, key_of

Result = TypeVar('Result')

_AVERAGE = 'average_step'  # of what is kept

Kept = Mapping[str, Mapping[int, torch.Tensor]]
"""Tensors that a checkpoint holds beside the newest weights: by name, by identity of parameters."""


class Versions:
    """The versions of the weights of one stage, or of all of a rank's; here the newest alone."""

    most: int = 1  # copies of a stage that there were at once

    def kept(self) -> Kept:
        """Return the stashed weights that a resumed training needs beside the newest ones."""
        return {}

    def before_forward(self, p: Pass) -> None:
        """Give parameters the weights of the forward `p`."""

    def before_backward(self, p: Pass) -> None:
        """Give parameters the weights of the backward `p`."""

    def step(self, step: Callable[[], Result]) -> Result:
        """Step the newest weights in place: they are the next version, and parameters have it."""
        raise NotImplementedError

    def restart(self, batch: int, every: int) -> None:
        """Forget forwards without a backward: microbatch 0 is now the first one of `batch`.

        `batch` is how many came before, `every` the microbatches of each from now on.
        """

    def close(self) -> None:
        """Leave parameters as the optimizer made them, with the newest weights alone."""


class OneStorage(Versions):
    """The newest version alone, for forwards and backwards alike (PACI)."""

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],  # of the stage
        # as of `Corrected`, where other stages correct theirs: a checkpoint has an average of every
        # parameter
        stepped: Iterable[torch.Tensor] = (),
        ages: int = 0,  # as of `Slots`, where other stages keep theirs; here they are the newest
    ) -> None:
        self._parameters, self._stepped, self._ages = tuple(parameters), tuple(stepped), ages

    def kept(self) -> Kept:
        of_each = zip(self._parameters, self._stepped, strict=False)
        averages = {id(parameter): torch.zeros_like(each.data) for parameter, each in of_each}
        newest = {id(each): each.data for each in self._parameters}
        older = {str(age): newest for age in range(1, self._ages + 1)}
        return {_AVERAGE: averages} if averages else older

    def step(self, step: Callable[[], Result]) -> Result:
        with unseen_by_autograd(self._parameters):
            return step()


class Corrected(OneStorage):
    """The newest version; backwards have an estimate of their forward's from it (PipeMare's T2).

    The estimate is w - tau d, with d <- g d + (1-g)(w' - w) for each step from w to w',
    g = decay^(1/tau), and tau = ahead / every, the mean delay of forwards in steps. It is copied
    into the memory of the parameters for each backward, and the newest back for each forward.
    """

    most = 2

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],  # of the stage
        # of which steps are averaged, in float32: the parameters themselves, or their main copies
        stepped: Iterable[torch.Tensor],
        every: int,  # microbatches a step
        ahead: int,  # forwards of later batches that are run before a step; more than 0
        decay: float,  # of d over tau steps
        loaded: Kept = MappingProxyType({}),  # what another one kept, of a training that goes on
    ) -> None:
        super().__init__(parameters, stepped)
        self._tau, self._ahead, self._decay = ahead / every, ahead, decay
        self._averages = [torch.zeros_like(p.data, dtype=torch.float32) for p in self._stepped]
        for parameter, average in zip(self._parameters, self._averages, strict=True):
            if _AVERAGE in loaded:
                average.copy_(loaded[_AVERAGE][id(parameter)])
        self._others = [each.data.clone() for each in self._parameters]  # not in parameters now
        self._correct()
        self._corrected = False  # what parameters have

    def kept(self) -> Kept:
        of_each = zip(self._parameters, self._averages, strict=True)
        return {_AVERAGE: {id(parameter): average for parameter, average in of_each}}

    def before_forward(self, p: Pass) -> None:
        self._hold(corrected=False)

    def before_backward(self, p: Pass) -> None:
        self._hold(corrected=True)

    def step(self, step: Callable[[], Result]) -> Result:
        self._hold(corrected=False)
        old = [each.data.clone() for each in self._stepped]
        with unseen_by_autograd((*self._parameters, *self._stepped)):
            result = step()
        share = self._decay ** (1 / self._tau)
        for new, before, average in zip(self._stepped, old, self._averages, strict=True):
            moved = new.data.float() - before
            average.mul_(share).add_(moved * (1 - share))
        self._correct()
        return result

    def restart(self, batch: int, every: int) -> None:
        self._hold(corrected=False)
        self._tau = self._ahead / every
        self._correct()

    def close(self) -> None:
        self._hold(corrected=False)

    def _correct(self) -> None:
        of_each = zip(self._stepped, self._averages, self._others, strict=True)
        for new, average, other in of_each:
            other.copy_(new.data - self._tau * average)

    def _hold(self, corrected: bool) -> None:
        """Swap the parameters with their other version, unless they have the right one."""
        if corrected != self._corrected:
            for parameter, other in zip(self._parameters, self._others, strict=True):
                held = parameter.data.clone()
                parameter.data.copy_(other)
                other.copy_(held)
            self._corrected = corrected


class Slots(Versions):
    """A backward has the weights of its forward, which are kept (PipeDream, 2BW).

    A step that is skipped leaves the old values under the new number.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],  # of the stage
        every: int,  # microbatches a step
        # how many steps old the weights of forwards are; None: they have the newest at their place
        # in the endless order
        delay: int | None,
        # whether steps write to the memory that parameters have at first, wherever they are pointed
        # to: that of the distributed optimizer's buffers. It is one copy more
        buffered: bool = False,
        ahead: int = 0,  # forwards of later batches that are run before a step, in that order
        # takes the step that is still to be taken, where a forward needs its weights
        finish_step: Callable[[], object] = lambda: None,
        ages: int = 0,  # older versions without which a training could not go on, on all stages
        loaded: Kept = MappingProxyType({}),  # what another one kept, of such a training
    ) -> None:
        self._parameters = tuple(parameters)
        self._first, self._every, self._delay, self._ahead = 0, every, delay, ahead
        self._finish_step, self._ages = finish_step, ages
        home = [each.data for each in self._parameters]
        self._stepped = home if buffered else []
        self._slots = {0: _copied(home) if buffered else home}
        for age in filter(str.isdecimal, loaded):
            self._slots[-int(age)] = [loaded[age][id(each)] for each in self._parameters]
        self._newest, self._current = 0, -1
        self._use(0)
        self._flying: dict[Key, int] = {}  # versions of microbatches between F and B
        self.most = 1

    def before_forward(self, p: Pass) -> None:
        if p.kind == R:
            self._use(self._flying[key_of(p)])
            return
        late = self._ahead if self._delay is None else self._delay * self._every
        version = self._first + (p.microbatch - late) // self._every
        version = max(version, min(self._slots))  # where a training begins, older ones are equal
        if version > self._newest:
            self._finish_step()
        self._flying[key_of(p)] = version
        self._use(version)

    def before_backward(self, p: Pass) -> None:
        self._use(self._flying.pop(key_of(p)))

    def step(self, step: Callable[[], Result]) -> Result:
        old, self._newest = self._newest, self._newest + 1
        wanted = {*self._flying.values(), *range(self._newest - (self._delay or 0), self._newest)}
        tensors = self._slots[old]
        self._slots = {version: self._slots[version] for version in wanted & self._slots.keys()}
        if self._stepped:
            with unseen_by_autograd(self._parameters):
                result = step()
            self._put(_copied(self._stepped))
            return result
        self._put(_copied(tensors) if old in wanted else tensors)
        with unseen_by_autograd(self._parameters):
            return step()

    def kept(self) -> Kept:
        """Return the weights of so many steps ago, or the oldest there are, by age from 1."""
        oldest = min(self._slots)
        versions = {age: max(self._newest - age, oldest) for age in range(1, self._ages + 1)}
        return {
            str(age): {
                id(p): data for p, data in zip(self._parameters, self._slots[version], strict=True)
            }
            for age, version in versions.items()
        }

    def restart(self, batch: int, every: int) -> None:
        self._flying.clear()  # their versions stay until the next step
        self._first, self._every = batch, every

    def close(self) -> None:
        self._use(self._newest)
        for parameter, data in zip(self._parameters, self._stepped, strict=False):
            parameter.data = data

    def _put(self, tensors: list[torch.Tensor]) -> None:
        self._slots[self._newest] = tensors
        self.most = max(self.most, len(self._slots))
        self._use(self._newest)

    def _use(self, version: int) -> None:
        if version != self._current:
            for parameter, data in zip(self._parameters, self._slots[version], strict=True):
                parameter.data = data
            self._current = version


class ByStage(Versions):
    """The versions of several stages of a rank, which step together."""

    def __init__(self, of_stage: Mapping[int, Versions]) -> None:
        self.of_stage = of_stage

    @property
    def most(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return max(each.most for each in self.of_stage.values())

    def kept(self) -> Kept:
        found: dict[str, dict[int, torch.Tensor]] = {}
        for versions in self.of_stage.values():
            for name, tensors in versions.kept().items():
                found.setdefault(name, {}).update(tensors)
        return found

    def before_forward(self, p: Pass) -> None:
        self.of_stage[p.stage].before_forward(p)

    def before_backward(self, p: Pass) -> None:
        self.of_stage[p.stage].before_backward(p)

    def step(self, step: Callable[[], Result]) -> Result:
        for versions in self.of_stage.values():
            step = partial(versions.step, step)
        return step()

    def restart(self, batch: int, every: int) -> None:
        for versions in self.of_stage.values():
            versions.restart(batch, every)

    def close(self) -> None:
        for versions in self.of_stage.values():
            versions.close()


def _copied(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [each.clone() for each in tensors]
