"""Layer norms: forward and backward."""

from __future__ import annotations

from typing import Any

import torch

from devtools.te.extension import kernel, torch_dtype
from devtools.te.quantization import quantized


@kernel
def layernorm_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    out: torch.Tensor | None,
    quantizer: Any,
    out_dtype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Return the norm of each row, the rows' means and their reciprocal deviations in fp32."""
    v = x.float()
    mean = v.mean(-1)
    rsigma = (v.var(-1, unbiased=False) + eps).rsqrt()
    normed = (v - mean[..., None]) * rsigma[..., None]
    y = normed * _gamma(weight, zero_centered_gamma) + bias.float()
    return _put(y.to(torch_dtype(out_dtype, x.dtype)), out, quantizer), mean, rsigma


@kernel
def rmsnorm_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None,
    quantizer: Any,
    out_dtype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Any, None, torch.Tensor]:
    """Return the norm of each row, and the reciprocals of the rows' root mean squares in fp32."""
    v = x.float()
    rsigma = (v.square().mean(-1) + eps).rsqrt()
    y = v * rsigma[..., None] * _gamma(weight, zero_centered_gamma)
    return _put(y.to(torch_dtype(out_dtype, x.dtype)), out, quantizer), None, rsigma


@kernel
def layernorm_bwd(
    dz: torch.Tensor,
    x: torch.Tensor,
    mu: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of x, gamma and beta."""
    rsigma = rsigma.view(*x.shape[:-1], 1)
    hat = (x.float() - mu.view(*x.shape[:-1], 1)) * rsigma
    grad = dz.float()
    dgamma, dbeta = _rows_summed(grad * hat), _rows_summed(grad)
    grad = grad * _gamma(gamma, zero_centered_gamma)
    centred = grad - grad.mean(-1, keepdim=True) - hat * (grad * hat).mean(-1, keepdim=True)
    return (rsigma * centred).to(x.dtype), dgamma.to(gamma.dtype), dbeta.to(gamma.dtype)


@kernel
def rmsnorm_bwd(
    dz: torch.Tensor,
    x: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of x and gamma."""
    rsigma = rsigma.view(*x.shape[:-1], 1)
    hat = x.float() * rsigma
    grad = dz.float()
    dgamma = _rows_summed(grad * hat)
    grad = grad * _gamma(gamma, zero_centered_gamma)
    dx = rsigma * (grad - hat * (grad * hat).mean(-1, keepdim=True))
    return dx.to(x.dtype), dgamma.to(gamma.dtype)


def _gamma(weight: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    return weight.float() + (1 if zero_centered else 0)


def _rows_summed(value: torch.Tensor) -> torch.Tensor:
    return value.reshape(-1, value.shape[-1]).sum(0)


def _put(value: torch.Tensor, out: torch.Tensor | None, quantizer: Any) -> Any:
    """`value`, by `quantizer` where there is one, in `out` where there is one."""
    if out is None:
        return quantized(value, quantizer)
    if quantizer is not None:
        return quantizer.update_quantized(value, out)
    return out.copy_(value.view(out.shape))
