"""Matrix products, single and grouped, in fp32 and rounded once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from devtools.te.extension import kernel, torch_dtype
from devtools.te.quantization import quantized, values


@kernel
def generic_gemm(
    A: Any,
    transa: bool,
    B: Any,
    transb: bool,
    D: torch.Tensor | None,
    quantizer: Any,
    out_dtype: Any,
    bias: torch.Tensor | None,
    bias_type: Any,
    gelu: bool,
    gelu_in: torch.Tensor | None,
    grad: bool,
    workspace: torch.Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: torch.Tensor | None = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> tuple[Any, torch.Tensor | None, None, None]:
    """Return the product, and with `grad` the gradient of the bias.

    cuBLAS is column-major: rows of the result are B's, its columns A's.

    Args:
        D: takes the product, added to what it has with `accumulate`; None: a new tensor.
        bias: added to the product; with `grad`: B is the gradient of the layer's output, and only
            the type of `bias` counts.

    Raises:
        NotImplementedError: a fused GELU, or userbuffers.
    """
    if comm_overlap is not None or gelu:
        raise NotImplementedError('a product fused with GELU or with userbuffers on the CPU')
    out = _product(A, transa, B, transb) * alpha
    bias_grad = None
    if grad and bias is not None:
        bias_grad = _operand(B, transb).sum(0).to(bias.dtype)
    elif bias is not None and bias.numel():
        out = out + bias.float()
    if D is not None:
        return _add(out, D, accumulate), bias_grad, None, None
    shape = list(out.shape) if transb else [*B.size()[:-1], out.shape[-1]]
    default = torch.bfloat16 if _is_float8(A) else A.dtype
    out = out.to(torch_dtype(out_dtype, default)).view(shape)
    return quantized(out, quantizer), bias_grad, None, None


@kernel
def te_general_grouped_gemm(
    A: Sequence[Any],
    transa: bool,
    B: Sequence[Any],
    transb: bool,
    D: Sequence[torch.Tensor],
    D_type: Any,
    m_splits: Sequence[int],
    bias: Sequence[torch.Tensor],
    bias_type: Any,
    single_output: bool,
    pre_gelu_out: Sequence[torch.Tensor],
    grad: bool,
    workspace: Any,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> Sequence[torch.Tensor]:
    """Put the products into `D`, or one below the other into its only tensor.

    With `grad` the gradients of biases go into `bias`, which is returned.
    """
    done = 0
    for k, (a, b) in enumerate(zip(A, B, strict=True)):
        out = _product(a, transa, b, transb)
        if bias and bias[k].numel():
            if grad:
                bias[k].copy_(_operand(b, transb).sum(0))
            else:
                out = out + bias[k].float()
        target = D[0].view(-1, D[0].shape[-1])[done : done + len(out)] if single_output else D[k]
        done += len(out)
        _add(out, target, accumulate)
    return bias


def _product(A: Any, transa: bool, B: Any, transb: bool) -> torch.Tensor:
    a, b = _operand(A, not transa), _operand(B, transb)
    return (b.t() if transb else b) @ (a.t() if transa else a)


def _operand(x: Any, columnwise: bool) -> torch.Tensor:
    """Return an operand's rows in fp32, from the codes that the product reads.

    Raises:
        RuntimeError: of a Float8 tensor they have been dropped.
    """
    if not _is_float8(x):
        return x.reshape(-1, x.shape[-1]).float()
    codes = x._transpose if columnwise else x._data
    if codes is None or (columnwise and x._transpose_invalid):
        raise RuntimeError(f'no codes by {"columns" if columnwise else "rows"} for this product')
    if columnwise:
        return values(codes.reshape(codes.shape[0], -1), x).t()
    return values(codes.reshape(-1, codes.shape[-1]), x)


def _is_float8(x: Any) -> bool:
    return hasattr(x, '_scale_inv')


def _add(out: torch.Tensor, target: torch.Tensor, accumulate: bool) -> torch.Tensor:
    """Put `out` into `target`, on top of what is there with `accumulate`."""
    out = out.view(target.shape)
    return target.copy_(target.float() + out if accumulate else out)
