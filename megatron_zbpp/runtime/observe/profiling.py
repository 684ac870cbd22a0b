"""Passes by name in profiles: `PP:3F1.2` is F of stage 3, microbatch 1, slice 2."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from megatron_zbpp.ir import Pass
from megatron_zbpp.runtime.compat import profiler_enabled

_NOTHING = nullcontext()  # shared: between profiles, a pass costs no more than asking


def profiled(p: Pass) -> AbstractContextManager:
    """Return a range around `p` while a profiler of torch's is on.

    That is torch.profiler, or emit_nvtx, whose ranges nsys shows: Megatron's --profile runs one.
    """
    if profiler_enabled():
        return torch.profiler.record_function(name(p))
    return _NOTHING


def name(p: Pass) -> str:
    """Return the name of the range."""
    return f'PP:{p}'
