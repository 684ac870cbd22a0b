"""Optimizer steps of an asynchronous schedule: when, clipped by which norm, at which rates.

`LateStep` begins behind a call and is taken within the next one (PipeDream-2BW): a forward
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

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_zbpp.mcore import compat
from megatron_zbpp.mcore.optimizer.split_step import KNOWN, SplitStep, leaves, members, refusal
from megatron_zbpp.mcore.patches.registry import Patch, around, replaced
from megatron_zbpp.mcore.session import Session
from megatron_zbpp.mcore.settings import STAGE
from megatron_zbpp.post_validation import STEP
from megatron_zbpp.runtime.endless import EndlessTraining
from megatron_zbpp.runtime.guard import agreement
from megatron_zbpp.runtime.log import job_log
from megatron_zbpp.schedules import find
from megatron_zbpp.techniques.updates.versions import CORRECTED, backwards_use

# what a scheduler writes into groups of parameters between the two halves
_SCHEDULED = 'lr', 'weight_decay'
_GRADIENTS = 'grad', 'decoupled_grad'


def _why_not_late(optimizer: MegatronOptimizer) -> str | None:
    for each in members(optimizer):
        if compat.gathers_layers(each):
            return 'ranks gather the layers that they share out behind each step'
        if getattr(each, 'grad_scaler', None) is not None:
            return 'a loss scale has to be known before the next call'
    return refusal(optimizer)


class LateStep:
    """A step whose reductions are begun; keeps gradients and rates until it is taken.

    The next call writes to the gradients' buffers, and the scheduler to the groups of parameters.
    """

    def __init__(self, optimizer: MegatronOptimizer, original: Callable, alone: Any) -> None:
        self._split = SplitStep(optimizer, original, alone, lambda _: 0)
        self._split.begin_reductions()
        self._groups = optimizer.param_groups
        self._places = [
            (p, name)
            for group in self._groups
            for p in group['params']
            for name in _GRADIENTS
            if getattr(p, name, None) is not None
        ]
        gradients, scheduled = self._state()
        self._own = [gradient.clone() for gradient in gradients], scheduled

    def take(self) -> tuple[bool, float | None, int | None]:
        """Wait for the reductions and take the step; return the optimizer's own result."""
        state = self._state()
        self._set(*self._own)
        try:
            return self._split.finish().result
        finally:
            self._set(*state)

    def _state(self) -> tuple[list[Any], list[dict[str, Any]]]:
        gradients = [getattr(p, name, None) for p, name in self._places]
        return gradients, [{n: g[n] for n in _SCHEDULED if n in g} for g in self._groups]

    def _set(self, gradients: list[Any], scheduled: list[dict[str, Any]]) -> None:
        for (p, name), gradient in zip(self._places, gradients, strict=True):
            setattr(p, name, gradient)
        for group, values in zip(self._groups, scheduled, strict=True):
            group.update(values)


class StageNorms:
    """Decides once whether stages clip by norms of their own, and lets them."""

    def __init__(self, session: Session, endless: EndlessTraining) -> None:
        self._session, self._endless = session, endless
        self.possible: bool | None = None  # whether steps clip so; None: before the first

    @contextmanager
    def clipping(self, optimizer: MegatronOptimizer) -> Iterator[None]:
        """Let a step take norms of its stage alone, where that was asked for and is possible."""
        waits = self._endless.versions is None or self._endless.late
        by_stage = not waits and self._session.settings.clip in (None, STAGE)
        if by_stage and self.possible is None:
            possible = self.decide(agreement.reasons(_why_not_by_stage(optimizer)))
            if possible and leaves(optimizer)[0].config.log_num_zeros_in_grad:
                raise NotImplementedError(
                    'log_num_zeros_in_grad=True is unsupported where each stage clips by its own '
                    'norm, because the log would have the zeros of the last stage alone: drop '
                    '--log-num-zeros-in-grad, or give --pipeline-clip global'
                )
            self.possible = possible
        with ExitStack() as stack:
            for leaf in leaves(optimizer) if by_stage and self.possible else ():
                group, name = _of_stage(leaf), 'get_grad_stats_parallel_group'
                stack.enter_context(replaced(leaf, name, lambda group=group: group))
            yield

    def decide(self, refused: list[str]) -> bool:
        """Return True if no rank has a reason against clipping by stage; tell the user."""
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
    for each in members(optimizer):
        if compat.shares_out_layers(each):
            return 'ranks share out layers to step, and take the norm of all'
        if getattr(each, 'grad_scaler', None) is not None:
            return 'stages have one loss scale, and skip steps together'
    for leaf in leaves(optimizer):
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
    everyone = leaf.get_grad_stats_parallel_group() or dist.group.WORLD
    of_stage, of_norm = map(dist.get_process_group_ranks, (stage, everyone))
    for group in (stage, tensor):
        if {*dist.get_process_group_ranks(group)} == {*of_stage} & {*of_norm}:
            return group
    return None


_WARM_UPS = 5  # for how many times the warm-up rates are annealed
_OF_DECAY = 4  # without a warm-up, for this part of the decay


class AnnealedRates:
    """Divides learning rates by max(tau, 1)^(1 - k/K) while step k is taken; tau is the delay.

    Megatron's scheduler and the log go on with the rate of the program.
    """

    def __init__(self, session: Session, endless: EndlessTraining) -> None:
        self._session, self._endless = session, endless
        self._anneals = backwards_use(CORRECTED, find(session.programs.source.name))  # PipeMare's
        self._scheduler: weakref.ref[OptimizerParamScheduler] | None = None

    def patches(self) -> Iterator[Patch]:
        """Yield the patch that shows Megatron's scheduler, where rates anneal."""
        if self._anneals:
            path = f'{OptimizerParamScheduler.__module__}:{OptimizerParamScheduler.__name__}'
            yield Patch(path, 'step', around(self._seeing))

    def _seeing(self, original: Callable, scheduler: Any, *args: Any, **given: Any) -> None:
        self._scheduler = weakref.ref(scheduler)
        original(scheduler, *args, **given)

    @contextmanager
    def annealed(self, optimizer: MegatronOptimizer) -> Iterator[None]:
        """Let groups of parameters have the rates of this stage while a step lasts."""
        endless = self._endless
        with ExitStack() as stack:
            if self._anneals and not endless.stepping:
                divisor = max(endless.tau, 1) ** self._exponent(endless.steps)
                for group in optimizer.param_groups:
                    stack.callback(group.update, lr=group['lr'])
                    group['lr'] = group['lr'] / divisor  # another object, where it is a tensor
            yield

    def _exponent(self, steps: int) -> float:
        """Return 1 at the first step, less at each, and 0 from the last one of annealing on."""
        most = self._session.settings.anneal_steps
        if most is None:
            scheduler = self._scheduler and self._scheduler()
            if scheduler is None:
                raise ValueError(
                    "anneal_steps is None, but no scheduler of Megatron's says over how many steps "
                    'the learning rate is warmed up: give the steps over which pipemare anneals '
                    'it, or 0'
                )
            # in its unit, which may be samples
            steps = scheduler.num_steps
            most = _WARM_UPS * scheduler.lr_warmup_steps or scheduler.lr_decay_steps // _OF_DECAY
        return 1 - min(steps / most, 1) if most else 0


class AsynchronousSteps:
    """Takes the steps of one optimizer, as `EarlySteps` does."""

    def __init__(self, session: Session, endless: EndlessTraining) -> None:
        self._session, self._endless = session, endless
        self._norms, self._rates = StageNorms(session, endless), AnnealedRates(session, endless)
        self._late: bool | None = None  # whether steps are late; None: before the first
        self._alone: Any = None  # a group of this rank only

    def patches(self) -> Iterator[Patch]:
        """Yield what takes a step first that is still to be taken, before who reads weights."""

        def behind(original: Callable, *args: Any, **given: Any) -> Any:
            self._endless.finish_step()
            return original(*args, **given)

        for each in KNOWN:
            for name in ('state_dict', 'sharded_state_dict'):
                yield Patch(f'{each.__module__}:{each.__name__}', name, around(behind))
        module = 'megatron.core.transformer.module:MegatronModule'
        yield Patch(module, 'sharded_state_dict', around(behind))
        # of --log-params-norm, which waits for all ranks anyway
        utils, norm = 'megatron.training.utils', 'calc_params_l2_norm'
        yield Patch(utils, norm, around(behind), everywhere=True, late=True)
        yield from self._rates.patches()

    @property
    def agreed(self) -> bool:
        """True if ranks need not ask each other for the result of the latest step."""
        return bool(self._late or self._norms.possible)

    def step(self, optimizer: MegatronOptimizer, original: Callable[[Any], Any]) -> Any:
        """Take the step behind a call, or begin it; `original` is the optimizer's own."""

        def begin() -> Callable[[], Any]:
            late_step = LateStep(optimizer, original, self._alone)

            def take() -> Any:
                with self._session.watchdog.collective(STEP):
                    return late_step.take()

            return take

        with (
            self._session.watchdog.collective(STEP),
            self._norms.clipping(optimizer),
            self._rates.annealed(optimizer),
        ):
            if self._endless.late and self._late is None:
                refused = agreement.reasons(_why_not_late(optimizer))
                self._alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
                if refused:
                    job_log.warning(
                        'optimizer steps wait for the norm of all ranks in each call, which costs '
                        'what asynchrony gains: %s',
                        '; '.join(refused),
                    )
                self._late = not refused
            late, step = self._endless.late and self._late, functools.partial(original, optimizer)
            return self._endless.step(step, begin if late else None)
