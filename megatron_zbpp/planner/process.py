"""A planner in a process of its own, as the program that trains beside it sees it."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Sequence

from megatron_zbpp.planner import worker


class PlannerProcess:
    """Works from now on; neither its answer nor its end is waited for.

    Args:
        request: as `request` of the worker's module makes it.
        seconds: after which it is late.
        command: of the worker; None: that plans schedules. The file of its answer is added.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, request: str, seconds: float, command: Sequence[str] | None = None) -> None:
        self._deadline = time.monotonic() + seconds
        self._answer = tempfile.NamedTemporaryFile('r', suffix='.json')  # noqa: SIM115
        self._process = subprocess.Popen(
            (*(command or worker.COMMAND), self._answer.name),
            stdin=subprocess.PIPE,
            stdout=2,  # what it prints is no answer
            text=True,
        )
        assert self._process.stdin is not None
        with self._process.stdin as stdin:
            stdin.write(request)

    @property
    def runs(self) -> bool:
        """True until it has ended."""
        return self._process.poll() is None

    @property
    def late(self) -> bool:
        """True once it should have ended."""
        return time.monotonic() >= self._deadline

    def wait(self) -> None:
        """Return when it has ended."""
        self._process.wait()

    def answer(self) -> str | None:
        """Return what it wrote, once it has ended; None: it failed."""
        with self._answer as file:
            return None if self._process.returncode else file.read()

    def end(self) -> None:
        """Kill it; there is no answer."""
        self._process.kill()
        self._process.wait()
