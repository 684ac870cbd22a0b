"""One step of a Megatron optimizer, in the two halves that post-validation needs.

All arithmetic is Megatron's own: its functions run with the reductions taken out of them, which are
begun at once and answered in the second half. So the result has Megatron's bits and its logs.

Between the halves the device is given passes. On CUDA the reduced numbers are read on a stream of
their own, behind the reduction alone: the host does not wait until the device has run those passes,
and has more queued behind them by then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import clip_grads, layer_wise_optimizer
from megatron.core.optimizer import optimizer as module
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    MegatronOptimizer,
)

from megatron_zbpp.mcore import compat
from megatron_zbpp.mcore.optimizer.waiting import leaves, members
from megatron_zbpp.mcore.patches.registry import Patch
from megatron_zbpp.post_validation.protocol import Outcome, is_clean
from megatron_zbpp.post_validation.speculative_step import SpeculativeStep, Stepped
from megatron_zbpp.runtime.compat import unseen_by_autograd


@dataclass(frozen=True)
class Reduction:
    """A number on its way over all ranks of `group`."""

    local: float  # of this rank
    value: torch.Tensor  # all ranks' when `work` is done
    group: dist.ProcessGroup
    work: dist.Work
    # takes that on the host; page-locked before forwards run ahead, which may wait for the device
    copy: torch.Tensor

    @classmethod
    def begin(
        cls, local: float, op: Any, group: dist.ProcessGroup, device: torch.device
    ) -> Reduction:
        dtype = torch.int64 if isinstance(local, int) else torch.float32
        value = torch.tensor([local], dtype=dtype, device=device)
        work: Any = dist.all_reduce(value, op, group, async_op=True)
        return cls(local, value, group, work, room_on_host(value))

    @functools.cached_property
    def result(self) -> float:
        """The sum, once it is there."""
        return read_behind(self.work, self.value, self.copy).item()

    def root(self) -> float | torch.Tensor:
        """Return the norm as `get_grad_norm_fp32` gives it."""
        if not compat.has_tensor_norms():
            return self.result**0.5
        self.work.wait()
        return self.value.pow(0.5)

    def root_on_host(self) -> float | torch.Tensor:
        """Return the norm as `root` does, to the bit, but where reading it waits for nothing."""
        if not compat.has_tensor_norms():
            return self.result**0.5
        return torch.tensor([self.result], dtype=self.value.dtype).pow(0.5)


def room_on_host(value: torch.Tensor) -> torch.Tensor:
    """Return memory of the host for a copy of `value`: page-locked, if it is on CUDA."""
    return torch.empty(value.shape, dtype=value.dtype, pin_memory=value.device.type == 'cuda')


def read_behind(work: Any, value: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    """Return `value` on the host once `work`, which reduces it, is done; wait for nothing else."""
    if value.device.type != 'cuda':
        work.wait()
        return value
    with torch.cuda.stream(_reading(value.device)):
        work.wait()
        copy.copy_(value, non_blocking=True)
        copied = torch.cuda.current_stream().record_event()
    copied.synchronize()
    return copy


@functools.cache
def _reading(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which numbers of `device` are copied to the host."""
    return torch.cuda.Stream(device)


# What an optimizer's `step` looks up in its module, and is answered there.
_NORM, _CLIP, _COUNT = 'get_grad_norm_fp32', 'clip_grad_by_total_norm_fp32', 'count_zeros_fp32'
# Those who have these by name.
_ASKING = (module, layer_wise_optimizer)

_ABSENT = object()


def patches() -> Iterator[Patch]:
    """Yield the functions that are answered while a step lasts."""
    path = module.__name__
    for name, users in (
        (
            _NORM,
            (
                'MegatronOptimizer.get_grad_norm',
                'MegatronOptimizer.clip_grad_norm',
                'ChainedOptimizer.get_grad_norm',
            ),
        ),
        (_CLIP, ('ChainedOptimizer.step', 'MegatronOptimizer.clip_grad_norm')),
        (_COUNT, ('MegatronOptimizer.count_zeros', 'ChainedOptimizer.count_zeros')),
    ):
        yield Patch(path, name, None, tuple(f'{path}:{user}' for user in users))


class SplitStep:
    """One step of `optimizer`; see `post_validation.protocol.OptimizerStep`.

    Args:
        optimizer: the outermost one.
        original: its class's own `step`.
        alone: a group of this rank only.
        most_kept: tells how many bytes of old state may be kept on a device.
    """

    def __init__(
        self,
        optimizer: MegatronOptimizer,
        original: Callable[[Any], tuple[bool, float | None, int | None]],
        alone: dist.ProcessGroup,
        most_kept: Callable[[torch.device], int],
    ) -> None:
        self._optimizer = optimizer
        self._original = original
        self._alone = alone
        self._most_kept = most_kept
        self._leaves = leaves(optimizer)
        everyone = members(optimizer)
        self._gathering = [each for each in everyone if compat.gathers_layers(each)]
        sharded = [
            c for each in everyone if compat.gathers_buffers(each) for c in each.model_chunks
        ]
        self._chunks = list({id(chunk): chunk for chunk in sharded}.values())
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
        self.begin_reductions()
        overflowed = any(reduction.local for reduction in self._overflows.values())
        return self._of_stage(possible and not overflowed)

    def begin_reductions(self) -> None:
        """Make gradients ready to step with, but for clipping."""
        for at, leaf in enumerate(self._leaves):
            overflow = self._prepare(leaf)
            if overflow is not None:
                group = leaf.get_grad_stats_parallel_group()
                self._overflows[at] = Reduction.begin(
                    float(overflow), dist.ReduceOp.MAX, group, self._device
                )
        if isinstance(self._optimizer, ChainedOptimizer) or self.clip_grad > 0:
            with _asked(_NORM, self._begin_norm(getattr(module, _NORM))):
                self._optimizer.get_grad_norm()
        if self._leaves[0].config.log_num_zeros_in_grad:
            with _asked(_COUNT, self._begin_count(getattr(module, _COUNT))):
                self._optimizer.count_zeros()

    def _prepare(self, leaf: MegatronOptimizer) -> bool | None:
        """Prepare gradients by Megatron's step; return if they overflow, None: nobody looks."""
        scaler = getattr(leaf, 'grad_scaler', None)
        with ExitStack() as stack:
            stack.enter_context(
                replaced(leaf, 'get_grad_stats_parallel_group', lambda: self._alone)
            )
            if scaler is not None:
                stack.enter_context(replaced(scaler, 'update', lambda _: None))
            overflow = leaf.prepare_grads()
        return None if scaler is None else overflow

    def _begin_norm(self, original: Callable) -> Callable:
        def get_grad_norm_fp32(
            grads: Any, norm_type: float = 2, grad_stats_parallel_group: Any = None
        ) -> float:
            with replaced(clip_grads, compat.SCALE_BY_TENSOR, None):
                norm = original(grads, norm_type, grad_stats_parallel_group=self._alone)
            # the root of a float32, in float64: its square rounds to that float32 again
            self._norms.append(
                Reduction.begin(
                    norm * norm, dist.ReduceOp.SUM, grad_stats_parallel_group, self._device
                )
            )
            return norm

        return get_grad_norm_fp32

    def _begin_count(self, original: Callable) -> Callable:
        def count_zeros_fp32(
            parameters: Any, grad_stats_parallel_group: Any, *args: Any, **kwargs: Any
        ) -> float:
            zeros = original(parameters, self._alone, *args, **kwargs)
            self._zeros.append(
                Reduction.begin(zeros, dist.ReduceOp.SUM, grad_stats_parallel_group, self._device)
            )
            return zeros

        return count_zeros_fp32

    def _counted(self, zeros: list[float], original: Callable) -> Callable:
        """Give these counts in their order, unless clipping may have made more zeros."""
        left = iter(zeros)

        def count_zeros_fp32(*args: Any, **kwargs: Any) -> float:
            return original(*args, **kwargs) if self._clipped else next(left)

        return count_zeros_fp32

    def _of_stage(self, possible: bool) -> float:
        """Return the squared norm over all ranks of this pipeline stage, alike on each of them."""
        stage: Any = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        members = set(dist.get_process_group_ranks(stage))
        total = 0.0 if possible else float('inf')
        for reduction in self._norms:
            group = reduction.group or dist.group.WORLD
            shared = members.intersection(dist.get_process_group_ranks(group))
            total += reduction.local * len(shared) / len(members)  # the others have copies
        if len(members) == 1:
            return total
        value = torch.tensor([total], dtype=torch.float64, device=self._device)
        dist.all_reduce(value, group=stage)
        return value.item()

    def try_step(self) -> None:
        left = self._most_kept(self._device)
        for leaf in self._leaves:
            self._speculative.append(
                SpeculativeStep(leaf.optimizer, list(_stepped(leaf)), kept_bytes=left)
            )
            left -= self._speculative[-1].kept_bytes
        self._gather_parameters()

    def finish(self) -> Outcome:
        overflows = {at: r.result > 0 for at, r in self._overflows.items()}
        norms = [reduction.root() for reduction in self._norms]
        for norm, reduction in zip(norms, self._norms, strict=True):
            self._known_norms[id(norm)] = norm, reduction.root_on_host()
        zeros = [reduction.result for reduction in self._zeros]
        in_place = [p for speculative in self._speculative for p in speculative.in_place]
        for speculative in self._speculative:
            speculative.undo()
        with ExitStack() as stack:
            for at, leaf in enumerate(self._leaves):
                prepared = _prepared(leaf, overflows.get(at))
                stack.enter_context(replaced(leaf, 'prepare_grads', prepared))
            for leaf, speculative in zip(self._leaves, self._speculative, strict=False):
                step = self._stepping(speculative, leaf.optimizer.step)
                stack.enter_context(replaced(leaf.optimizer, 'step', step))
            answer = _answering(norms, getattr(module, _NORM))
            stack.enter_context(_asked(_NORM, answer))
            counted = self._counted(zeros, getattr(module, _COUNT))
            stack.enter_context(_asked(_COUNT, counted))
            stack.enter_context(unseen_by_autograd(tuple(in_place)))
            outcome = self.synchronous()
        if self._speculative and not outcome.clean:
            self._take_back(stepped=outcome.result[0])
        return outcome

    def synchronous(self) -> Outcome:
        """Return the step by Megatron's own code, watched."""
        scale = self._optimizer.get_loss_scale()
        clip = getattr(module, _CLIP)
        with replaced(module, _CLIP, self._watching(clip)):
            result = self._original(self._optimizer)
        # Megatron's scalers make a new one: its value would have to be waited for
        same_scale = scale is self._optimizer.get_loss_scale()
        return Outcome(result, bool(result[0]) and not self._clipped and same_scale)

    def _stepping(self, speculative: SpeculativeStep, original: Callable) -> Callable:
        def step() -> Any:
            if self._clipped:
                speculative.give_back()
                return original()
            return speculative.complete(original)

        return step

    def _watching(self, clip: Callable) -> Callable:
        def clip_grad_by_total_norm_fp32(
            parameters: Any, max_norm: float, total_norm: float, *args: Any, **kwargs: Any
        ) -> None:
            _, norm = self._known_norms.get(id(total_norm), (total_norm, total_norm))
            self._clipped |= not is_clean(norm, max_norm)
            clip(parameters, max_norm, total_norm, *args, **kwargs)

        return clip_grad_by_total_norm_fp32

    def _take_back(self, stepped: bool) -> None:
        if not stepped:
            for speculative in self._speculative:
                speculative.give_back()
                speculative.restore_copies()
        for chunk in self._chunks:
            compat.forget_gathered(chunk)
        if not stepped:
            self._gather_parameters()

    def _gather_parameters(self) -> None:
        """Gather all parts of sharded parameters, now or when a forward needs them."""
        for optimizer in self._gathering:
            compat.gather_layers(optimizer)
        for chunk in self._chunks:
            if not chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync()


def _stepped(leaf: MegatronOptimizer) -> Iterator[Stepped]:
    read = {id(parameter): copy.detach() for parameter, copy in compat.model_copies(leaf)}
    for group in leaf.optimizer.param_groups:
        for parameter in group['params']:
            if compat.gradient(leaf, parameter) is not None:
                yield Stepped(parameter, read.get(id(parameter)))


def _prepared(leaf: Any, overflow: bool | None) -> Callable[[], bool]:
    def prepare_grads() -> bool:
        if overflow is not None:
            leaf.grad_scaler.update(overflow)
        return bool(overflow)

    return prepare_grads


def _answering(norms: list[float | torch.Tensor], original: Callable) -> Callable:
    """Give these norms in their order; others are computed as ever."""
    left = iter(norms)

    def get_grad_norm_fp32(*args: Any, **kwargs: Any) -> float | torch.Tensor:
        norm = next(left, None)
        return original(*args, **kwargs) if norm is None else norm

    return get_grad_norm_fp32


@contextmanager
def _asked(name: str, replacement: Callable) -> Iterator[None]:
    """Give `replacement` to whoever asks for the function of that name."""
    with ExitStack() as stack:
        for owner in _ASKING:
            if name in vars(owner):
                stack.enter_context(replaced(owner, name, replacement))
        yield


@contextmanager
def replaced(owner: Any, name: str, replacement: Callable | None) -> Iterator[None]:
    """Let `owner` have `replacement` by that name while this lasts."""
    own = vars(owner).get(name, _ABSENT)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if own is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
