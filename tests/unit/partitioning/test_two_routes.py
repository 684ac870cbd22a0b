"""What counts on each stage being on one rank says so, and answers nothing for half the passes."""

from __future__ import annotations

import pytest
from two_ways import two_ways

from megatron_zbpp.analysis.run_ahead import passes_ahead
from megatron_zbpp.guests.auto_plan import fit_layers_to_run
from megatron_zbpp.ir import F, Pass, Placement
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.partitioning.fitting import measured_devices
from megatron_zbpp.partitioning.layers import Layer, Layers
from megatron_zbpp.partitioning.plans import partition
from megatron_zbpp.partitioning.space import Partition, parameters_held
from megatron_zbpp.schedules.construct.building_blocks import orders
from megatron_zbpp.schedules.construct.draft import Draft

TWO, COSTS = Placement.two_way(2), Costs.of((1.0, 1.0), (1.0, 1.0), (1.0, 2.0))
LAYERS = Layers((Layer('t', parameters=1.0),) * 2)
ASKED = {
    'passes ahead of an optimizer step': lambda: passes_ahead(two_ways(2, 4)),
    'speeds of ranks': lambda: measured_devices(['t', 't'], TWO, COSTS),
    'a better partition': lambda: fit_layers_to_run('t|t', two_ways(2, 4), COSTS, 'makespan'),
    'parameters of ranks': lambda: parameters_held(LAYERS, Partition(TWO, (1, 1), (0, 1))),
    'orders of slots': lambda: orders({Pass(F, 0, 0): 0, Pass(F, 0, 1): 1}, TWO),
    'a draft': lambda: Draft(TWO, 4),
}


def test_two_routes_are_refused_by_name():
    with pytest.raises(
        ValueError, match='chimera runs both ways, and a partition is for one: take'
    ):
        partition(Layers((Layer('t'),) * 4), 2, 4, schedules=['chimera'])
    with pytest.raises(ValueError, match='paci is asynchronous, and a partition is for one iter'):
        partition(Layers((Layer('t'),) * 4), 2, 4, schedules=['paci'])


@pytest.mark.parametrize('asked', ASKED.values(), ids=ASKED.keys())
def test_two_routes_are_refused(asked):
    with pytest.raises(ValueError, match=r"'two-way' has two routes, and .* take a schedule with"):
        asked()
