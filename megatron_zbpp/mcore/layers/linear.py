"""Megatron's linear layers with the weight gradient left for W.

Both halves of the backward are Megatron's own function, called with another context:

- B calls it as Megatron does when the weight gradient is put off to the end of the iteration
  (`grad_output_buffer`), so that it computes the input gradient and its communication only;
- W calls it with a weight whose product is None, so that the input gradient costs nothing and what
  is left is the weight gradient: fused into `main_grad` or not, with the bias gradient.

So the bits are Megatron's, in every version. The forward gets an alias of the weight that autograd
does not track: B never touches the parameter, and no hook on it fires before W.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_zbpp.mcore.patches.registry import Patch
from megatron_zbpp.mcore.patches.shards import Shard, start_all
from megatron_zbpp.runtime.weight_grads import WeightGradStore

_GATHERED_FROM = 'megatron_zbpp_gathered_from'  # on a tensor: this rank's rows of it, and the group


def patches(store: WeightGradStore) -> Iterator[Patch]:
    """Yield the autograd functions of Megatron's linear layers, which leave it to `store`."""
    core = 'megatron.core.tensor_parallel'
    for module, name, ours, user in (
        (
            f'{core}.layers',
            'LinearWithGradAccumulationAndAsyncCommunication',
            deferring_linear,
            'linear_with_grad_accumulation_and_async_allreduce',
        ),
        (
            f'{core}.mappings',
            '_ReduceScatterToSequenceParallelRegion',
            remembering_reduce_scatter,
            'reduce_scatter_to_sequence_parallel_region',
        ),
    ):
        replacement = functools.partial(ours, store=store)
        yield Patch(module, name, replacement, (f'{module}:{user}',))


def deferring_linear(original: type, store: WeightGradStore) -> type:
    """Return a drop-in for Megatron's `LinearWithGradAccumulationAndAsyncCommunication`.

    Args:
        original: that class.
        store: asked in forward whether to defer; takes the deferred gradients in backward.
    """
    names = tuple(inspect.signature(original.forward).parameters)[4:]  # what follows the bias

    class DeferringLinear(original):
        """Splits the backward where the store says so, and is `original` elsewhere."""

        @classmethod
        def apply(
            cls,
            input: torch.Tensor,
            weight: torch.Tensor,
            bias: torch.Tensor | None,
            *rest: Any,
        ) -> torch.Tensor:
            splits = store.deferring and torch.is_grad_enabled() and input.requires_grad
            plain = _plain(dict(zip(names, rest, strict=False)))
            if not (splits and isinstance(weight, torch.nn.Parameter) and plain):
                return original.apply(input, weight, bias, *rest)
            parameters = [weight] if bias is None else [weight, bias]
            alias = None if bias is None else bias.detach()
            return super().apply(parameters, input, weight.detach(), alias, *rest)

        @staticmethod
        def forward(ctx, parameters, input, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
            ctx.parameters = parameters
            ctx.unused = 1 + len(rest)
            # as the parameter does: see `_input_gradient`
            output = original.forward(ctx, input, weight.requires_grad_(), *rest)
            weight.requires_grad_(False)  # saved by autograd as an alias that nobody tracks
            return output

        @staticmethod
        def backward(ctx, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            input, weight = ctx.saved_tensors
            split = _Context(vars(ctx))
            grad_input = _input_gradient(original, split, input, weight, grad_output)
            _defer(original, split, input, grad_output, store)
            return None, grad_input, *[None] * ctx.unused

    return DeferringLinear


def _plain(settings: dict[str, Any]) -> bool:
    return settings['grad_output_buffer'] is None and settings.get('gtp_remat_size', 1) == 1


class _Context:
    """Stands for the context of Megatron's backward, for B and then for W.

    Attributes, beside Megatron's:
        parameters: the weight, and the bias if there is one.
        fused: whether Megatron adds the weight's gradient to `main_grad`.
    """

    parameters: list[torch.nn.Parameter]
    saved_tensors: tuple[torch.Tensor, Any] | None
    main_grad: torch.Tensor | None
    use_bias: bool
    grad_output_buffer: list[torch.Tensor] | None
    wgrad_deferral_limit: int
    gradient_accumulation_fusion: bool
    allreduce_dgrad: bool
    sequence_parallel: bool
    tp_group: torch.distributed.ProcessGroup
    _fwd_used_autocast: bool

    def __init__(self, saved: dict[str, Any]) -> None:
        vars(self).update(saved)
        self.fused = self.gradient_accumulation_fusion


def _without_autocast(backward: Callable, context: _Context) -> Callable:
    """Return Megatron's backward without the wrapper that switches autocast, where it stays off."""
    wrapped = getattr(backward, '__wrapped__', None)
    if wrapped is None or context._fwd_used_autocast or torch.is_autocast_enabled('cuda'):
        return backward
    return wrapped


def _input_gradient(
    original: type,
    context: _Context,
    input: torch.Tensor,
    weight: torch.Tensor,
    grad_output: torch.Tensor,
) -> torch.Tensor:
    """Return the gradient of the layer's input, reduced over `tp_group` as the layer asks."""
    # as the parameter does: torch multiplies by another kernel where no gradient is wanted and the
    # other operand is not contiguous
    context.saved_tensors = input, weight.requires_grad_()
    context.main_grad = None
    context.use_bias = False
    # put the weight gradient off, without limit; only the fused branch knows how to
    context.grad_output_buffer = []
    context.wgrad_deferral_limit = 0
    context.gradient_accumulation_fusion = True
    grad_input = _without_autocast(original.backward, context)(context, grad_output)[0]
    context.saved_tensors = context.grad_output_buffer = None
    return grad_input


def _defer(
    original: type,
    context: _Context,
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
        whole = [o.gather() if isinstance(o, Shard) else o for o in operands]
        return _weight_gradients(original, context, whole[0], whole[1])

    def held() -> list[torch.Tensor]:
        return [o.rows if isinstance(o, Shard) else o for o in operands]

    fused = (0,) if context.fused else ()
    store.defer(context.parameters, compute, held, start_all(shards), fused)


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


def _weight_gradients(
    original: type, context: _Context, input: torch.Tensor, grad_output: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """Return gradients of weight and bias; the fused kernel adds the weight's to `main_grad`."""
    weight, *bias = context.parameters
    context.saved_tensors = input, _Unasked(weight)
    context.main_grad = getattr(weight, 'main_grad', None)
    context.use_bias = bool(bias)
    context.gradient_accumulation_fusion = context.fused
    context.allreduce_dgrad = context.sequence_parallel = False
    gradients = _without_autocast(original.backward, context)(context, grad_output)
    return gradients[1 : 2 + len(bias)]


class _Unasked:
    """A weight where nobody asks for the gradient of the input: its product is None, and free.

    Else it is the weight: `main_grad` and the flags beside it are read there and written there.
    """

    def __init__(self, weight: torch.nn.Parameter) -> None:
        vars(self)['_weight'] = weight

    def __getattr__(self, name: str) -> Any:
        return getattr(self._weight, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._weight, name, value)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> None:
        """Return None for the gradient of the input, which torch asks for."""
        if function is not torch.Tensor.matmul:
            raise NotImplementedError(f"Megatron's backward uses the weight for {function}")
