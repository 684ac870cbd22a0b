"""apex's kernel for fused gradient accumulation: W's product is added to `main_grad` at once."""

from __future__ import annotations

import sys
import types
from importlib.machinery import ModuleSpec

import torch

NAME = 'fused_weight_gradient_mlp_cuda'  # which Megatron's own linear layers import


def wgrad_gemm_accum_fp32(
    input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor
) -> None:
    """Add the gradient of a weight, computed in fp32, to `main_grad`."""
    with torch.no_grad():
        main_grad.add_(grad_output.t().float() @ input.float())


def wgrad_gemm_accum_fp16(
    input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor
) -> None:
    """Accumulate as in fp32 into a gradient of 16 bits, rounded once."""
    with torch.no_grad():
        main_grad.copy_(main_grad.float() + grad_output.t().float() @ input.float())


def install() -> None:
    """Make the kernel importable where it is not built."""
    module = types.ModuleType(NAME, __doc__)
    module.__spec__ = ModuleSpec(NAME, None)
    for kernel in (wgrad_gemm_accum_fp32, wgrad_gemm_accum_fp16):
        setattr(module, kernel.__name__, kernel)
    sys.modules[NAME] = module
