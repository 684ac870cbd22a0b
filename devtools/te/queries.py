"""Answers to what Transformer Engine asks of a GPU and its libraries."""

from __future__ import annotations

import inspect
import sys
from typing import Any

from devtools.te.extension import kernel, named


@kernel
def get_num_cublas_streams() -> int:
    return 4


@kernel
def get_cublasLt_version() -> int:
    return 120900


@kernel
def get_cudnn_version() -> int:
    return 91400


@kernel
def get_stream_priority_range() -> tuple[int, int]:
    return 0, 0


@kernel
def device_supports_multicast(*_: Any) -> bool:
    return False


@kernel
def ubuf_built_with_mpi() -> bool:
    return False


@kernel
def get_fused_attn_backend(*_: Any, **__: Any) -> Any:
    """No fused attention: TE's own unfused one runs. Newer releases want to know why."""
    none = named('NVTE_Fused_Attn_Backend').NVTE_No_Backend
    asking = sys.modules['transformer_engine.pytorch.attention.dot_product_attention.utils']
    wants_reason = 'reject_message = tex.get_fused_attn_backend' in inspect.getsource(asking)
    return (none, 'the CPU has none') if wants_reason else none
