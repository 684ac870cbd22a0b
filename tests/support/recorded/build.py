"""Compiles the device, once for each torch and each version of its source."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SOURCE = Path(__file__).with_name('device.cpp')
_INCLUDES = ('include', 'include/torch/csrc/api/include')
_FLAGS = ('-O0', '-w', '-shared', '-fPIC', '-std=c++20')


def build() -> Path:
    """Return the library; skips the test where a GPU is, or no compiler.

    Two processes may build at once: each one's library takes its name when it is whole.
    """
    if torch.cuda.is_available():
        pytest.skip('this machine has a GPU: torch has a CUDA device already')
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    library = Path(sys.prefix) / 'recorded_device' / f'{torch.__version__}-{digest}.so'
    if library.exists():
        return library
    compiler = shutil.which(os.environ.get('CXX', 'g++'))
    if compiler is None:
        pytest.skip('no C++ compiler: install g++, or name one in CXX')
    torch_folder = Path(torch.__file__).parent
    library.parent.mkdir(parents=True, exist_ok=True)
    part = library.with_suffix(f'.{os.getpid()}')
    includes = [f'-I{torch_folder / name}' for name in _INCLUDES]
    linked = [f'-L{torch_folder / "lib"}', '-ltorch_cpu', '-ltorch', '-lc10']
    command = [compiler, *_FLAGS, *includes, str(SOURCE), '-o', str(part), *linked]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    part.rename(library)
    return library
