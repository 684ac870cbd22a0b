"""One step of a Megatron optimizer, in the two halves that post-validation needs, if it can be.

All arithmetic is Megatron's own: its functions run with the reductions taken out of them, which are
begun at once and answered in the second half. So the result has Megatron's bits and its logs.

Between the halves the device is given passes. On CUDA the reduced numbers are read on a stream of
their own, behind the reduction alone: the host does not wait until the device has run those passes,
and has more queued behind them by then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import clip_grads, layer_wise_optimizer
from megatron.core.optimizer import optimizer as module
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_zbpp.mcore import compat
from megatron_zbpp.mcore.job import rules
from megatron_zbpp.mcore.job.rules import Context, Rule, check
from megatron_zbpp.mcore.patches.registry import Patch, replaced
from megatron_zbpp.post_validation.protocol import Outcome, is_clean
from megatron_zbpp.post_validation.speculative_step import SpeculativeStep, Stepped
from megatron_zbpp.runtime.compat import unseen_by_autograd

_SINGLE = (module.FP32Optimizer, module.Float16OptimizerWithFloat16Params, DistributedOptimizer)
KNOWN = (*_SINGLE, module.ChainedOptimizer)


def refusal(optimizer: MegatronOptimizer) -> str | None:
    """Return why steps of this optimizer must wait for all ranks; None: they need not."""
    for each in members(optimizer):
        # possible from 0.18 on
        if compat.gathers_layers(each) and getattr(each, 'overlap_param_gather', False):
            return 'overlap_param_gather: forwards gather layers into the memory of gradients'
        known = type(each) in KNOWN or compat.shares_out_layers(each)
        if not known:  # what it does around its leaves' steps is its own
            return _unknown(each, KNOWN)
    for leaf in leaves(optimizer):
        if type(leaf) not in _SINGLE:
            return _unknown(leaf, _SINGLE)
        if getattr(leaf, 'is_stub_optimizer', False):
            return 'a rank has no parameters to step'
        sources = leaf.config, getattr(leaf, 'ddp_config', None)
        if why := _waits(rules.WAITS_BY_OPTIMIZER, *sources):
            return why
    return None


def _waits(rules: Iterable[Rule], *sources: Any) -> str | None:
    return next(map(str, check(Context(sources), rules)), None)


def _unknown(optimizer: MegatronOptimizer, known: tuple[type, ...]) -> str:
    names = ', '.join(each.__name__ for each in known)
    return f'{type(optimizer).__name__} is not one of {names}, and not supported so far'


def refusal_of_loop() -> str | None:
    """Return why steps in this training loop must wait for all ranks; None: they need not."""
    mode = SimpleNamespace(rerun_mode=compat.rerun_mode())
    return _waits(rules.WAITS_BY_LOOP, mode, compat.training_arguments())


def refusal_of_model(config: Any) -> str | None:
    """Return why forwards of a model with this config cannot be dropped; None: they can."""
    return _waits(rules.WAITS_BY_MODEL, config)


def leaves(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return the optimizers of a chain, and of chains in it; of one that is none, itself."""
    return [each for each in members(optimizer) if not getattr(each, 'chained_optimizers', ())]


def members(optimizer: MegatronOptimizer) -> list[Any]:
    """Return the optimizer, and all that it is a chain of."""
    parts = getattr(optimizer, 'chained_optimizers', ())
    return [optimizer, *(each for part in parts for each in members(part))]


class Pending:
    """A tensor on its way over all ranks of a group; None: over all ranks."""

    def __init__(self, value: torch.Tensor, op: Any, group: Any = None) -> None:
        self.value = value  # all ranks' when `work` is done
        self.work: Any = dist.all_reduce(value, op, group, async_op=True)
        # page-locked on CUDA, before forwards run ahead: that may wait for the device
        pinned = value.device.type == 'cuda'
        self._copy = torch.empty(value.shape, dtype=value.dtype, pin_memory=pinned)

    def on_host(self) -> torch.Tensor:
        """Return the value on the host once `work` is done; wait for nothing else."""
        if self.value.device.type != 'cuda':
            self.work.wait()
            return self.value
        with torch.cuda.stream(_reading(self.value.device)):
            self.work.wait()
            self._copy.copy_(self.value, non_blocking=True)
            copied = torch.cuda.current_stream().record_event()
        copied.synchronize()
        return self._copy


class Reduction(Pending):
    """A number on its way over all ranks of a group; of this rank it is `local`."""

    def __init__(self, local: float, op: Any, group: Any, device: torch.device) -> None:
        self.local, self.group = local, group
        dtype = torch.int64 if isinstance(local, int) else torch.float32
        super().__init__(torch.tensor([local], dtype=dtype, device=device), op, group)

    @functools.cached_property
    def result(self) -> float:
        """The sum, once it is there."""
        return self.on_host().item()

    def root(self, on_host: bool = False) -> float | torch.Tensor:
        """Return the norm as `get_grad_norm_fp32` gives it; `on_host` nothing waits to read it."""
        if getattr(clip_grads, compat.SCALE_BY_TENSOR, None) is None:  # roots are in float64
            return self.result**0.5
        if on_host:
            return torch.tensor([self.result], dtype=self.value.dtype).pow(0.5)
        self.work.wait()
        return self.value.pow(0.5)


# by device, the stream on which numbers are copied to the host
_reading = functools.cache(torch.cuda.Stream)
# what an optimizer's `step` looks up in its module, and is answered there
_NORM, _CLIP, _COUNT = 'get_grad_norm_fp32', 'clip_grad_by_total_norm_fp32', 'count_zeros_fp32'
_ASKING = (module, layer_wise_optimizer)  # who have these by name


def patches() -> Iterator[Patch]:
    """Yield the functions that are answered while a step lasts."""
    path = module.__name__
    one, chain = f'{path}:MegatronOptimizer', f'{path}:ChainedOptimizer'
    for name, *users in (
        (_NORM, f'{one}.get_grad_norm', f'{one}.clip_grad_norm', f'{chain}.get_grad_norm'),
        (_CLIP, f'{chain}.step', f'{one}.clip_grad_norm'),
        (_COUNT, f'{one}.count_zeros', f'{chain}.count_zeros'),
    ):
        yield Patch(path, name, None, tuple(users))


class SplitStep:
    """One step of the outermost `optimizer`; see `post_validation.protocol.OptimizerStep`."""

    def __init__(
        self,
        optimizer: MegatronOptimizer,
        original: Callable[[Any], tuple[bool, float | None, int | None]],  # its own step
        alone: dist.ProcessGroup,  # a group of this rank only
        most_kept: Callable[[torch.device], int],  # bytes of the old state
    ) -> None:
        self._optimizer, self._original = optimizer, original
        self._alone, self._most_kept = alone, most_kept
        self._leaves, everyone = leaves(optimizer), members(optimizer)
        self._gathering = [each for each in everyone if compat.gathers_layers(each)]
        sharded = (each for each in everyone if compat.gathers_buffers(each))
        self._chunks = {id(chunk): chunk for each in sharded for chunk in each.model_chunks}
        self._device = next(p for g in optimizer.param_groups for p in g['params']).device
        self.clip_grad = self._leaves[0].config.clip_grad
        self._overflows: dict[int, Reduction] = {}  # by place of the leaf
        self._norms: list[Reduction] = []
        self._zeros: list[Reduction] = []
        # by identity: norms that Megatron is answered, and what they are on the host
        self._known_norms: dict[int, tuple[Any, Any]] = {}
        self._speculative: list[SpeculativeStep] = []
        self._clipped = False

    def begin(self, possible: bool) -> float:
        """Return the squared norm over all ranks of this pipeline stage, alike on each of them."""
        self.begin_reductions()
        stage: Any = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        members = set(dist.get_process_group_ranks(stage))
        overflowed = any(reduction.local for reduction in self._overflows.values())
        total = 0.0 if possible and not overflowed else float('inf')
        for reduction in self._norms:
            group = reduction.group or dist.group.WORLD
            shared = members.intersection(dist.get_process_group_ranks(group))
            total += reduction.local * len(shared) / len(members)  # the others have copies
        if len(members) == 1:
            return total
        value = torch.tensor([total], dtype=torch.float64, device=self._device)
        dist.all_reduce(value, group=stage)
        return value.item()

    def begin_reductions(self) -> None:
        """Make gradients ready to step with by Megatron's code, but for clipping."""
        for at, leaf in enumerate(self._leaves):
            scaler = getattr(leaf, 'grad_scaler', None)
            with ExitStack() as stack:
                alone = replaced(leaf, 'get_grad_stats_parallel_group', lambda: self._alone)
                stack.enter_context(alone)
                if scaler is not None:
                    stack.enter_context(replaced(scaler, 'update', lambda _: None))
                overflow = leaf.prepare_grads()
            if scaler is not None:
                group, largest = leaf.get_grad_stats_parallel_group(), dist.ReduceOp.MAX
                self._overflows[at] = Reduction(float(overflow), largest, group, self._device)
        if isinstance(self._optimizer, module.ChainedOptimizer) or self.clip_grad > 0:
            with _answered(_NORM, self._begin_norm):
                self._optimizer.get_grad_norm()
        if self._leaves[0].config.log_num_zeros_in_grad:
            with _answered(_COUNT, self._begin_count):
                self._optimizer.count_zeros()

    def _begin_norm(
        self,
        original: Callable,
        grads: Any,
        norm_type: float = 2,
        grad_stats_parallel_group: Any = None,
    ) -> float:
        """Compute the norm of this rank, as `get_grad_norm_fp32`, and begin that of all."""
        with replaced(clip_grads, compat.SCALE_BY_TENSOR, None):
            norm = original(grads, norm_type, grad_stats_parallel_group=self._alone)
        # the root of a float32, in float64: its square rounds to that float32 again
        local, group = norm * norm, grad_stats_parallel_group
        self._norms.append(Reduction(local, dist.ReduceOp.SUM, group, self._device))
        return norm

    def _begin_count(
        self, original: Callable, parameters: Any, grad_stats_parallel_group: Any, **more: Any
    ) -> float:
        """Count the zeros of this rank, as `count_zeros_fp32`, and begin the sum of all."""
        zeros = original(parameters, self._alone, **more)
        group = grad_stats_parallel_group
        self._zeros.append(Reduction(zeros, dist.ReduceOp.SUM, group, self._device))
        return zeros

    def try_step(self) -> None:
        left = self._most_kept(self._device)
        for leaf in self._leaves:
            speculative = SpeculativeStep(leaf.optimizer, list(_stepped(leaf)), kept_bytes=left)
            self._speculative.append(speculative)
            left -= speculative.kept_bytes
        self._gather_parameters()

    def finish(self) -> Outcome:
        overflows = {at: r.result > 0 for at, r in self._overflows.items()}
        norms = [reduction.root() for reduction in self._norms]
        for norm, reduction in zip(norms, self._norms, strict=True):
            self._known_norms[id(norm)] = norm, reduction.root(on_host=True)
        answers, zeros = iter(norms), iter([reduction.result for reduction in self._zeros])

        def norm_of(original: Callable, *args: Any, **kwargs: Any) -> float | torch.Tensor:
            """Give these norms in their order; others are computed as ever."""
            norm = next(answers, None)
            return original(*args, **kwargs) if norm is None else norm

        def count(original: Callable, *args: Any, **kwargs: Any) -> float:
            """Give these counts in their order, unless clipping may have made more zeros."""
            return original(*args, **kwargs) if self._clipped else next(zeros)

        in_place = [p for speculative in self._speculative for p in speculative.in_place]
        for speculative in self._speculative:
            speculative.undo()
        with ExitStack() as stack:
            for at, leaf in enumerate(self._leaves):
                prepared = functools.partial(_update_scale, leaf, overflows.get(at))
                stack.enter_context(replaced(leaf, 'prepare_grads', prepared))
            for leaf, speculative in zip(self._leaves, self._speculative, strict=False):
                step = functools.partial(self._complete, speculative, leaf.optimizer.step)
                stack.enter_context(replaced(leaf.optimizer, 'step', step))
            stack.enter_context(_answered(_NORM, norm_of))
            stack.enter_context(_answered(_COUNT, count))
            stack.enter_context(unseen_by_autograd(tuple(in_place)))
            outcome = self.synchronous()
        if self._speculative and not outcome.clean:
            stepped = outcome.result[0]
            for speculative in () if stepped else self._speculative:
                speculative.give_back()
                speculative.restore_copies()
            for chunk in self._chunks.values():
                compat.forget_gathered(chunk)
            if not stepped:
                self._gather_parameters()
        return outcome

    def synchronous(self) -> Outcome:
        """Return the step by Megatron's own code, watched."""
        scale = self._optimizer.get_loss_scale()
        with _answered(_CLIP, self._clip):
            result = self._original(self._optimizer)
        # Megatron's scalers make a new one: its value would have to be waited for
        same_scale = scale is self._optimizer.get_loss_scale()
        return Outcome(result, bool(result[0]) and not self._clipped and same_scale)

    def _complete(self, speculative: SpeculativeStep, original: Callable) -> Any:
        if self._clipped:
            speculative.give_back()
            return original()
        return speculative.complete(original)

    def _clip(
        self,
        original: Any,
        parameters: Any,
        max_norm: Any,
        total_norm: Any,
        *rest: Any,
        **more: Any,
    ) -> None:
        _, norm = self._known_norms.get(id(total_norm), (total_norm, total_norm))
        self._clipped |= not is_clean(norm, max_norm)
        original(parameters, max_norm, total_norm, *rest, **more)

    def _gather_parameters(self) -> None:
        """Gather all parts of sharded parameters, now or when a forward needs them."""
        for optimizer in self._gathering:
            optimizer.allgather_params()
        for chunk in self._chunks.values():
            if not chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync()


def _stepped(leaf: MegatronOptimizer) -> Iterator[Stepped]:
    read = {id(parameter): copy.detach() for parameter, copy in compat.model_copies(leaf)}
    for group in leaf.optimizer.param_groups:
        for parameter in group['params']:
            if compat.gradient(leaf, parameter) is not None:
                yield Stepped(parameter, read.get(id(parameter)))


def _update_scale(leaf: Any, overflow: bool | None) -> bool:
    if overflow is not None:
        leaf.grad_scaler.update(overflow)
    return bool(overflow)


@contextmanager
def _answered(name: str, function: Callable) -> Iterator[None]:
    """Give `function(original, ...)` to whoever asks for the function of that name."""
    answer = functools.partial(function, getattr(module, name))
    with ExitStack() as stack:
        for owner in _ASKING:
            if name in vars(owner):
                stack.enter_context(replaced(owner, name, answer))
        yield
