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
from once import made_once

SOURCE = Path(__file__).with_name('device.cpp')
_INCLUDES = ('include', 'include/torch/csrc/api/include')
_FLAGS = ('-O0', '-w', '-shared', '-fPIC', '-std=c++20')


def build() -> Path:
    """Return the library; skips the test where a GPU is, or no compiler."""
    if torch.cuda.is_available():
        pytest.skip('this machine has a GPU: torch has a CUDA device already')
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    library = Path(sys.prefix) / 'recorded_device' / f'{torch.__version__}-{digest}.so'
    compiler = shutil.which(os.environ.get('CXX', 'g++'))
    if compiler is None and not library.exists():
        pytest.skip('no C++ compiler: install g++, or name one in CXX')

    def compiled(part: Path) -> None:
        torch_folder = Path(torch.__file__).parent
        includes = [f'-I{torch_folder / name}' for name in _INCLUDES]
        linked = [f'-L{torch_folder / "lib"}', '-ltorch_cpu', '-ltorch', '-lc10']
        command = [str(compiler), *_FLAGS, *includes, str(SOURCE), '-o', str(part), *linked]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr[-4000:]

    return made_once(library, compiled)
