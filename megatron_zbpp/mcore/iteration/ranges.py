"""Passes by name where Megatron's own ranges are, too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from megatron.core import utils

from megatron_zbpp.ir import Pass
from megatron_zbpp.mcore import compat
from megatron_zbpp.runtime.compat import profiler_enabled
from megatron_zbpp.runtime.observe import profiling


def profiled(p: Pass) -> AbstractContextManager:
    """Make a range as `runtime.observe.profiling.profiled` does, and under nsys.

    There, a program may have asked for Megatron's ranges by `configure_nvtx_profiling`, without
    torch's emit_nvtx.
    """
    if compat.nvtx_enabled() and not profiler_enabled():
        return _nvtx(profiling.name(p))
    return profiling.profiled(p)


@contextmanager
def _nvtx(name: str) -> Iterator[None]:
    utils.nvtx_range_push(name)
    yield
    utils.nvtx_range_pop(name)  # not after an error: ranges inside are open, and it would hide that
