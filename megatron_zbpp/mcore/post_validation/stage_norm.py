"""Clipping by the norm of a stage's own gradients: its steps wait for no other stage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_zbpp.mcore import compat
from megatron_zbpp.mcore.post_validation import waiting
from megatron_zbpp.mcore.post_validation.split_step import replaced
from megatron_zbpp.mcore.session import Session
from megatron_zbpp.mcore.settings import STAGE
from megatron_zbpp.runtime.guard import agreement
from megatron_zbpp.runtime.log import job_log


class StageNorms:
    """Decides once whether stages clip by norms of their own, and lets them."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._possible: bool | None = None

    @property
    def possible(self) -> bool:
        """True once steps have been found to clip so."""
        return bool(self._possible)

    @contextmanager
    def clipping(self, optimizer: MegatronOptimizer) -> Iterator[None]:
        """Let a step take norms of its stage alone, where that was asked for and is possible."""
        if not self._session.clips_by_stage:
            yield
            return
        if self._possible is None:
            self._possible = self._agree(optimizer)
        with ExitStack() as stack:
            for leaf in waiting.leaves(optimizer) if self._possible else ():
                group = _of_stage(leaf)
                name = 'get_grad_stats_parallel_group'
                stack.enter_context(replaced(leaf, name, lambda group=group: group))
            yield

    def _agree(self, optimizer: MegatronOptimizer) -> bool:
        possible = self.decide(agreement.reasons(_refusal(optimizer)))
        if possible and waiting.leaves(optimizer)[0].config.log_num_zeros_in_grad:
            raise NotImplementedError(
                'log_num_zeros_in_grad=True is unsupported where each stage clips by its own norm, '
                'because the log would have the zeros of the last stage alone: drop '
                '--log-num-zeros-in-grad, or give --pipeline-clip global'
            )
        return possible

    def decide(self, refused: list[str]) -> bool:
        """Return whether nothing is refused on any rank, and say what follows.

        Raises:
            ValueError: it was asked for, and is refused.
        """
        if not refused:
            job_log.info(
                'gradients are clipped by the norm of their own stage, which is the norm in the '
                'log, so that steps do not wait: --pipeline-clip global clips by that of all'
            )
            return True
        if self._session.settings.clip == STAGE:
            raise ValueError(
                f"clip is '{STAGE}', but {'; '.join(refused)}: give 'global', which waits"
            )
        job_log.warning(
            'gradients are clipped by the norm of all stages, for which each step waits: %s',
            '; '.join(refused),
        )
        return False


def _refusal(optimizer: MegatronOptimizer) -> str | None:
    for each in waiting.members(optimizer):
        if compat.shares_out_layers(each):
            return 'ranks share out layers to step, and take the norm of all'
        if getattr(each, 'grad_scaler', None) is not None:
            return 'stages have one loss scale, and skip steps together'
    for leaf in waiting.leaves(optimizer):
        if any(getattr(p, 'shared', False) for group in leaf.param_groups for p in group['params']):
            return (
                'tied embeddings would get other steps on the first stage than on the last (untie '
                'them by --untie-embeddings-and-output-weights)'
            )
        if _of_stage(leaf) is None:
            return 'its gradients are shared out over groups that are not of a stage'
    return None


def _of_stage(leaf: MegatronOptimizer) -> dist.ProcessGroup | None:
    stage: Any = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    tensor: Any = parallel_state.get_tensor_model_parallel_group()
    everyone = dist.get_process_group_ranks(
        leaf.get_grad_stats_parallel_group() or dist.group.WORLD
    )
    ranks = {*dist.get_process_group_ranks(stage)} & {*everyone}
    for group in (stage, tensor):
        if {*dist.get_process_group_ranks(group)} == ranks:
            return group
    return None
