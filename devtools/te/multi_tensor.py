"""Kernels of optimizers, each over lists of tensors.

All take the size of a kernel's chunk, which means nothing here; a tensor of one integer, in which
some report what is not finite; and lists of tensors, of which those with one index belong together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from devtools.te.extension import kernel, torch_dtype
from devtools.te.quantization import encode, scale_of

Lists = Sequence[Sequence[torch.Tensor]]


@kernel
def multi_tensor_scale(
    chunk_size: int, noop: torch.Tensor, lists: Lists, scale: float | torch.Tensor
) -> None:
    """Put the first list, time `scale`, into the second; report what is not finite."""
    for source, target in zip(*lists, strict=True):
        if not source.isfinite().all():
            noop.fill_(1)
        target.copy_(source.float() * scale)


@kernel
def multi_tensor_scale_tensor(
    chunk_size: int, noop: torch.Tensor, lists: Lists, scale: torch.Tensor
) -> None:
    """As `multi_tensor_scale`, with a scale that is on the device."""
    multi_tensor_scale(chunk_size, noop, lists, scale.float())


@kernel
def multi_tensor_l2norm(
    chunk_size: int, noop: torch.Tensor, lists: Lists, per_tensor: bool | None = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of all tensors, and with `per_tensor` that of each."""
    return _norms([tensor.float() for tensor in lists[0]], per_tensor)


@kernel
def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop: torch.Tensor,
    lists: Lists,
    inv_scale: torch.Tensor,
    per_tensor: bool | None = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `multi_tensor_l2norm`, of tensors times `inv_scale`."""
    return _norms([tensor.float() * inv_scale for tensor in lists[0]], per_tensor)


def _norms(
    tensors: Sequence[torch.Tensor], per_tensor: bool | None
) -> tuple[torch.Tensor, torch.Tensor]:
    squares = [tensor.square().sum() for tensor in tensors]
    total = torch.stack(squares).sum().sqrt().view(1)
    return total, torch.stack(squares).sqrt() if per_tensor else torch.empty(0)


@kernel
def multi_tensor_adam(
    chunk_size: int,
    noop: torch.Tensor,
    lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Step parameters.

    Args:
        lists: gradients, parameters, both moments, and parameters in fp32 where those are not.
        mode: 0: decay is added to gradients; 1: to steps, as in AdamW.
    """
    for grad, parameter, *rest in zip(*lists, strict=True):
        first, second, main = rest if len(rest) > 2 else (*rest, parameter)
        moments = grad.float(), main.float(), first, second
        settings = lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay
        stepped = _adam(*moments, *settings)
        main.copy_(stepped)
        parameter.copy_(stepped)


@kernel
def multi_tensor_adam_param_remainder(
    chunk_size: int, noop: torch.Tensor, lists: Lists, *settings: Any
) -> None:
    """Step as `multi_tensor_adam` does, where parameters are the upper half of those in fp32.

    That half is rounded; the last list has the lower one.
    """
    for grad, parameter, first, second, remainder in zip(*lists, strict=True):
        # rounding up is where the lower half, with a sign, is negative
        upper = parameter.view(torch.int16).int() - (remainder < 0).int()
        main = ((upper << 16) | (remainder.int() & 0xFFFF)).view(torch.float32)
        bits = _adam(grad.float(), main, first, second, *settings).view(torch.int32)
        lower = (bits << 16) >> 16
        remainder.copy_(lower)
        parameter.view(torch.int16).copy_((bits >> 16) + (lower < 0).int())


@kernel
def multi_tensor_adam_fp8(
    chunk_size: int, noop: torch.Tensor, lists: Lists, *settings: Any
) -> None:
    """Step as `multi_tensor_adam` does, where parameters are FP8 codes.

    Their scales, largest values and inverse scales are in three more lists; the last setting is the
    codes' type.
    """
    *others, dtype = settings
    for grad, codes, first, second, main, scale, amax, scale_inv in zip(*lists, strict=True):
        main.copy_(_adam(grad.float(), main.float(), first, second, *others))
        codes.copy_(encode(main, scale, torch_dtype(dtype)))
        amax.copy_(torch.maximum(amax, main.abs().amax().view(amax.shape)))
        scale_inv.copy_(scale.reciprocal())


@kernel
def multi_tensor_adam_capturable(
    chunk_size: int,
    noop: torch.Tensor,
    lists: Lists,
    lr: torch.Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: torch.Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: torch.Tensor,
) -> None:
    """Step as `multi_tensor_adam` does, with numbers that are on the device.

    Gradients are scaled in their place, and nothing is done where something is not finite.
    """
    if noop.item() == 1:
        return
    for grad in lists[0]:
        grad.copy_(grad.float() * inv_scale)
    settings = (beta1, beta2, epsilon, step.item(), mode, bias_correction, weight_decay)
    multi_tensor_adam(chunk_size, noop, lists, lr.item(), *settings)


@kernel
def multi_tensor_adam_capturable_master(
    chunk_size: int, noop: torch.Tensor, lists: Lists, *settings: Any
) -> None:
    """As `multi_tensor_adam_capturable`, with parameters in fp32."""
    multi_tensor_adam_capturable(chunk_size, noop, lists, *settings)


def _adam(
    grad: torch.Tensor,
    parameter: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> torch.Tensor:
    """Return the stepped parameter in fp32; the moments are stepped in their place."""
    if mode == 0:
        grad = grad + weight_decay * parameter
    mean = first.float() * beta1 + (1 - beta1) * grad
    square = second.float() * beta2 + (1 - beta2) * grad * grad
    first.copy_(mean)
    second.copy_(square)
    if bias_correction:
        mean, square = mean / (1 - beta1**step), square / (1 - beta2**step)
    update = mean / (square.sqrt() + epsilon)
    if mode == 1:
        update = update + weight_decay * parameter
    return parameter - lr * update


@kernel
def multi_tensor_sgd(
    chunk_size: int,
    noop: torch.Tensor,
    lists: Lists,
    weight_decay: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
) -> None:
    """Step parameters where `noop` is not set.

    Args:
        lists: gradients, parameters, momenta, and copies of parameters in another type, if any.
        first_run: momenta have no content yet.
        scale: of gradients.
    """
    if noop.item():
        return
    for grad, parameter, velocity, *copies in zip(*lists, strict=True):
        update, value = grad.float() * scale, parameter.float()
        if weight_decay and not wd_after_momentum:
            update = update + weight_decay * value
        if momentum:
            slowed = velocity.float() * momentum + (1 - dampening) * update
            velocity.copy_(update if first_run else slowed)
            update = update + momentum * velocity.float() if nesterov else velocity.float()
        if weight_decay and wd_after_momentum:
            update = update + weight_decay * value
        stepped = value - lr * update
        for target in (parameter, *copies):
            target.copy_(stepped)


@kernel
def multi_tensor_compute_scale_and_scale_inv(
    chunk_size: int,
    noop: torch.Tensor,
    lists: Lists,
    max_fp8: float,
    force_pow_2_scales: bool,
    epsilon: float,
) -> None:
    """Put scales and their inverses, by the largest values, into the second and third list."""
    for amax, scale, scale_inv in zip(*lists, strict=True):
        scale.copy_(scale_of(amax, max_fp8, force_pow_2_scales, epsilon))
        scale_inv.copy_(scale.reciprocal())
