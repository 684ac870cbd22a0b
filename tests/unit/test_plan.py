"""The planner: never worse than what has a name, within the limit, above the bound."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zbpp.ir import Placement
from megatron_zbpp.planning.check import check
from megatron_zbpp.planning.costs import Costs
from megatron_zbpp.planning.memory import peak
from megatron_zbpp.planning.plan import plan
from megatron_zbpp.planning.simulate import simulate
from megatron_zbpp.schedules import names

times = st.sampled_from([0.5, 1.0, 1.2, 2.0])


@settings(deadline=None, max_examples=15)
@given(
    st.integers(2, 4),
    st.integers(1, 6),
    st.tuples(times, times, times),
    st.sampled_from(['makespan', 'window']),
    st.sampled_from([None, 1.0, 2.0]),
)
def test_plans_keep_their_promises(p, m, of, objective, limit):
    candidates = [
        (placement, Costs.uniform(placement, *of, comm=0.1))
        for placement in (Placement.v(p), Placement.loop(p))
    ]
    made = plan(candidates, m, memory_limit=limit, objective=objective, seconds=0.4)
    check(made.schedule, memory_limit=limit, costs=made.costs)
    timeline = simulate(made.schedule, made.costs)
    found = timeline.makespan if objective == 'makespan' else max(timeline.windows)
    assert made.value == pytest.approx(found)
    assert made.lower_bound <= made.value + 1e-6
    if made.best_named is not None:
        name, value = made.best_named
        assert name in names() and made.value <= value + 1e-9
    if limit is not None:
        assert max(peak(made.schedule, made.costs)) <= limit + 1e-9


@pytest.mark.parametrize(
    ('of', 'limit', 'optimum'),
    [((5, 5, 5), 8, 255), ((5, 5, 5), 6, 265), ((5, 6, 4), 8, 258)],
)
def test_known_optima(of, limit, optimum):
    """p = 4, m = 8, two half-stages a rank on a V; limits in half-stage activations."""
    placement = Placement.v(4)
    costs = Costs(*(tuple(map(float, (time,) * 8)) for time in of))
    made = plan([(placement, costs)], 8, memory_limit=limit, seconds=3)
    assert made.value == optimum


def test_same_inputs_same_plan():
    placement = Placement.v(3)
    costs = Costs.uniform(placement, 1, 1.2, 0.8)
    one, other = (plan([(placement, costs)], 5, seconds=0.5, seed=3) for _ in range(2))
    assert one == other and one.repeats


def test_what_cannot_be_planned():
    placement = Placement.v(2)
    costs = Costs.uniform(placement)
    with pytest.raises(ValueError, match='is below 1, one microbatch: give at least 1'):
        plan([(placement, costs)], 2, memory_limit=0.5)
    with pytest.raises(ValueError, match='use makespan or window'):
        plan([(placement, costs)], 2, objective='speed')
    with pytest.raises(ValueError, match='allow at least one'):
        plan([], 2)
