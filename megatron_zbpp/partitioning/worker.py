"""Partitions in a process of its own, beside a training: request in, a plan's file out.

It is called as `planner.worker` is: `plan.json < request.json`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from megatron_zbpp.ir import Placement, strict_json
from megatron_zbpp.partitioning.devices import Devices
from megatron_zbpp.partitioning.layers import MTP, Layers
from megatron_zbpp.partitioning.plans import partition
from megatron_zbpp.planner.problem import OBJECTIVES

COMMAND = (sys.executable, '-m', 'megatron_zbpp.partitioning.worker')


def _limit(value: object) -> str | None:
    """Check a number, or null."""
    return None if value is None or strict_json.number(value) is None else 'a number, or null'


_FIELDS = {
    'layers': strict_json.string,
    'devices': strict_json.string,
    'num_microbatches': strict_json.integer,
    'memory_limit': _limit,
    'seconds': strict_json.number,
    'objective': strict_json.one_of(*OBJECTIVES),
}


def request(
    layers: Layers,
    devices: Devices,
    num_microbatches: int,
    memory_limit: float | None,
    seconds: float,
    objective: str,
) -> str:
    """Return what the worker reads.

    Args:
        layers: of the model.
        devices: in the order of the ranks, which stays.
        num_microbatches: m.
        memory_limit: most that a rank may hold, in the unit of the layers' `activation`; None: any.
        seconds: at most.
        objective: 'makespan' or 'window'.
    """
    inputs: dict[str, Any] = {
        'layers': layers.to_json(),
        'devices': devices.to_json(),
        'num_microbatches': num_microbatches,
        'memory_limit': memory_limit,
        'seconds': seconds,
        'objective': objective,
    }
    return json.dumps(inputs)


def answer(text: str) -> str:
    """Return the plan of a request, as a file.

    Multi-token prediction is kept to loops: Megatron finds its copy of the embedding there only.

    Raises:
        ValueError: `text` is no request; the message names the field. Or nothing fits.
    """
    inputs: Any = strict_json.loads(text)
    strict_json.require(inputs, _FIELDS)
    layers = Layers.from_json(inputs.pop('layers'))
    devices = Devices.from_json(inputs.pop('devices'))
    ahead = any(layer.kind == MTP for layer in layers)
    found = partition(
        layers,
        devices,
        placements=[Placement.loop(len(devices))] if ahead else None,
        keep_order=True,
        **inputs,
    )
    return json.dumps(found.facts(), indent=1)


def main() -> None:
    """Read a request, partition, write the plan to the file that the only argument names."""
    Path(sys.argv[1]).write_text(answer(sys.stdin.read()), encoding='utf-8')


if __name__ == '__main__':
    main()
