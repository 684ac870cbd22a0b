"""Files that tests need and that are made once: by the first process that asks."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

# its hooks are called at each event of Python that can be audited: a twentieth of a training
with mock.patch.object(sys, 'addaudithook', lambda hook: None):
    from filelock import FileLock


def made_once(target: Path, make: Callable[[Path], None]) -> Path:
    """`target`, made by `make` at a path beside it unless it is there; other processes wait.

    `target` appears when it is whole: what an interrupted process left is thrown away.
    """
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f'{target.name}.part')
    with FileLock(target.with_name(f'{target.name}.lock')):
        if not target.exists():
            if part.is_dir():
                shutil.rmtree(part)
            make(part)
            part.rename(target)
    return target


def reason(error: str) -> str:
    """The last line of what a program said of its failure."""
    return (error.strip().splitlines() or ['no reason given'])[-1]
