"""Plans in a process of its own, so that a training run need not wait: request in, schedule out.

    python -m megatron_zbpp.planner.worker schedule.json < request.json

The answer goes to a file, for whatever else the process prints (libraries do) is no schedule.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_zbpp.ir import Placement, strict_json
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.planner.cache import default_folder, planned
from megatron_zbpp.planner.limits import Candidate
from megatron_zbpp.planner.problem import OBJECTIVES

COMMAND = (sys.executable, '-m', 'megatron_zbpp.planner.worker')

_FIELDS = {
    'ranks': strict_json.list_of(strict_json.integer, 'integers'),
    'costs': strict_json.anything,
    'num_microbatches': strict_json.integer,
    'memory_limit': strict_json.number,
    'seconds': strict_json.number,
    'objective': strict_json.one_of(*OBJECTIVES),
}


def request(
    placement: Placement,
    costs: Costs,
    num_microbatches: int,
    memory_limit: float,
    seconds: float,
    objective: str,
) -> str:
    """Return what the worker reads.

    Args:
        placement: to plan on, of one route; its stage 0 is on rank 0.
        costs: of its stages.
        num_microbatches: m.
        memory_limit: most that a rank may hold, in the unit of `costs.amounts`.
        seconds: at most.
        objective: 'makespan' or 'window'.
    """
    inputs: dict[str, Any] = {
        'ranks': placement.only_route,
        'costs': asdict(costs),
        'num_microbatches': num_microbatches,
        'memory_limit': memory_limit,
        'seconds': seconds,
        'objective': objective,
    }
    return json.dumps(inputs)


def read(text: str) -> tuple[Candidate, dict[str, Any]]:
    """Return what to plan on, and the other inputs of `planned`.

    Raises:
        ValueError: `text` is no request; the message names the field.
    """
    inputs: Any = strict_json.loads(text)
    strict_json.require(inputs, _FIELDS)
    candidate = Placement(tuple(inputs.pop('ranks'))), Costs.from_fields(inputs.pop('costs'))
    return candidate, inputs


def main() -> None:
    """Read a request, plan, write the schedule to the file that the only argument names."""
    candidate, inputs = read(sys.stdin.read())
    found, _ = planned(default_folder(), [candidate], seed=0, **inputs)
    Path(sys.argv[1]).write_text(found.schedule.to_json(), encoding='utf-8')


if __name__ == '__main__':
    main()
