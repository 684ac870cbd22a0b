"""Packages that Megatron imports for a GPU, where they are not installed."""

from __future__ import annotations

import importlib.util
import sys
import types
import typing
from unittest import mock

import typing_extensions
from torch.utils._triton import has_triton_package

from megatron_zbpp.emulation import apex
from megatron_zbpp.runtime.import_hook import after_import


def install() -> None:
    """Stand in for what is missing here, and mend what Megatron's modules ask for on import."""
    apex.install()
    # megatron.training 0.18, 0.19 on Python 3.11: from typing import override
    if not hasattr(typing, 'override'):
        setattr(typing, 'override', typing_extensions.override)  # noqa: B010
    # megatron.core 0.18, 0.19 and megatron.training 0.16 import triton for kernels that the CPU
    # never runs; torch keeps the answer it gives here and goes on without triton
    if not has_triton_package():
        triton = mock.MagicMock(__version__='3.7.1', __spec__=None)
        sys.modules.update({'triton': triton, 'triton.language': triton.language})
    after_import(
        {
            'megatron.core.transformer.moe.moe_utils': _patch_moe,
            'megatron.core.datasets.utils': _patch_dataset_helpers,
            'megatron.legacy.fused_kernels': _patch_fused_kernels,
        }
    )


def _patch_moe(module: types.ModuleType) -> None:
    # 0.16: without Transformer Engine the name is looked up and not there
    vars(module).setdefault('te_general_gemm', None)


def _patch_dataset_helpers(module: types.ModuleType) -> None:
    # 'make' for helpers_cpp: the wheel has the built file and no Makefile, so that 'make' fails
    # there and ends the program
    if importlib.util.find_spec('megatron.core.datasets.helpers_cpp'):
        vars(module)['compile_helpers'] = lambda: None


def _patch_fused_kernels(module: types.ModuleType) -> None:
    # 0.16 asks nvcc for its version; it builds nothing
    vars(module)['load'] = lambda args: None
