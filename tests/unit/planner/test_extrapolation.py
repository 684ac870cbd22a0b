"""Orders of few microbatches, their steady state repeated for many."""

from dataclasses import replace
from math import inf

import pytest

from megatron_zbpp import Costs, Placement, build, check, simulate
from megatron_zbpp.planner.problem import Problem
from megatron_zbpp.planner.search import extrapolate

SHAPES = [('zb-h1', Placement.loop(4)), ('zb-h2', Placement.loop(3)), ('zb-v', Placement.v(3))]


def problem(placement: Placement, m: int, limit: float = inf) -> Problem:
    return Problem(placement, m, Costs.uniform(placement), (limit,) * placement.num_ranks)


@pytest.mark.parametrize('more', [1, 2, 17, 30])
@pytest.mark.parametrize(('name', 'placement'), SHAPES)
def test_a_rhythm_goes_on(name, placement, more):
    """As the family itself does it: each further microbatch costs one beat."""
    few = problem(placement, 12)
    many = replace(few, num_microbatches=12 + more)
    family = build(name, placement.num_ranks, 12 + more)
    found = extrapolate(few, few.orders(build(name, placement.num_ranks, 12)), many)
    assert found is not None
    made = many.schedule(found.orders, 'made')
    assert check(made).schedule.num_microbatches == 12 + more
    assert found.value == pytest.approx(simulate(made, many.costs).makespan)
    assert found.value <= simulate(family, many.costs).makespan + 1e-9


def test_nothing_repeats():
    """A rank that does all forwards first has no part that leaves memory as it was."""
    placement = Placement.loop(2)
    few = problem(placement, 2)
    orders = few.orders(build('zb-h1', 2, 2))
    apart = [sorted(order) for order in orders]
    assert extrapolate(few, apart, replace(few, num_microbatches=3)) is None
