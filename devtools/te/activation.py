"""Activations, their gradients, and those fused with the gradient of a bias."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from devtools.te.extension import registered
from devtools.te.quantization import quantized

Activation = Callable[[torch.Tensor], torch.Tensor]


def _gated(activation: Activation) -> Activation:
    """Of the first half of the columns, times the second half."""

    def gated(x: torch.Tensor) -> torch.Tensor:
        gate, value = x.chunk(2, -1)
        return activation(gate) * value

    return gated


def _qgelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate='tanh')


def _squared_relu(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


ACTIVATIONS: dict[str, Activation] = {
    'gelu': _gelu,
    'relu': F.relu,
    'silu': F.silu,
    'qgelu': _qgelu,
    'srelu': _squared_relu,
    'geglu': _gated(_gelu),
    'reglu': _gated(F.relu),
    'swiglu': _gated(F.silu),
    'qgeglu': _gated(_qgelu),
    'sreglu': _gated(_squared_relu),
    'glu': _gated(torch.sigmoid),
}


def _forward(activation: Activation, x: torch.Tensor, quantizer: Any = None) -> Any:
    return quantized(activation(x.float()).to(x.dtype), quantizer)


def _backward(
    activation: Activation, grad: torch.Tensor, x: torch.Tensor, quantizer: Any = None
) -> Any:
    return quantized(_derivative(activation, grad, x), quantizer)


def _backward_with_bias(
    activation: Activation, grad: torch.Tensor, x: torch.Tensor, quantizer: Any = None
) -> tuple[torch.Tensor, Any]:
    """Return the gradients of the bias that was added to x, and of x."""
    derivative = _derivative(activation, grad, x)
    dbias = derivative.float().reshape(-1, derivative.shape[-1]).sum(0)
    return dbias.to(derivative.dtype), quantized(derivative, quantizer)


def _derivative(activation: Activation, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        v = x.detach().float().requires_grad_()
        (derivative,) = torch.autograd.grad(activation(v), v, grad.float())
    return derivative.to(x.dtype)


for _name, _activation in ACTIVATIONS.items():
    registered(_name, functools.partial(_forward, _activation))
    registered(f'd{_name}', functools.partial(_backward, _activation))
    registered(f'dbias_d{_name}', functools.partial(_backward_with_bias, _activation))
