"""Names of stock trainings: a hash of everything that their outcome depends on.

The outcome depends on the job, the libraries, the machine and the harness that asks, not on the
package that is tested. Of the package the key has the emulation of CUDA alone.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from paths import ROOT

HARNESS = ('tests/support', 'tests/megatron', 'examples/gpt')  # folders of its modules
EMULATION = ('megatron_zbpp/emulation', 'devtools')
LIBRARIES = ('torch', 'megatron-core', 'numpy', 'transformer-engine', 'einops', 'transformers')
# of variables that change kernels, threads, their order, or choices of Megatron's
PREFIXES = ('ATEN_', 'BLIS_', 'CUBLAS_', 'CUDA_', 'DNNL_', 'GLOO_', 'GOMP_', 'KMP_', 'MEGATRON_')
PREFIXES += ('MKL_', 'NCCL_', 'NVTE_', 'OMP_', 'ONEDNN_', 'OPENBLAS_', 'PYTORCH_', 'RANKS_')
PREFIXES += ('TORCH', 'XLA_')
FOLDER = 'MEGATRON_ZBPP_STOCK'  # variable of the cache, which changes no outcome
_OURS = ('--pipeline-', '--enable-optimizer-post-validation', '--optimizer-post-validation')
_OURS += ('--enable-zero-bubble', '--enable-zb', '--enable-exactly', '--zero-bubble')
_MEGATRONS = ('--pipeline-model-parallel-', '--pipeline-schedule=megatron')
_PROCESSOR = ('model name', 'flags', 'Features', 'CPU part')


class UnknownError(ValueError):
    """An argument that no key can be made of: its text does not say all that it means."""


def by_megatron(words: Iterable[str]) -> bool:
    """Return whether a launch line has no flag of ours; the example names the schedule."""
    line = [*words]
    named = [at + 1 for at, word in enumerate(line[:-1]) if word == '--pipeline-schedule']
    return all(line[at] == 'megatron' for at in named) and not any(
        word.startswith(_OURS) and not word.startswith(_MEGATRONS)
        for at, word in enumerate(line)
        if at + 1 not in named
    )


def key_of(
    size: int, prepared: object, function: Callable, args: tuple, places: Mapping[str, str]
) -> str:
    """Return the hash of a training on `size` ranks of a pool that was `prepared` with arguments.

    `places` has the meaning of each path among the arguments, by its text. Raises UnknownError
    where an argument has no text that says all of it.
    """
    modules = {'stock'}
    parts = [_text(each, places, modules) for each in (size, prepared, function, args)]
    names = sorted(name for name in os.environ if name.startswith(PREFIXES) and name != FOLDER)
    parts += [f'{name}={os.environ[name]}' for name in names]
    parts += [*_machine(), _sources(harness(frozenset(modules)))]
    return hashlib.sha256('\0'.join(parts).encode()).hexdigest()


def contents(place: Path) -> str:
    """Return the hash of a data set's files, or of a folder of weights.

    Files that trainings leave beside them, such as indices of samples, do not count.
    """
    files = [Path(f'{place}{suffix}') for suffix in ('.bin', '.idx')]
    if not all(path.exists() for path in files):  # a folder beside them has such indices
        files = [path for path in place.glob('*') if path.suffix in ('.safetensors', '.json')]
    if not files:
        raise UnknownError(f'{place} is no data')
    return _sources(files)


def _text(value: Any, places: Mapping[str, str], modules: set[str]) -> str:
    """Text that says all of a value; modules of the harness that it needs are added."""
    within = functools.partial(_text, places=places, modules=modules)
    if isinstance(value, str | Path) and str(value) in places:
        return places[str(value)]
    if isinstance(value, Path):
        return _known_path(value, modules)
    if isinstance(value, str):
        if '/' in value:
            raise UnknownError(value)
        if _module(value):  # as of `--spec`
            modules.add(value)
        return repr(value)
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if is_dataclass(value) and not isinstance(value, type):
        values = [getattr(value, field.name) for field in fields(value)]
        return f'{within(type(value))}{within(values)}'
    if isinstance(value, list | tuple):
        return f'[{",".join(map(within, value))}]'
    if isinstance(value, Mapping):
        return within(sorted(value.items()))
    name = getattr(value, '__qualname__', '<')
    if '<' not in name and _module(getattr(value, '__module__', '')):
        modules.add(value.__module__)
        return f'{value.__module__}.{name}'
    raise UnknownError(repr(value))


def _known_path(path: Path, modules: set[str]) -> str:
    """Text of a script of the harness, or of packages by their versions."""
    if path.is_relative_to(sys.prefix):
        versions = sorted(each.name for each in path.glob('*.dist-info'))
        return f'{path.relative_to(sys.prefix)}{versions}'
    if path.suffix == '.py' and _module(path.stem) == path:
        modules.add(path.stem)
        return path.stem
    raise UnknownError(str(path))


@functools.cache
def _machine() -> tuple[str, ...]:
    parts = [platform.python_version(), platform.machine(), *platform.libc_ver()]
    parts += [f'{name}=={version(name)}' for name in LIBRARIES]
    parts += [str(torch.version.git_version), torch.__config__.show()]
    parts += [torch.backends.cpu.get_cpu_capability(), *_processor()]
    spec = importlib.util.find_spec('megatron.core')
    for place in spec.submodule_search_locations or () if spec else ():
        # a patched one has the same version; the training loop lies beside
        parts.append(_sources(Path(place).parent.rglob('*.py')))
    parts.append(_sources(path for each in EMULATION for path in (ROOT / each).rglob('*.py')))
    return tuple(parts)


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return 'none'


def _processor() -> list[str]:
    """Its name and instructions, by which libraries choose kernels."""
    info = Path('/proc/cpuinfo')
    if not info.exists():
        return [platform.processor()]
    lines = info.read_text().splitlines()
    return sorted({line.strip() for line in lines if line.startswith(_PROCESSOR)})


def _module(name: str) -> Path | None:
    """File of a module of the harness; None: it is none."""
    if not name.isidentifier():
        return None
    found = (ROOT / folder / f'{name}.py' for folder in HARNESS)
    return next((path for path in found if path.exists()), None)


@functools.cache
def harness(modules: frozenset[str]) -> tuple[Path, ...]:
    """Return sources of modules of the tests or the example, and of all that they import there."""
    found: dict[str, Path] = {}
    waiting = [*modules]
    while waiting:
        name = waiting.pop()
        if name in found or not (path := _module(name)):
            continue
        found[name] = path
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                waiting += [each.name for each in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                waiting.append(node.module)
    return tuple(found.values())


def _sources(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(paths):
        content = path.read_bytes()
        digest.update(f'{path.name}\0{len(content)}\0'.encode() + content)
    return digest.hexdigest()
