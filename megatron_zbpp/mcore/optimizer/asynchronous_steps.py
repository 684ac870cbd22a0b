"""Optimizer steps of an asynchronous schedule: when, clipped by which norm, at which rates.

`LateSteps` begins a step behind a call and takes it within the next one (PipeDream-2BW): a forward
of batch b+2 is the first that needs the weights that the step of batch b makes. So its reductions
have the time of a batch: the norm of all gradients clips as ever, and no rank waits for it.
`StageNorms` clips by the norm of a stage's own gradients, so that a step waits for no other stage.
`AnnealedRates` begins with learning rates divided by the delay of the stage (PipeMare's T1).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_zbpp.mcore import compat
from megatron_zbpp.mcore.optimizer import waiting
from megatron_zbpp.mcore.optimizer.split_step import SplitStep, replaced
from megatron_zbpp.mcore.patches.registry import Patch
from megatron_zbpp.mcore.session import Session
from megatron_zbpp.mcore.settings import STAGE
from megatron_zbpp.post_validation.protocol import STEP
from megatron_zbpp.runtime.endless import EndlessTraining
from megatron_zbpp.runtime.guard import agreement
from megatron_zbpp.runtime.log import job_log

# what a scheduler writes into groups of parameters between the two halves
_SCHEDULED = 'lr', 'weight_decay'
_GRADIENTS = 'grad', 'decoupled_grad'
# what of the core reads weights for checkpoints
_READERS = (
    ('megatron.core.transformer.module:MegatronModule', ('sharded_state_dict',)),
    *(
        (f'{each.__module__}:{each.__name__}', ('state_dict', 'sharded_state_dict'))
        for each in (
            FP32Optimizer,
            Float16OptimizerWithFloat16Params,
            DistributedOptimizer,
            ChainedOptimizer,
        )
    ),
)


def _readers_patches(endless: EndlessTraining) -> Iterator[Patch]:
    """Yield the readers of weights: each takes the step first that is still to be taken."""

    def behind(original: Callable) -> Callable:
        @functools.wraps(original)
        def read(*args: Any, **given: Any) -> Any:
            endless.finish_step()
            return original(*args, **given)

        return read

    for owner, names in _READERS:
        for name in names:
            yield Patch(owner, name, behind)
    # of --log-params-norm, which waits for all ranks anyway
    yield Patch('megatron.training.utils', 'calc_params_l2_norm', behind, (), True, True)


class LateSteps:
    """Begins the steps of one optimizer."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._alone: Any = None  # a group of this rank only
        self._possible: bool | None = None

    @property
    def possible(self) -> bool:
        """True once steps have been found to be taken so."""
        return bool(self._possible)

    def begin(
        self, optimizer: MegatronOptimizer, original: Callable[[Any], Any]
    ) -> Callable[[], Callable[[], Any]] | None:
        """Return a function that begins a step; None: the step is taken at once, with a warning."""
        endless = self._session.endless
        if endless is None or not endless.late:
            return None
        if self._possible is None:
            self._possible = self._agree(optimizer)
        if not self._possible:
            return None

        def begin() -> Callable[[], Any]:
            step = LateStep(optimizer, original, self._alone)
            return functools.partial(self._take, step)

        return begin

    def _take(self, step: LateStep) -> Any:
        with self._session.watchdog.collective(STEP):
            return step.take()

    def _agree(self, optimizer: MegatronOptimizer) -> bool:
        refused = agreement.reasons(_why_not_late(optimizer))
        self._alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        if refused:
            job_log.warning(
                'optimizer steps wait for the norm of all ranks in each call, which costs what '
                'asynchrony gains: %s',
                '; '.join(refused),
            )
        return not refused


def _why_not_late(optimizer: MegatronOptimizer) -> str | None:
    for each in waiting.members(optimizer):
        if compat.gathers_layers(each):
            return 'ranks gather the layers that they share out behind each step'
        if getattr(each, 'grad_scaler', None) is not None:
            return 'a loss scale has to be known before the next call'
    return waiting.refusal(optimizer)


class LateStep:
    """A step whose reductions are begun; keeps gradients and rates until it is taken.

    The next call writes to the gradients' buffers, and the scheduler to the groups of parameters.
    """

    def __init__(
        self,
        optimizer: MegatronOptimizer,
        original: Callable[[Any], Any],
        alone: dist.ProcessGroup,
    ) -> None:
        self._split = SplitStep(optimizer, original, alone, lambda _: 0)
        self._split.begin_reductions()
        self._groups = optimizer.param_groups
        self._gradients = [
            (p, name, gradient.clone())
            for group in self._groups
            for p in group['params']
            for name in _GRADIENTS
            if (gradient := getattr(p, name, None)) is not None
        ]
        self._scheduled = [_scheduled(group) for group in self._groups]

    def take(self) -> tuple[bool, float | None, int | None]:
        """Wait for the reductions and take the step; return what the optimizer's own returns."""
        with _put_back(self._gradients), self._as_scheduled():
            return self._split.finish().result

    @contextmanager
    def _as_scheduled(self) -> Iterator[None]:
        now = [_scheduled(group) for group in self._groups]
        for group, own in zip(self._groups, self._scheduled, strict=True):
            group.update(own)
        try:
            yield
        finally:
            for group, own in zip(self._groups, now, strict=True):
                group.update(own)


def _scheduled(group: dict[str, Any]) -> dict[str, Any]:
    return {name: group[name] for name in _SCHEDULED if name in group}


@contextmanager
def _put_back(gradients: list[tuple[torch.Tensor, str, torch.Tensor]]) -> Iterator[None]:
    """Let parameters have these gradients while this lasts."""
    now = [getattr(p, name, None) for p, name, _ in gradients]
    for p, name, gradient in gradients:
        setattr(p, name, gradient)
    try:
        yield
    finally:
        for (p, name, _), own in zip(gradients, now, strict=True):
            setattr(p, name, own)


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
        possible = self.decide(agreement.reasons(_why_not_by_stage(optimizer)))
        if possible and waiting.leaves(optimizer)[0].config.log_num_zeros_in_grad:
            raise NotImplementedError(
                'log_num_zeros_in_grad=True is unsupported where each stage clips by its own norm, '
                'because the log would have the zeros of the last stage alone: drop '
                '--log-num-zeros-in-grad, or give --pipeline-clip global'
            )
        return possible

    def decide(self, refused: list[str]) -> bool:
        """Return whether no rank has a reason against clipping by stage; tell the user.

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


def _why_not_by_stage(optimizer: MegatronOptimizer) -> str | None:
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


_WARM_UPS = 5  # for how many times the warm-up rates are annealed
_OF_DECAY = 4  # without a warm-up, for this part of the decay


class AnnealedRates:
    """Divides learning rates by max(tau, 1)^(1 - k/K) while step k is taken; tau is the delay.

    Megatron's scheduler and the log go on with the rate of the program.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._scheduler: weakref.ref[OptimizerParamScheduler] | None = None

    def patches(self) -> Iterator[Patch]:
        """Yield the patch that shows Megatron's scheduler, where rates anneal."""
        if self._session.programs.corrects_weights:
            path = f'{OptimizerParamScheduler.__module__}:{OptimizerParamScheduler.__name__}'
            yield Patch(path, 'step', self._seeing)

    def _seeing(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def step(scheduler: OptimizerParamScheduler, *args: Any, **given: Any) -> None:
            self._scheduler = weakref.ref(scheduler)
            original(scheduler, *args, **given)

        return step

    @contextmanager
    def annealed(self, optimizer: MegatronOptimizer) -> Iterator[None]:
        """Let groups of parameters have the rates of this stage while a step lasts."""
        endless = self._session.endless
        if endless is None or not self._session.programs.corrects_weights or endless.stepping:
            yield
            return
        divisor = max(endless.tau, 1) ** self._exponent(endless.steps)
        groups = optimizer.param_groups
        rates = [group['lr'] for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            group['lr'] = rate / divisor
        try:
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group['lr'] = rate

    def _exponent(self, steps: int) -> float:
        """Return 1 at the first step, less at each, and 0 from the last one of annealing on."""
        most = self._session.settings.anneal_steps
        if most is not None:
            return 1 - min(steps / most, 1) if most else 0
        scheduler = self._scheduler and self._scheduler()
        if scheduler is None:
            raise ValueError(
                "anneal_steps is None, but no scheduler of Megatron's says over how many steps the "
                'learning rate is warmed up: give the steps over which pipemare anneals it, or 0'
            )
        # in its unit, which may be samples
        most = _WARM_UPS * scheduler.lr_warmup_steps or scheduler.lr_decay_steps // _OF_DECAY
        return 1 - min(scheduler.num_steps / most, 1) if most else 0


class AsynchronousSteps:
    """Takes the steps of one optimizer."""

    def __init__(self, session: Session, endless: EndlessTraining) -> None:
        self._session, self._endless = session, endless
        self._late, self._norms = LateSteps(session), StageNorms(session)
        self._rates = AnnealedRates(session)

    def patches(self) -> Iterator[Patch]:
        """Yield the patches of asynchronous steps."""
        yield from _readers_patches(self._endless)
        yield from self._rates.patches()

    @property
    def agreed(self) -> bool:
        """True if ranks need not ask each other for the result of the latest step."""
        return self._late.possible or self._norms.possible

    def step(self, optimizer: MegatronOptimizer, original: Callable[[Any], Any]) -> Any:
        """Take the step behind a call, or begin it; `original` is the optimizer's own."""
        with (
            self._session.watchdog.collective(STEP),
            self._norms.clipping(optimizer),
            self._rates.annealed(optimizer),
        ):
            begin = self._late.begin(optimizer, original)
            return self._endless.step(functools.partial(original, optimizer), begin)
