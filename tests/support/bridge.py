"""Megatron-Bridge beside the Megatron-Core that is here: unpacked wheels, in a folder of their own.

It wants a Megatron-Core of its own and much that its trainings on a CPU never call (readers of
other data, quantization, resilience): what it imports of that and nobody calls is stood in for.
"""

import importlib.util
import json
import sys
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import wheels
from once import made_once
from supported import absent

VERSION = '0.6.2'
_REQUIREMENTS = Path(__file__).with_suffix('.txt')  # of what its trainings here call
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
    """The folder that holds `megatron.bridge`, downloaded once; skips where it cannot be had."""
    if sys.version_info < (3, 12):
        absent(f'Megatron-Bridge {VERSION} is for later releases, which need Python 3.12')

    def download(part: Path) -> None:
        wanted = [f'megatron-bridge=={VERSION}', '--requirement', _REQUIREMENTS]
        options = '--quiet --no-deps --retries 1 --no-compile --target'.split()
        wheels.pip(f'megatron-bridge {VERSION}', 'install', *options, part, *wanted)

    return made_once(Path(sys.prefix) / 'megatron_bridge' / VERSION, download)


class _Any(ModuleType):
    """A module that has every name: a class of its own where it is written as one."""

    __version__ = '0'

    def __getattr__(self, name: str) -> Any:
        if name.startswith('__'):
            raise AttributeError(name)
        value = type(name, (), {}) if name[0].isupper() else mock.MagicMock(return_value=None)
        setattr(self, name, value)
        return value


class StandIns(Loader):
    """Finds every module of the packages that nobody calls."""

    def __init__(self, packages: Sequence[str], version: str = '0') -> None:
        self.packages, self.version = packages, version

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if any(name == each or name.startswith(f'{each}.') for each in self.packages):
            return importlib.util.spec_from_loader(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = _Any(spec.name)
        module.__version__ = self.version
        return module

    def exec_module(self, module):
        pass


def install(bridge: Path, transformer_engine: Path) -> None:
    """Makes Bridge run in this process, on Transformer Engine's modules with emulated kernels."""
    wheels.install(transformer_engine)
    sys.path.append(str(bridge))
    importlib.import_module('megatron.core.dist_checkpointing')  # it looks for packages, too
    sys.meta_path.insert(0, StandIns(_UNUSED))


def config(**changes: Any) -> SimpleNamespace:
    """What our check reads of a recipe's configuration: of two pipeline ranks and four layers."""
    text = Path(__file__).with_suffix('.json').read_text()
    made = json.loads(text, object_hook=lambda fields: SimpleNamespace(**fields))
    vars(made.model).update(changes)
    return made
