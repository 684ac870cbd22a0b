"""What `megatron_zbpp.enable` puts into Megatron-Core, and takes out again."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import layers

from megatron_zbpp.ir import Placement, Schedule
from megatron_zbpp.mcore.forward_backward import forward_backward
from megatron_zbpp.mcore.layout import for_megatron, tied_copies
from megatron_zbpp.mcore.linear import deferring_linear
from megatron_zbpp.planning.check import check
from megatron_zbpp.planning.lower import Program, lower
from megatron_zbpp.runtime.comm import Channels
from megatron_zbpp.runtime.measure import Iteration
from megatron_zbpp.runtime.store import WeightGradStore
from megatron_zbpp.schedules import build, find

# The package exports a function of this name, which hides its module.
_FINALIZE = 'megatron.core.distributed.finalize_model_grads'
_LINEAR = 'LinearWithGradAccumulationAndAsyncCommunication'
_PIPELINED = (
    'forward_backward_pipelining_with_interleaving',
    'forward_backward_pipelining_without_interleaving',
)
_TIED = '_allreduce_word_embedding_grads'


@dataclass(frozen=True)
class Lowered:
    """A checked schedule as programs, in Megatron's ranks."""

    schedule: Schedule
    programs: tuple[Program, ...]

    @property
    def placement(self) -> Placement:
        return self.schedule.placement


class Plugin:
    """The plugin's state while it is enabled; a context manager that disables it at its end.

    Args:
        source: a schedule, or the name of a family that makes one for any number of microbatches.
        num_chunks: stages a rank, for families that leave the choice.

    Attributes:
        store: the weight gradients that wait for their W.
        latest: the latest iteration of this rank.
    """

    def __init__(self, source: str | Schedule, num_chunks: int | None = None) -> None:
        self.source = source if isinstance(source, Schedule) else (find(source).name, num_chunks)
        self.store = WeightGradStore()
        self.latest: Iteration | None = None
        self._schedules: dict[tuple[int, int, bool], Lowered] = {}
        self._channels: dict[tuple[dist.ProcessGroup, Placement], Channels] = {}
        self._undo: list[tuple[Any, str, Any]] = []

    def schedule(self, num_ranks: int, num_microbatches: int) -> Schedule:
        """The schedule for p ranks and m microbatches, in Megatron's ranks.

        Raises:
            ValueError: the family cannot make one, or the given one is for another p or m.
        """
        if isinstance(self.source, Schedule):
            for what, has, needed in (
                ('pipeline ranks', self.source.num_ranks, num_ranks),
                ('microbatches', self.source.num_microbatches, num_microbatches),
            ):
                if has != needed:
                    raise ValueError(
                        f'schedule {self.source.name} is for {has} {what}, not {needed}: change '
                        'the parallel or batch sizes, or use a family by its name'
                    )
            return for_megatron(self.source)
        name, num_chunks = self.source
        return for_megatron(build(name, num_ranks, num_microbatches, num_chunks=num_chunks))

    def placement(self, num_ranks: int) -> Placement:
        """Where the stages are, whatever the number of microbatches."""
        given = isinstance(self.source, Schedule)
        return self.schedule(num_ranks, self.source.num_microbatches if given else 1).placement

    def lowered(self, num_ranks: int, num_microbatches: int, forward_only: bool) -> Lowered:
        """The checked programs, from the cache or made now.

        Raises:
            ScheduleError: the schedule is not valid.
        """
        key = (num_ranks, num_microbatches, forward_only)
        if key not in self._schedules:
            schedule = self.schedule(num_ranks, num_microbatches)
            schedule = schedule.forward_only() if forward_only else schedule
            check(schedule)
            self._schedules[key] = Lowered(schedule, lower(schedule))
        return self._schedules[key]

    def channels(self, pp_group: dist.ProcessGroup, placement: Placement) -> Channels:
        """The channels of this rank between neighbouring stages; made once for each group."""
        key = (pp_group, placement)
        if key not in self._channels:
            ranks = placement.ranks
            steps = [(a, b) for a, b in itertools.pairwise(ranks) if a != b]
            self._channels[key] = Channels(pp_group, {*steps, *((b, a) for a, b in steps)})
        return self._channels[key]

    def install(self) -> None:
        """Puts everything in place and asserts that Megatron now finds it."""
        for name in _PIPELINED:
            original = getattr(schedules, name)
            ours = functools.partial(forward_backward, self, original)
            self._patch(schedules, name, functools.update_wrapper(ours, original))
        self._patch(layers, _LINEAR, deferring_linear(getattr(layers, _LINEAR), self.store))
        finalize = sys.modules[_FINALIZE]
        self._patch(finalize, _TIED, _summing_tied_copies(getattr(finalize, _TIED)))

        try:
            self._assert_found()
        except RuntimeError:
            self.disable()
            raise

    def _assert_found(self) -> None:
        """Each patch took effect: the code that is to find it looks it up by that name.

        Raises:
            RuntimeError: Megatron's code has moved.
        """
        users = (
            (schedules.get_forward_backward_func, _PIPELINED),
            (layers.linear_with_grad_accumulation_and_async_allreduce, (_LINEAR,)),
            (sys.modules[_FINALIZE].finalize_model_grads, (_TIED,)),
        )
        for user, names in users:
            for name in names:
                if name not in user.__code__.co_names or name not in user.__globals__:
                    raise RuntimeError(
                        f'{user.__module__}.{user.__name__} does not use {name} in this release '
                        'of Megatron-Core: the patch would have no effect; please report it'
                    )

    def disable(self) -> None:
        """Takes everything out again; later calls do nothing."""
        while self._undo:
            owner, name, original = self._undo.pop()
            setattr(owner, name, original)

    def __enter__(self) -> Plugin:
        return self

    def __exit__(self, *_: object) -> None:
        self.disable()

    @property
    def enabled(self) -> bool:
        return bool(self._undo)

    def _patch(self, owner: Any, name: str, replacement: Any) -> None:
        self._undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, replacement)


def _summing_tied_copies(original: Callable) -> Callable:
    """Megatron's reduction of tied embeddings, and a plain sum where one rank holds both copies."""

    @functools.wraps(original)
    def reduce(model: list[torch.nn.Module], *args: Any, **kwargs: Any) -> None:
        copies = tied_copies(model)
        if not copies:
            original(model, *args, **kwargs)
            return
        one, other = (
            copy.main_grad if hasattr(copy, 'main_grad') else copy.grad for copy in copies
        )
        one.add_(other)
        other.copy_(one)

    return reduce
