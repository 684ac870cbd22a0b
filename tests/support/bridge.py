"""Megatron-Bridge beside the Megatron-Core that is here: unpacked wheels, in a folder of their own.

It wants a Megatron-Core of its own and much that its trainings on a CPU never call (readers of
other data, quantization, resilience): what it imports of that and nobody calls is stood in for.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import wheels
from supported import absent

VERSION = '0.6.2'
_PACKAGES = (
    f'megatron-bridge=={VERSION}',
    'transformers==5.12.1',
    'huggingface-hub<2',
    'tokenizers<=0.23.0',
    'safetensors',
    'regex',
    'pyyaml',
    'omegaconf==2.3.1',
    'antlr4-python3-runtime==4.9.3',
    'hydra-core<1.4',
    'httpx',
    'httpcore',
    'h11',
    'anyio',
    'idna',
    'certifi',
    'six',
)
_UNUSED = (
    'accelerate',
    'datasets',
    'diffusers',
    'megatron.energon',
    'modelopt',
    'nvidia_resiliency_ext',
    'torch.utils.tensorboard',
)


def folder() -> Path:
    """The folder that holds `megatron.bridge` and what it needs; downloaded once.

    Skips the test where it cannot be had.
    """
    if sys.version_info < (3, 12):
        absent(f'Megatron-Bridge {VERSION} is for later releases, which need Python 3.12')
    found = Path(sys.prefix) / 'megatron_bridge' / VERSION
    if not found.exists():
        part = found.with_name(f'{VERSION}.{os.getpid()}')
        command = [sys.executable, '-m', 'pip', 'install', '--quiet', '--no-deps', '--retries', '1']
        wanted = ['--no-compile', '--target', part, *_PACKAGES]
        done = subprocess.run([*command, *wanted], capture_output=True, text=True, timeout=280)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ['no reason given'])[-1]
            pytest.skip(f'megatron-bridge {VERSION} cannot be installed: {last}')
        part.rename(found)
    return found


class _Any(ModuleType):
    """A module that has every name: a class of its own where it is written as one."""

    __version__ = '0'

    def __getattr__(self, name: str) -> Any:
        if name.startswith('__'):
            raise AttributeError(name)
        value = type(name, (), {}) if name[0].isupper() else mock.MagicMock(return_value=None)
        setattr(self, name, value)
        return value


class _Unused(Loader):
    """Finds every module of the packages that nobody calls."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if any(name == each or name.startswith(f'{each}.') for each in _UNUSED):
            return importlib.util.spec_from_loader(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Any(spec.name)

    def exec_module(self, module):
        pass


def install(bridge: Path, transformer_engine: Path) -> None:
    """Makes Bridge run in this process, on Transformer Engine's modules with emulated kernels."""
    wheels.install(transformer_engine)
    sys.path.append(str(bridge))
    importlib.import_module('megatron.core.dist_checkpointing')  # it looks for packages, too
    sys.meta_path.insert(0, _Unused())
