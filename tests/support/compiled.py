"""Compiles before all tests what Megatron would in a backward: longer than a test may take."""

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from once import made_once

FOLDER = Path(sys.prefix) / 'torch_extensions'
DONE = FOLDER / 'compiled'


def prepare() -> None:
    """Whatever starts from here finds the libraries in this environment's own folder."""
    os.environ['TORCH_EXTENSIONS_DIR'] = str(FOLDER)
    if not (importlib.util.find_spec('megatron') and shutil.which('g++') and shutil.which('ninja')):
        return
    for lock in FOLDER.glob('*/lock'):
        if time.time() - lock.stat().st_mtime > 600:  # of a process that is gone
            lock.unlink(missing_ok=True)
    made_once(DONE, _compile)


def load() -> None:
    """This process and its forks have the libraries, and take no lock later."""
    random = importlib.import_module('megatron.core.tensor_parallel.random')
    getattr(random, '_get_share_storage', int)()  # from 0.19 on


def _compile(done: Path) -> None:
    subprocess.run([sys.executable, __file__], check=True, capture_output=True)
    done.touch()


if __name__ == '__main__':
    load()
