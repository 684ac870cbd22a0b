"""Searches in a process of its own, beside the training: a pickled call in, a text out.

    python -m megatron_zbpp.guests.background_search answer < call

`multiprocessing` is not used: it would import the training's script again.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from megatron_zbpp.ir import Placement, Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.partitioning.layers import MTP, Devices, Layers
from megatron_zbpp.partitioning.plans import partition
from megatron_zbpp.planner.cache import default_folder, planned
from megatron_zbpp.planner.plans import plan
from megatron_zbpp.techniques.vocabulary.place import has_shards, hosts_like

COMMAND = (sys.executable, '-m', 'megatron_zbpp.guests.background_search')
_LATE = 10  # times the seconds to search in, after which the search is taken for stuck


def schedule_text(
    start: Schedule, costs: Costs, memory_limit: float, seconds: float, objective: str
) -> str:
    """Return a planned schedule of the passes and placement of `start`, as JSON: see `plan`.

    Stage 0 is on rank 0.
    """
    candidates, m = [(start.placement, costs)], start.num_microbatches
    inputs: dict[str, Any] = {'memory_limit': memory_limit, 'seconds': seconds, 'seed': 0}
    inputs |= {'objective': objective}
    if has_shards(start):
        starts = [start, *hosts_like(start, costs, memory_limit)]
        found = plan(candidates, m, **inputs, starts=starts, graph=lambda _: start.graph)
    else:
        found, _ = planned(default_folder(), candidates, m, **inputs)
    return found.schedule.to_json()


def partition_text(
    layers: Layers,
    devices: Devices,
    num_microbatches: int,
    memory_limit: float | None,
    seconds: float,
    objective: str,
) -> str:
    """Return a plan's file with the best partition; device r stays rank r: see `partition`.

    Multi-token prediction is kept to loops: Megatron finds its copy of the embedding there only.
    """
    ahead = any(layer.kind == MTP for layer in layers)
    found = partition(
        layers,
        devices,
        num_microbatches,
        placements=[Placement.loop(len(devices))] if ahead else None,
        memory_limit=memory_limit,
        objective=objective,
        keep_order=True,
        seconds=seconds,
    )
    return json.dumps(found.facts(layers, devices), indent=1)


class BackgroundSearch:
    """A search that runs from now on; neither its answer nor its end is waited for."""

    def __init__(
        self, name: str, search: partial[str], seconds: float, say: Callable[[str], None]
    ) -> None:
        self._name, self._say, self._limit = name, say, _LATE * seconds
        self._deadline = time.monotonic() + self._limit
        self._answer = tempfile.NamedTemporaryFile('r', suffix='.json')  # noqa: SIM115
        command = (*COMMAND, self._answer.name)
        # what it prints is no answer
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2)
        assert self._process.stdin is not None
        with self._process.stdin as stdin:
            stdin.write(pickle.dumps(search))

    @classmethod
    def start(
        cls, name: str, search: partial[str], seconds: float, say: Callable[[str], None]
    ) -> BackgroundSearch | None:
        """Start a search; log why and return None if no process can be started."""
        try:
            return cls(name, search, seconds, say)
        except OSError as error:
            say(f'auto: {name} cannot be started ({error})')
            return None

    def ended(self) -> bool:
        """Return True once the process has ended; kill a late process, and tell the user."""
        if self._process.poll() is not None:
            return True
        if time.monotonic() < self._deadline:
            return False
        self.end()
        self._say(f'auto: {self._name} did not answer within {self._limit:.0f} s and was ended')
        return True

    def answer(self) -> str | None:
        """Return the text of the process, once it has ended; None: it failed, or was killed."""
        with self._answer as file:
            return None if self._process.returncode else file.read()

    def end(self) -> None:
        """Kill the process, without an answer."""
        self._process.kill()
        self._process.wait()


def main() -> None:
    """Read a search, run it, and write its answer to the file that the only argument names."""
    search = pickle.load(sys.stdin.buffer)
    Path(sys.argv[1]).write_text(search(), encoding='utf-8')


if __name__ == '__main__':
    main()
