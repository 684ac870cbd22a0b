"""Around one process of one job: leaves the row, or what went wrong, in files.

`train` and `stage` are run so: `python -m benchmarks.gpt.train JOB FOLDER`.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpt.jobs import Job

Row = dict[str, Any]
Progress = Callable[[str], None]
ROW, PROGRESS = 'row.json', 'progress'
_NOTICED = 60  # seconds, within which a supervisor that lives has read the error


def error_file(folder: Path, rank: int) -> Path:
    """Where the process of that rank says why it failed."""
    return folder / f'{rank}.error'


def work(measure: Callable[[Job, Progress], Row]) -> None:
    """Do what the command line says; end the process.

    Args:
        measure: the job to a row, on every rank; that of rank 0 is kept.
    """
    job, folder = Job(**json.loads(sys.argv[1])), Path(sys.argv[2])
    rank = int(os.environ['RANK'])

    def progress(text: str) -> None:
        if rank == 0:
            (folder / PROGRESS).write_text(text)

    try:
        row = measure(job, progress)
        if rank == 0:
            (folder / ROW).write_text(json.dumps(row))
    except Exception as error:
        traceback.print_exc()
        sys.stderr.flush()
        part = error_file(folder, rank).with_suffix('.part')
        part.write_text(_in_words(error))
        part.rename(error_file(folder, rank))
        # The supervisor ends this process once it has told the others why: if its connections
        # closed before, another rank could be the first to fail, by that.
        time.sleep(_NOTICED)
        os._exit(1)  # in order would wait for ranks that wait for this one


def _in_words(error: Exception) -> str:
    text = str(error).strip().partition('\n')[0]
    if type(error).__name__ == 'OutOfMemoryError':
        return f'out of memory: {text}'
    return f'{type(error).__name__}: {text}'
