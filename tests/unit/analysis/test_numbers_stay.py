"""What the analyses say of each schedule changes on purpose only.

`numbers.json` beside this file holds a hash of each answer, for uneven times with messages and
copies. Where one was changed on purpose, write it anew and say why in the commit:

    PYTHONPATH=tests/support python tests/unit/analysis/test_numbers_stay.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from stays import digits

from megatron_zbpp.analysis.critical import critical_path
from megatron_zbpp.analysis.fit_costs import fit, lags, latency
from megatron_zbpp.analysis.gaps import gaps
from megatron_zbpp.analysis.lowering import lower
from megatron_zbpp.analysis.memory import highest, live, peak
from megatron_zbpp.analysis.run_ahead import passes_ahead
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.schedules import FAMILIES, build

FILE = Path(__file__).with_name('numbers.json')
_TIMES = ((2.0, 3.0, 2.0), (3.0, 4.0, 1.0), (2.5, 2.0, 2.5))


def costs_of(schedule: Schedule) -> Costs:
    """Stages of three kinds in turn, and memory that grows with the stage."""
    stages = range(schedule.num_stages)
    forward, backward, weight = zip(*(_TIMES[s % 3] for s in stages), strict=True)
    copies = dict.fromkeys('OLEK', (0.5,) * len(stages))
    held = tuple(1.0 + s / 4 for s in stages)
    return Costs(
        forward,
        backward,
        weight,
        comm=0.25,
        together=0.875,
        message=0.125,
        activation=held,
        retained=tuple(0.75 * each for each in held),
        edges=((0, 1, 0.75),),
        speeds=(1.0, 0.5, *(1.0,) * (schedule.num_ranks - 2)),
        times=copies,
    )


def answers(schedule: Schedule) -> Iterator[object]:
    """Yield what each analysis says."""
    costs = costs_of(schedule)
    timeline = simulate(schedule, costs)
    yield timeline.spans
    yield timeline.makespan, timeline.bubble_makespan, timeline.bubble_window
    yield live(schedule, costs), highest(schedule, costs), peak(schedule, costs)
    yield lower(schedule), passes_ahead(schedule)
    yield [(str(gap), gap.where) for gap in gaps(timeline, 0.5)]
    yield critical_path(timeline, costs)
    yield fit(timeline, 0.25), sorted(lags(timeline).items()), latency(timeline)


def hashes(name: str) -> str:
    """Return a few digits for each answer."""
    schedule = build(name.removesuffix(AS_ONE), 4, 7, together=name.endswith(AS_ONE))
    return ' '.join(map(digits, answers(schedule)))


AS_ONE = ', F & B as one'
NAMES = [family.name for family in FAMILIES]
NAMES += [family.name + AS_ONE for family in FAMILIES if 'together' in family.options]


@pytest.mark.parametrize('name', NAMES)
def test_numbers_stay(name):
    assert hashes(name) == json.loads(FILE.read_text())[name]


if __name__ == '__main__':
    FILE.write_text(json.dumps({name: hashes(name) for name in NAMES}, indent=1) + '\n')
