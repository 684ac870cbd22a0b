"""Runs commands that start processes of their own: past their time, all of them end."""

import contextlib
import os
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence

import psutil


def run(
    command: Sequence[object],
    *,
    timeout: float = 200,
    env: Mapping[str, str] | None = None,
    **options: object,
) -> subprocess.CompletedProcess[str]:
    """What `command`, words of any type, printed, and its exit code.

    Output goes to files: of a pipe the end would come when the last process that holds it is gone.
    The timeout is for a machine ten times as slow as an idle one; `env` has variables beside those
    of this process (one thread a process, if nothing else is said), and `options` are Popen's.
    Raises AssertionError with the output so far where it did not end in time.
    """
    command = list(map(str, command))
    with tempfile.TemporaryFile('w+') as out, tempfile.TemporaryFile('w+') as errors:
        process = psutil.Popen(
            command,
            env={**os.environ, 'OMP_NUM_THREADS': '1', **(env or {})},
            start_new_session=True,
            **{'stdin': subprocess.DEVNULL, 'stdout': out, 'stderr': errors, **options},
        )
        late = False
        try:
            process.wait(timeout)
        except psutil.TimeoutExpired:
            late = True
        finally:
            if process.poll() is None:
                _kill(process)
        printed = []
        for file in (out, errors):
            file.seek(0)
            printed.append(file.read())
    ended = subprocess.CompletedProcess(command, process.returncode, *printed)
    assert not late, f'{shlex.join(command)}: not done after {timeout} s\n' + '\n'.join(printed)
    return ended


def _kill(process: psutil.Popen) -> None:
    """Ends `process` and all below it: torchrun's ranks have sessions of their own."""
    below = process.children(recursive=True)
    os.killpg(process.pid, signal.SIGKILL)
    for each in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()
    psutil.wait_procs(below, timeout=5)
