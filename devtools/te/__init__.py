"""Transformer Engine's own Python modules on a CPU: kernels in torch for its extension in C++.

    from megatron_zbpp.emulation import te

    te.install()  # or with the folder in which the wheel `transformer_engine` was unpacked
    import transformer_engine.pytorch

Nothing of Transformer Engine is edited: its extension `transformer_engine_torch` is replaced by one
whose functions are those of the modules beside this one. They compute in fp32 and round once. What
none of them defines is there by name and raises NotImplementedError where it is called. The bits
are not those of a GPU's kernels; what Transformer Engine does around them is its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from devtools.te import (  # noqa: F401  # their kernels register
    activation,
    gemm,
    multi_tensor,
    norm,
    padding,
    quantization,
    queries,
    softmax,
)
from devtools.te.extension import NAME, Extension, calls
from megatron_zbpp.emulation import cpu as emulated_cpu

__all__ = ['calls', 'fill_uninitialized_memory', 'install', 'installed']


def installed() -> bool:
    """Return whether Transformer Engine's kernels are emulated in this process."""
    return isinstance(sys.modules.get(NAME), Extension)


def install(folder: Path, cpu: bool = True) -> None:
    """Make `import transformer_engine.pytorch` work in this process; again does nothing more.

    `megatron_zbpp.emulation.te.install` finds the folder, calls this, and tells child processes.

    Args:
        folder: that holds the package `transformer_engine`.
        cpu: whether to emulate CUDA on the CPU as well. False: tensors are where they say, as on a
            GPU without Transformer Engine's library; torch computes there what its kernels would.

    Raises:
        RuntimeError: it was imported first, and has looked for a GPU's libraries already.
    """
    if installed():
        return
    if 'transformer_engine' in sys.modules:
        raise RuntimeError(
            'megatron_zbpp.emulation.te.install() comes too late: call it before '
            'transformer_engine is imported'
        )
    os.environ['NVTE_PROJECT_BUILDING'] = '1'  # no look for a GPU's libraries
    os.environ.pop('NVTE_RELEASE_BUILD', None)
    os.environ.setdefault('NVTE_TORCH_COMPILE', '0')
    os.environ.setdefault('NVTE_UNFUSED_FP8_UPDATE', '1')  # delayed scaling by TE's own Python
    if cpu:
        emulated_cpu.install()
    _import_any_triton()
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    sys.modules[NAME] = Extension()
    _load_common(folder / 'transformer_engine' / 'common')


def fill_uninitialized_memory() -> None:
    """Fill with NaN, or the largest integer, what this process allocates and does not initialise.

    Fresh pages are zero on a CPU: what reads memory that nobody wrote looks right there.
    """
    deterministic: Any = torch.utils.deterministic  # a module with properties of its class's
    deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)


def _load_common(folder: Path) -> None:
    """Load the real module `transformer_engine.common`, but for the extension that it loads."""
    name = 'transformer_engine.common'
    spec = importlib.util.spec_from_file_location(
        name, folder / '__init__.py', submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None, folder
    common = importlib.util.module_from_spec(spec)
    sys.modules[name] = common
    spec.loader.exec_module(common)
    vars(common)['load_framework_extension'] = lambda framework: None
    # as the import system does where it loads the module
    vars(importlib.import_module('transformer_engine'))['common'] = common


class _Triton(Loader):
    """Finds every module of triton, whose kernels the CPU never runs."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name.partition('.')[0] == 'triton':
            return importlib.util.spec_from_loader(name, self, is_package=True)
        return None

    def create_module(self, spec):
        made = mock.MagicMock(__version__='3.7.1', __spec__=spec, __path__=[], __name__=spec.name)
        made.jit = lambda function=None, **_: function or (lambda decorated: decorated)
        return made

    def exec_module(self, module):
        pass


def _import_any_triton() -> None:
    """Where `cpu` stands in for triton: as well for all of its modules that are imported."""
    if isinstance(sys.modules.get('triton'), mock.Mock):
        for name in [name for name in sys.modules if name.partition('.')[0] == 'triton']:
            del sys.modules[name]
        sys.meta_path.append(_Triton())
