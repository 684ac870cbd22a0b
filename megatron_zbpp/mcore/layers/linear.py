"""Megatron's linear layers with the weight gradient left for W.

Both halves of the backward are Megatron's own function, called with another context:

- B calls it as Megatron does when the weight gradient is put off to the end of the iteration
  (`grad_output_buffer`), so that it computes the input gradient and its communication only;
- W calls it with a weight whose product is None, so that the input gradient costs nothing and what
  is left is the weight gradient: fused into `main_grad` or not, with the bias gradient.

So the bits are Megatron's, in every version. The forward gets an alias of the weight that autograd
does not track: B never touches the parameter, and no hook on it fires before W.

Of a tensor that sequence parallelism gathers each rank keeps its own rows between B and W (`Shard`,
for Transformer Engine's layers, too), and W gathers them again. Who begins the gather before it
needs the whole lets it overlap with the computation in between. Autograd is given a dummy for a
gradient that is in `main_grad` already.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist

from megatron_zbpp.mcore.patches.registry import Patch
from megatron_zbpp.runtime.weight_grads import WeightGradStore

_GATHERED_FROM = 'megatron_zbpp_gathered_from'  # on a tensor: this rank's rows of it, and the group
ADDED = 'grad_added_to_main_grad'  # a flag that DistributedDataParallel puts on parameters
_TE = 'transformer_engine.pytorch.module.base'  # has a buffer for each shape, as Megatron uses it


def patches(store: WeightGradStore) -> Iterator[Patch]:
    """Yield the autograd functions of Megatron's linear layers, which leave it to `store`."""
    linears, mappings = (f'megatron.core.tensor_parallel.{name}' for name in ('layers', 'mappings'))
    name = 'LinearWithGradAccumulationAndAsyncCommunication'
    users = (f'{linears}:linear_with_grad_accumulation_and_async_allreduce',)
    yield Patch(linears, name, functools.partial(deferring_linear, store=store), users)
    name = '_ReduceScatterToSequenceParallelRegion'
    users = (f'{mappings}:reduce_scatter_to_sequence_parallel_region',)
    yield Patch(mappings, name, functools.partial(remembering_reduce_scatter, store=store), users)


def deferring_linear(original: type, store: WeightGradStore) -> type:
    """Return a drop-in for Megatron's `LinearWithGradAccumulationAndAsyncCommunication`."""
    names = tuple(inspect.signature(original.forward).parameters)[4:]  # what follows the bias

    class DeferringLinear(original):
        """Splits the backward where the store says so, and is `original` elsewhere."""

        @classmethod
        def apply(cls, input: torch.Tensor, weight: Any, bias: Any, *rest: Any) -> torch.Tensor:
            splits = store.deferring and torch.is_grad_enabled() and input.requires_grad
            more = dict(zip(names, rest, strict=False))
            plain = more['grad_output_buffer'] is None and more.get('gtp_remat_size', 1) == 1
            if not (splits and isinstance(weight, torch.nn.Parameter) and plain):
                return original.apply(input, weight, bias, *rest)
            parameters = [weight] if bias is None else [weight, bias]
            alias = None if bias is None else bias.detach()
            return super().apply(parameters, input, weight.detach(), alias, *rest)

        @staticmethod
        def forward(ctx, parameters, input, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
            ctx.parameters = parameters
            ctx.unused = 1 + len(rest)
            # as the parameter does: see `backward`
            output = original.forward(ctx, input, weight.requires_grad_(), *rest)
            weight.requires_grad_(False)  # saved by autograd as an alias that nobody tracks
            return output

        @staticmethod
        def backward(ctx, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            input, weight = ctx.saved_tensors
            context: Any = SimpleNamespace(**vars(ctx))  # in place of Megatron's, for B and for W
            # as the parameter does: torch multiplies by another kernel where no gradient is wanted
            # and the other operand is not contiguous
            context.saved_tensors = input, weight.requires_grad_()
            context.main_grad, context.use_bias = None, False
            # put the weight gradient off, without limit; only the fused branch knows how to
            context.grad_output_buffer, context.wgrad_deferral_limit = [], 0
            context.gradient_accumulation_fusion = True
            grad_input = _without_autocast(original.backward, context)(context, grad_output)[0]
            context.saved_tensors = context.grad_output_buffer = None
            _defer(original, context, ctx.gradient_accumulation_fusion, input, grad_output, store)
            return None, grad_input, *[None] * ctx.unused

    return DeferringLinear


def _without_autocast(backward: Callable, context: Any) -> Callable:
    """Return Megatron's backward without the wrapper that switches autocast, where it stays off."""
    wrapped = getattr(backward, '__wrapped__', None)
    if wrapped is None or context._fwd_used_autocast or torch.is_autocast_enabled('cuda'):
        return backward
    return wrapped


def _defer(
    original: type,
    context: Any,  # of Megatron's backward
    fused: bool,  # whether Megatron adds the weight's gradient to `main_grad`
    input: torch.Tensor,
    grad_output: torch.Tensor,
    store: WeightGradStore,
) -> None:
    operands: list[torch.Tensor | Shard] = [input, grad_output]
    if context.sequence_parallel:
        operands[0] = Shard(input, context.tp_group)
    gathered = getattr(grad_output, _GATHERED_FROM, None)
    if gathered is not None and store.waits:
        operands[1] = Shard(*gathered)
    shards = [operand for operand in operands if isinstance(operand, Shard)]

    def compute() -> tuple[torch.Tensor | None, ...]:
        """Return gradients of weight and bias; the fused kernel adds the weight's elsewhere."""
        whole, gradient = [o.gather() if isinstance(o, Shard) else o for o in operands]
        weight, *bias = context.parameters
        context.saved_tensors = whole, _Unasked(weight)
        context.main_grad = getattr(weight, 'main_grad', None)
        context.use_bias, context.gradient_accumulation_fusion = bool(bias), fused
        context.allreduce_dgrad = context.sequence_parallel = False
        gradients = _without_autocast(original.backward, context)(context, gradient)
        return gradients[1 : 2 + len(bias)]

    def held() -> list[torch.Tensor]:
        return [o.rows if isinstance(o, Shard) else o for o in operands]

    places = (0,) if fused else ()
    store.defer(context.parameters, compute, held, start_all(shards), places)


def remembering_reduce_scatter(original: type, store: WeightGradStore) -> type:
    """Return a drop-in for Megatron's `_ReduceScatterToSequenceParallelRegion`.

    Its backward gathers; the layer before it may keep the rows that it gathered them from.
    """

    class RememberingReduceScatter(original):
        @staticmethod
        def backward(ctx, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            gathered, *rest = original.backward(ctx, grad_output)
            if store.deferring and ctx.input_split_sizes is None:
                setattr(gathered, _GATHERED_FROM, (grad_output, ctx.group))
            return gathered, *rest

    return RememberingReduceScatter


class _Unasked:
    """A weight where nobody asks for the gradient of the input: its product is None, and free."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        vars(self)['_weight'] = weight

    def __getattr__(self, name: str) -> Any:
        return getattr(self._weight, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._weight, name, value)

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any) -> None:
        """Return None for the gradient of the input, which torch asks for."""
        if function is not torch.Tensor.matmul:
            raise NotImplementedError(f"Megatron's backward uses the weight for {function}")


def dummy_gradient(parameter: Any) -> torch.Tensor | None:
    """Return a defined gradient for `parameter`, whose real one a kernel has added to `main_grad`.

    DistributedDataParallel starts the reduction of a bucket in a hook on the parameter's
    AccumulateGrad, which runs on the stream where that node was made. Autograd orders that stream
    behind the computation of a *defined* gradient only, so None would let the reduction start
    before `main_grad` is complete. Megatron and Transformer Engine return dummies for that reason.

    Its values are unused (zeros if Megatron has set `zero_out_wgrad`, for it then adds them). None
    without DistributedDataParallel, which would take it for a gradient.
    """
    if not hasattr(parameter, ADDED):
        return None
    setattr(parameter, ADDED, True)
    zero = getattr(parameter, 'zero_out_wgrad', False)
    shape, dtype = parameter.main_grad.shape, parameter.dtype
    base = sys.modules.get(_TE)
    if base is not None and len(shape) == 2:  # it takes matrices only
        return base.get_dummy_wgrad(list(shape), dtype, zero=zero)
    make = torch.zeros if zero else torch.empty
    return make(shape, dtype=dtype, device=parameter.main_grad.device)


def dropped_gradient(parameter: Any, fused: bool) -> torch.Tensor | None:
    """Return a defined gradient for `parameter`, whose weight gradient is left out.

    Where kernels do not add it to `main_grad`, `fused`, DistributedDataParallel adds it: zeros.
    """
    if fused:
        return dummy_gradient(parameter)
    return torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)


class Shard:
    """This rank's rows of a tensor that the ranks of `group` hold together, in their order."""

    def __init__(self, rows: torch.Tensor, group: dist.ProcessGroup) -> None:
        self.rows = rows.detach().contiguous()  # a thread of the backend writes: it sees no no_grad
        self._group = group
        self._coming: tuple[torch.Tensor, dist.Work] | None = None  # the whole

    @classmethod
    def of(cls, whole: torch.Tensor, group: dist.ProcessGroup) -> Shard:
        """Return a copy of this rank's rows, so that `whole` can go."""
        return cls(whole.chunk(group.size())[group.rank()].clone(), group)

    def gather(self) -> torch.Tensor:
        """Return the whole tensor; what it is computed from next waits for it."""
        self.start()
        (whole, work), self._coming = cast(Any, self._coming), None
        work.wait()
        return whole

    def start(self) -> None:
        """Begin the gather, unless it is under way."""
        if self._coming is None:
            rows, ranks = self.rows, self._group.size()
            whole = rows.new_empty((rows.shape[0] * ranks, *rows.shape[1:]))
            work: Any = dist.all_gather_into_tensor(whole, rows, group=self._group, async_op=True)
            self._coming = whole, work


def start_all(shards: Sequence[Shard]) -> Callable[[], None] | None:
    """Return the function that begins gathers of parameters; None without gathers."""

    def start() -> None:
        for shard in shards:
            shard.start()

    return start if shards else None
