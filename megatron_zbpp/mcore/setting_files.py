"""Files and folders that options name: looked at only where they are given."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_zbpp.partitioning.freeze_plans import FreezePlan


def trace_folder(trace_dir: object) -> Path | None:
    """Return the folder of traces; None: nothing is traced."""
    if trace_dir is None:
        return None
    if not isinstance(trace_dir, str | Path) or not str(trace_dir):
        raise ValueError(f'trace_dir is {trace_dir!r}: give the path of a folder, or None')
    path = Path(trace_dir)
    if path.exists() and not path.is_dir():
        raise ValueError(f'trace_dir is {str(path)!r}, which is a file: give the path of a folder')
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    try:
        if int(os.environ.get('RANK', 0)) == 0:  # which writes them
            tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        raise ValueError(
            f'trace_dir is {str(path)!r}, but nothing can be written in {there} '
            f'({error.strerror}): give the path of another folder'
        ) from error
    return path


def freeze_plan(file: object) -> FreezePlan | None:
    """Return the freeze plan, read if a file is given; None: nothing is frozen."""
    if file is None:
        return None
    from megatron_zbpp.ir import files
    from megatron_zbpp.partitioning.freeze_plans import FreezePlan

    if isinstance(file, FreezePlan):
        return file
    if not isinstance(file, str | Path):
        raise ValueError(f'freeze is {file!r}: give the path of what zbpp freeze -o wrote, or None')
    try:
        return files.read(file, FreezePlan.from_json, 'what zbpp freeze -o wrote')
    except ValueError as error:
        raise ValueError(f'{error}: give what zbpp freeze -o wrote') from error
