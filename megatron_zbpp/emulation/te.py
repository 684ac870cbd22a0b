"""Loads the emulated kernels of Transformer Engine: `devtools/te` of a checkout, in no wheel."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

_CHECKOUT = Path(__file__).parents[2]
_TOOLS = 'devtools'
FOLDER = 'MEGATRON_ZBPP_EMULATED_TE'  # in the environment: tells child processes
NOT_INSTALLED = 'it needs Transformer Engine, which is not installed'
_NO_CHECKOUT = (
    "on a CPU it needs Transformer Engine's emulated kernels, which are in no wheel: run from a "
    'checkout of megatron_zbpp'
)


def missing() -> str:
    """Return why its modules cannot run on a CPU here; empty: they can."""
    if not _has_tools():
        return _NO_CHECKOUT
    return '' if find() else NOT_INSTALLED


def installed() -> bool:
    """Return True if this process emulates Transformer Engine's kernels."""
    tools = sys.modules.get(f'{_TOOLS}.te')
    return tools is not None and tools.installed()


def find() -> Path | None:
    """Return the folder of sys.path with the package `transformer_engine`; None: there is none."""
    spec = importlib.util.find_spec('transformer_engine')
    folders = None if spec is None else spec.submodule_search_locations
    return Path(folders[0]).parent if folders else None


def install(folder: str | Path | None = None, cpu: bool = True) -> None:
    """Make `import transformer_engine.pytorch` work in this process, and in those it starts.

    Args:
        folder: that holds the package `transformer_engine`; default: where `find` finds it.
        cpu: see `devtools.te.install`.

    Raises:
        ModuleNotFoundError: it is nowhere, or this is no checkout.
        RuntimeError: it was imported first, and has looked for a GPU's libraries already.
    """
    if not _has_tools():
        raise ModuleNotFoundError(f'transformer_engine: {_NO_CHECKOUT}', name=_TOOLS)
    folder = folder or find()
    if folder is None or not (Path(folder) / 'transformer_engine').is_dir():
        raise ModuleNotFoundError(
            f'no transformer_engine in {folder or "sys.path"}: pip install --no-deps '
            'transformer-engine, or put its unpacked wheel on PYTHONPATH',
            name='transformer_engine',
        )
    _load_tools().install(Path(folder), cpu)
    os.environ[FOLDER] = str(folder)


def _has_tools() -> bool:
    return (_CHECKOUT / _TOOLS / 'te').is_dir()


def _load_tools() -> ModuleType:
    """Import `devtools.te` of this checkout, wherever the process was started."""
    folder = _CHECKOUT / _TOOLS
    if _TOOLS not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            _TOOLS, folder / '__init__.py', submodule_search_locations=[str(folder)]
        )
        assert spec is not None and spec.loader is not None, folder
        sys.modules[_TOOLS] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[_TOOLS])
    file = sys.modules[_TOOLS].__file__
    if file is None or Path(file).parent.resolve() != folder.resolve():
        raise ImportError(
            f"{_TOOLS} is imported from {file}, and is not this checkout's {folder}: start without "
            'that package'
        )
    return importlib.import_module(f'{_TOOLS}.te')
