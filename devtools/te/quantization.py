"""FP8 with one scale a tensor: current and delayed scaling.

A Float8 tensor of TE has codes (uint8) by rows and, as on Hopper, a transposed copy of them, which
is what products need that go along the columns; its value is code × scale_inv.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from devtools.te.extension import kernel, torch_dtype


def quantized(value: torch.Tensor, quantizer: Any) -> Any:
    """`value` by any quantizer: none, one of this module, or one in Python, of a custom recipe."""
    if quantizer is None:
        return value
    if getattr(quantizer, 'custom', False):
        return quantizer(value)
    return quantize(value, quantizer)


@kernel
def quantize(
    tensor: torch.Tensor, quantizer: Any, output: Any = None, noop: torch.Tensor | None = None
) -> Any:
    """Return `tensor` in FP8, in `output` where there is one; as that is where `noop` is set."""
    if noop is not None and noop.item():
        return output
    if output is None:
        output = _new(quantizer, tensor.shape, tensor.dtype)
    scale = _scale(tensor, quantizer)
    codes = encode(tensor, scale, torch_dtype(quantizer.dtype))
    _write(output, codes, quantizer)
    output._scale_inv.copy_(scale.reciprocal().view(output._scale_inv.shape))
    output._fp8_dtype = quantizer.dtype
    return output


@kernel
def dequantize(tensor: Any, dtype: Any) -> torch.Tensor:
    """Return the values of a Float8 tensor."""
    return values(tensor._data, tensor).to(torch_dtype(dtype))


@kernel
def bgrad_quantize(grad: torch.Tensor, quantizer: Any) -> tuple[torch.Tensor, Any]:
    """Return the gradient of a bias, and the output's gradient quantized."""
    dbias = grad.float().reshape(-1, grad.shape[-1]).sum(0)
    return dbias.to(grad.dtype), quantized(grad, quantizer)


@kernel
def split_quantize(
    tensor: torch.Tensor,
    splits: Sequence[int],
    quantizers: Sequence[Any],
    disable_bulk_allocation: bool = False,
) -> list[Any]:
    """Return the parts of `tensor` along its rows, each by its own quantizer."""
    return [quantized(t, q) for t, q in zip(tensor.split(splits), quantizers, strict=True)]


@kernel
def create_empty_quantized_tensor(
    quantizer: Any,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    pin_memory: bool = False,
) -> Any:
    return _new(quantizer, shape, dtype)


@kernel
def fp8_transpose(
    data: torch.Tensor, dtype: Any, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return codes with their last dimension first."""
    moved = data.movedim(-1, 0)
    return moved.contiguous() if out is None else out.copy_(moved.reshape(out.shape))


@kernel
def compute_amax(tensor: torch.Tensor, amax: torch.Tensor) -> None:
    amax.copy_(_amax(tensor).view(amax.shape))


def encode(tensor: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `tensor` × `scale` as codes of `dtype`; what is too large becomes the largest."""
    largest = torch.finfo(dtype).max
    return (tensor.float() * scale).clamp(-largest, largest).to(dtype).view(torch.uint8)


def values(codes: torch.Tensor, tensor: Any) -> torch.Tensor:
    """Return what `codes` of a Float8 tensor, by rows or by columns, stand for, in fp32."""
    return codes.view(torch_dtype(tensor._fp8_dtype)).float() * tensor._scale_inv.view(())


def scale_of(
    amax: torch.Tensor, largest: float, power_of_2: bool = False, epsilon: float = 0.0
) -> torch.Tensor:
    """Return the scale that takes `amax` to `largest`; 1 where there is none."""
    amax = amax.clamp(min=epsilon)
    scale = (largest / amax).clamp(max=torch.finfo(torch.float32).max)
    if power_of_2:
        scale = torch.ldexp(torch.ones_like(scale), torch.frexp(scale).exponent - 1)
    return torch.where((amax > 0) & amax.isfinite(), scale, torch.ones_like(scale))


def _scale(tensor: torch.Tensor, quantizer: Any) -> torch.Tensor:
    """Return the quantizer's scale; take note of the largest value, of which later ones depend.

    Raises:
        NotImplementedError: it scales in another way.
    """
    current, delayed, _ = _classes()
    amax = _amax(tensor)
    if isinstance(quantizer, delayed):
        if quantizer.amax.numel():  # what casts weights has none
            quantizer.amax.copy_(torch.maximum(quantizer.amax, amax.view(quantizer.amax.shape)))
        return quantizer.scale.view(())
    if not isinstance(quantizer, current):
        raise NotImplementedError(f'{type(quantizer).__name__} on the CPU')
    if quantizer.with_amax_reduction:
        group = quantizer._canonicalized_amax_reduction_group()
        dist.all_reduce(amax, dist.ReduceOp.MAX, group)
    largest = torch.finfo(torch_dtype(quantizer.dtype)).max
    return scale_of(amax, largest, quantizer.force_pow_2_scales, quantizer.amax_epsilon)


def _amax(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float().abs().amax() if tensor.numel() else torch.zeros(())


def _write(output: Any, codes: torch.Tensor, quantizer: Any) -> None:
    """Put codes into the tensor, by rows and by columns as the quantizer uses them."""
    if not quantizer.rowwise_usage:
        output._data = None
    elif output._data is None:
        output._data = codes
    else:
        output._data.copy_(codes.view(output._data.shape))
    columns = codes.movedim(-1, 0) if codes.dim() else codes
    if not quantizer.columnwise_usage:
        output._transpose = None
    elif output._transpose is None:
        output._transpose = columns.contiguous()
    else:
        output._transpose.copy_(columns.reshape(output._transpose.shape))
    output._transpose_invalid = not quantizer.columnwise_usage


def _new(quantizer: Any, shape: Sequence[int], dtype: torch.dtype) -> Any:
    """Return a Float8 tensor without content: a torch.Tensor, or TE's storage for its own use.

    Raises:
        NotImplementedError: the quantizer makes tensors of another kind.
    """
    current, delayed, tensor = _classes()
    if not isinstance(quantizer, (current, delayed)):
        raise NotImplementedError(f'{type(quantizer).__name__} on the CPU')
    columns = (shape[-1], *shape[:-1]) if len(shape) else ()
    content = {
        'data': torch.empty(shape, dtype=torch.uint8) if quantizer.rowwise_usage else None,
        'data_transpose': (
            torch.empty(columns, dtype=torch.uint8) if quantizer.columnwise_usage else None
        ),
        'fp8_scale_inv': torch.empty(1, dtype=torch.float32),
        'fp8_dtype': quantizer.dtype,
        'quantizer': quantizer,
    }
    if quantizer.internal:
        return tensor.__bases__[0](**content, fake_dtype=dtype)
    return tensor(shape=shape, dtype=dtype, requires_grad=False, **content)


@functools.cache
def _classes() -> tuple[type, type, type]:
    module = importlib.import_module('transformer_engine.pytorch.tensor.float8_tensor')
    return module.Float8CurrentScalingQuantizer, module.Float8Quantizer, module.Float8Tensor
