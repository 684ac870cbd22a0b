"""Early optimizer steps: taken before all ranks have agreed, where the optimizer allows it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.utils import get_model_config

from megatron_zbpp.analysis.run_ahead import rank_order
from megatron_zbpp.mcore.iteration.arguments import Arguments
from megatron_zbpp.mcore.job.rules import WAIT
from megatron_zbpp.mcore.optimizer import waiting
from megatron_zbpp.mcore.optimizer.next_iteration import ForwardsAhead
from megatron_zbpp.mcore.optimizer.split_step import SplitStep
from megatron_zbpp.mcore.session import Session
from megatron_zbpp.post_validation.protocol import STEP, PartialReduction, PostValidation
from megatron_zbpp.post_validation.speculative_step import KEPT_BYTES
from megatron_zbpp.runtime.guard import agreement
from megatron_zbpp.runtime.log import job_log

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


class EarlySteps:
    """Takes the steps of optimizers with post-validation where that is possible."""

    def __init__(self, session: Session, next_iteration: ForwardsAhead) -> None:
        self._session = session
        self._next = next_iteration
        self._possible = False
        self._optimizer: weakref.ref[MegatronOptimizer] | None = None
        self._alone: Any = None  # a group of this rank only
        self._reductions: dict[dist.ProcessGroup, PartialReduction] = {}

    def step(
        self,
        optimizer: MegatronOptimizer,
        original: Callable[[Any], Any],
        post_validation: PostValidation,
        pp_group: dist.ProcessGroup,
    ) -> Any:
        """Take one step; return the result of `original`, the optimizer's own `step`."""
        call = self._next.latest
        if call is None or not self._possible_for(optimizer, call):
            with self._session.watchdog.collective(STEP):
                return original(optimizer)
        split = SplitStep(optimizer, original, self._alone, self._most_kept)
        return post_validation.step(split, self._reduction(pp_group, call), self._next)

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
