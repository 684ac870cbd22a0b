"""Patches of Megatron's optimizer step, and of the waits for all ranks around it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.utils import get_model_config

from megatron_zbpp.analysis.run_ahead import rank_order
from megatron_zbpp.mcore.iteration.arguments import Arguments
from megatron_zbpp.mcore.job.rules import WAIT
from megatron_zbpp.mcore.patches.registry import Patch
from megatron_zbpp.mcore.post_validation import split_step, waiting
from megatron_zbpp.mcore.post_validation.next_iteration import ForwardsAhead
from megatron_zbpp.mcore.session import Session
from megatron_zbpp.post_validation.partial_state import PartialReduction
from megatron_zbpp.post_validation.protocol import STEP
from megatron_zbpp.post_validation.speculative_step import KEPT_BYTES
from megatron_zbpp.post_validation.views import SharedViews
from megatron_zbpp.runtime.guard import agreement
from megatron_zbpp.runtime.log import job_log

if TYPE_CHECKING:
    from megatron_zbpp.mcore.post_validation.asynchronous_steps import AsynchronousSteps

_SPARED = 0.1  # of what is free: memory in parts cannot all be used


def most_kept(device: torch.device, share: float, limit: float | None) -> int:
    """Return bytes that may be kept beside the forwards that run ahead meanwhile.

    No activation is held when this is asked, so all that passes have needed is free, and forwards
    that run ahead need a share of it again.

    Args:
        device: of the optimizer's state.
        share: of what passes have needed at most, that is needed until the step is validated.
        limit: GiB that are kept at most; None: as many as there is memory for.
    """
    found = KEPT_BYTES if device.type != 'cuda' else max(KEPT_BYTES, _free(device, share))
    return found if limit is None else min(found, int(limit * (1 << 30)))


def _free(device: torch.device, share: float) -> int:
    allocated = torch.cuda.memory_allocated(device)
    on_device, _ = torch.cuda.mem_get_info(device)
    free = on_device + torch.cuda.memory_reserved(device) - allocated
    by_passes = torch.cuda.max_memory_allocated(device) - allocated
    return int((1 - _SPARED) * free - min(1.0, share) * by_passes)


# NVIDIA's training loops: where they make ranks agree
_LOOPS = ('megatron.training.utils', 'megatron.bridge.training.utils.train_utils')

# Megatron-Bridge's: makes iterators of a rank's chunks
_VIEWS = 'megatron.bridge.data.iterator_utils', 'make_data_iterator_list'


def patches(steps: Steps) -> Iterator[Patch]:
    """Yield what steps; where steps do not wait for all ranks, what would wait around them.

    NVIDIA's training loops make ranks agree on results that they have in common, and take the time
    of an iteration behind a barrier.
    """
    if steps.asynchronous is not None:
        yield from steps.asynchronous.patches()
    for owner in split_step.STEPPING:
        yield Patch(f'{owner.__module__}:{owner.__name__}', 'step', steps.stepping)
    if not steps.may_not_wait:
        return
    without_barrier = functools.partial(_without_barrier, steps)
    yield Patch('megatron.core.timers:Timer', 'elapsed', without_barrier)
    for name, same in (
        ('logical_and_across_model_parallel_group', lambda value: value is True),
        ('reduce_max_stat_across_model_parallel_group', _as_float32),
    ):
        without_reduction = functools.partial(_without_reduction, steps, same)
        for module in _LOOPS:
            yield Patch(module, name, without_reduction, everywhere=True, late=True)
    yield Patch(*_VIEWS, _the_same_views, everywhere=True, late=True)


def _as_float32(value: float | None) -> float | None:
    """Return the value as it comes out of Megatron's reduction."""
    return None if value is None else torch.tensor(value, dtype=torch.float32).item()


def _without_reduction(steps: Steps, same: Callable, original: Callable) -> Callable:
    @functools.wraps(original)
    def reduce(value: Any, *args: Any, **kwargs: Any) -> Any:
        if steps.agreed:
            return same(value)
        return original(value, *args, **kwargs)

    return reduce


def _the_same_views(original: Callable) -> Callable:
    """Give chunks the iterators of the iteration before, in which this one may have begun."""
    views = SharedViews()

    @functools.wraps(original)
    def make_data_iterator_list(model: list, data_iterator: Iterator | None) -> Any:
        if not isinstance(model, list) or len(model) < 2:
            return original(model, data_iterator)
        return views.of(data_iterator, len(model))

    return make_data_iterator_list


def _without_barrier(steps: Steps, original: Callable) -> Callable:
    @functools.wraps(original)
    def elapsed(self: Any, reset: bool = True, barrier: bool = False) -> float:
        return original(self, reset=reset, barrier=barrier and not steps.agreed)

    return elapsed


class Steps:
    """Takes the steps of optimizers, with post-validation where that is possible.

    Args:
        session: of the iterations.
        next_iteration: what is run of the next iteration.

    Attributes:
        asynchronous: those of an asynchronous schedule; None: it is none.
    """

    def __init__(self, session: Session, next_iteration: ForwardsAhead) -> None:
        self._session = session
        self._next = next_iteration
        self.asynchronous: AsynchronousSteps | None = None
        if session.endless is not None:
            from megatron_zbpp.mcore.post_validation.asynchronous_steps import AsynchronousSteps

            self.asynchronous = AsynchronousSteps(session, session.endless)
        self._possible = False
        self._optimizer: weakref.ref[MegatronOptimizer] | None = None
        self._alone: Any = None  # a group of this rank only
        self._reductions: dict[dist.ProcessGroup, PartialReduction] = {}

    @property
    def may_not_wait(self) -> bool:
        """True if steps are asked for that do not wait for all ranks."""
        return self._session.post_validation is not None or self.asynchronous is not None

    @property
    def agreed(self) -> bool:
        """True if ranks need not ask each other for the result of the latest step."""
        if self.asynchronous is not None:
            return self.asynchronous.agreed
        post_validation = self._session.post_validation
        return post_validation is not None and post_validation.agreed

    def stepping(self, original: Callable) -> Callable:
        """Return `original`, the `step` of a class of optimizers, behind our decision."""

        @functools.wraps(original)
        def step(optimizer: MegatronOptimizer) -> Any:
            session, next_iteration = self._session, self._next
            if session.latest is None:
                return original(optimizer)  # no pipeline, or not ours
            if self.asynchronous is not None:
                return self.asynchronous.step(optimizer, original)
            post_validation, call = session.post_validation, next_iteration.latest
            if post_validation is None or call is None or not self._possible_for(optimizer, call):
                with session.watchdog.collective(STEP):
                    return original(optimizer)
            split = split_step.SplitStep(optimizer, original, self._alone, self._most_kept)
            reduction = self._reduction(session.latest.pp_group, call)
            return post_validation.step(split, reduction, next_iteration)

        return step

    def _possible_for(self, optimizer: MegatronOptimizer, call: Arguments) -> bool:
        known = self._optimizer and self._optimizer()
        if known is None:
            self._optimizer = weakref.ref(optimizer)
            self._possible = self._agree(optimizer, call)
        elif known is not optimizer and self._possible:
            self._possible = False
            job_log.warning(WAIT, 'there are several, and forwards need the steps of all')
        return self._possible

    def _agree(self, optimizer: MegatronOptimizer, call: Arguments) -> bool:
        with self._session.watchdog.collective('whether optimizer steps can be validated later'):
            config = get_model_config(call.models[0])
            reason = waiting.refusal(optimizer) or waiting.refusal_of_model(config)
            reason = reason or waiting.refusal_of_loop()
            if self._session.programs.num_replicas > 1:
                reason = reason or waiting.BOTH_WAYS
            refused = agreement.reasons(reason)
            self._alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        if refused:
            job_log.warning(WAIT, '; '.join(refused))
        return not refused

    def _most_kept(self, device: torch.device) -> int:
        share = self._next.share_of_activations()
        return most_kept(device, share, self._session.settings.kept_gib)

    def _reduction(self, pp_group: dist.ProcessGroup, call: Arguments) -> PartialReduction:
        if pp_group not in self._reductions:
            order = rank_order(self._session.programs.placement(pp_group.size()))
            device = next(call.models[0].parameters()).device
            self._reductions[pp_group] = PartialReduction(pp_group, order, device)
        return self._reductions[pp_group]
