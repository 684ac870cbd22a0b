"""The planner: never worse than what has a name, within the limit, above the bound."""

from math import inf
from random import Random

import pytest
from figures import require_kept
from grids import grid
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zbpp import Costs, Pass, Placement, Schedule, build, check, frontier, simulate
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.planner import limits as limits
from megatron_zbpp.planner.actions import ActionSearch
from megatron_zbpp.planner.limits import Budget
from megatron_zbpp.planner.plans import Candidate, named, on_placement, plan, variants
from megatron_zbpp.planner.problem import Problem
from megatron_zbpp.schedules import FAMILIES, family, find, names
from megatron_zbpp.techniques import find as find_technique

times = st.sampled_from([0.5, 1.0, 1.2, 2.0])


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Candidate], int, dict]:
    """Placements whose stages differ, m, and what else `plan` takes."""
    p, v = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    stages = st.lists(times, min_size=p * v, max_size=p * v).map(tuple)
    shares, waiting = (1 / v,) * (p * v), draw(st.sampled_from([1, 0.5, 1.8]))
    rise = max(0.0, waiting - 1) / v
    costs = Costs.of(
        *(draw(stages) for _ in 'FBW'),
        comm=draw(st.sampled_from([0.0, 0.1, 1.0])),
        activation=shares,
        retained=tuple(share * waiting for share in shares),
    )
    placements = [Placement.loop(p, v)] + [Placement.wave(p, v)] * (v > 1)
    limits = st.one_of(
        st.sampled_from([None, 1.0 + rise, 1.5 + rise, 2.0 + rise]),
        st.lists(st.sampled_from([1.0 + rise, 2.0, 3.0]), min_size=p, max_size=p),
    )
    asked = {
        'memory_limit': draw(limits),
        'objective': draw(st.sampled_from(['makespan', 'window'])),
    }
    return [(placement, costs) for placement in placements], draw(st.integers(1, 6)), asked


def split(schedule: Schedule) -> Schedule:
    """With B and W where it has BW: plans have no other."""
    passes = (
        [Pass(kind, p.stage, p.microbatch) for p in order for kind in p.kind]
        for order in schedule.passes
    )
    return Schedule.of(schedule.name, schedule.placement, schedule.num_microbatches, passes)


def best_named(candidates: list[Candidate], m: int, asked: dict) -> float:
    """Value of the best schedule with a name, found without the planner."""
    best = inf
    for placement, costs in candidates:
        for own in (each for each in FAMILIES if not each.moves):
            try:
                schedule = build(own.name, placement.num_ranks, m, num_chunks=placement.num_chunks)
            except ValueError:
                continue  # a family that does not take this shape
            limit = asked['memory_limit']
            limits = limit if isinstance(limit, list) else [limit or inf] * placement.num_ranks
            peaks = peak(split(schedule), costs)
            if schedule.placement.only_route == placement.only_route and all(
                held <= allowed + 1e-9 for held, allowed in zip(peaks, limits, strict=True)
            ):
                timeline = simulate(schedule, costs)
                windows = max(timeline.windows)
                best = min(best, timeline.makespan if asked['objective'] == 'makespan' else windows)
    return best


@settings(max_examples=25)
@given(cases())
def test_plans_keep_their_promises(case):
    candidates, m, asked = case
    made = plan(candidates, m, **asked, seconds=0.1)
    require_kept(made, **{name.removeprefix('memory_'): value for name, value in asked.items()})
    assert made.value <= best_named(candidates, m, asked) + 1e-6
    if made.best_named is not None:
        name, value = made.best_named
        assert name.partition(' v=')[0] in names() and made.value <= value + 1e-9


def half_stages(*of: int) -> list[Candidate]:
    """p = 4, two half-stages a rank on a V, activations of half-stages."""
    return [(Placement.v(4), Costs.of(*((float(time),) * 8 for time in of)))]


@pytest.mark.parametrize(
    ('of', 'limit', 'optimum'),
    [
        ((5, 5, 5), 8, 255),
        pytest.param((5, 5, 5), 6, 265, marks=pytest.mark.full),
        pytest.param((5, 5, 5), 5, 280, marks=pytest.mark.full),
        ((5, 5, 5), 4, 295),
        ((5, 6, 4), 8, 258),
        pytest.param((5, 6, 4), 4, 321, marks=pytest.mark.full),
    ],
)
def test_known_optima(of, limit, optimum):
    made = plan(half_stages(*of), 8, memory_limit=limit, seconds=90)
    assert made.value == optimum == made.lower_bound


@grid(
    sizes=(
        (Placement.v(2), 4, 1.0),
        (Placement.loop(2, 2), 4, 1.5),
        (Placement.loop(3), 6, 2.0),
        (Placement.v(3), 4, 1.0),
    ),
    objective=('makespan', 'window'),
)
def test_small_plans_are_proven(sizes, objective):
    placement, m, limit = sizes
    costs = Costs.uniform(placement, 3, 4, 2, comm=0.5)
    made = plan([(placement, costs)], m, memory_limit=limit, objective=objective, seconds=20)
    assert made.gap == pytest.approx(0, abs=1e-9)


def bubble(made, m: int) -> float:
    """Share of the makespan that the busiest rank idles."""
    placement, costs = made.schedule.placement, made.costs
    work = m * max(
        sum(costs.times[kind][s] for kind in 'FBW' for s in placement.stages(rank))
        for rank in range(placement.num_ranks)
    )
    return 1 - work / made.value


def test_bubbles_of_plans():
    """p = 8, m = 24, at most 8 activations."""
    placements = Placement.v(8), Placement.loop(8, 4)
    candidates = [(at, Costs.uniform(at, 1, 1.2, 0.8)) for at in placements]
    assert bubble(plan(candidates, 24, memory_limit=8, seconds=1), 24) <= 0.035
    on_v = plan(candidates[:1], 24, memory_limit=8, seconds=1)
    assert bubble(on_v, 24) <= 0.0552 and on_v.gap < 1e-9  # no V with two chunks has less
    # p = 8, m = 24, a loop of four chunks, between the memory of gis-h and of zb-interleaved
    placement = Placement.loop(8, 4)
    costs = Costs.uniform(placement, 1, 1.2, 0.8)
    made = plan([(placement, costs)], 24, memory_limit=6.5, seconds=0.2)
    assert bubble(made, 24) < 0.055
    name, value = made.best_named
    assert name == 'gis-h v=4' and value > 1.04 * made.value
    # p = 8, m = 24, the last of 16 stages 25 % heavier, at most 8 activations
    shares = (0.5,) * 15 + (0.625,)
    costs = Costs.of(shares, shares, shares, activation=(0.5,) * 16)
    made = plan([(Placement.v(8), costs)], 24, memory_limit=8, seconds=8)
    assert bubble(made, 24) <= 0.010


@pytest.mark.parametrize('of', [(1, 1, 1), (1, 1.4, 0.6)])
def test_frontier_falls_and_stays_below_v_half_and_v_min(of, monkeypatch):
    monkeypatch.setattr(limits, '_REPORT_EVERY', 0.0)
    monkeypatch.setattr(limits, '_STEPS_PER_SECOND', 5_000)  # they end it, not a busy clock
    placement, m = Placement.v(6), 14
    shares: list[float] = []
    costs = Costs.uniform(placement, *of)
    bounds = [6, 5, 4.5, 4, 3.5, 3, 2.5, 2]
    own = {'costs': of, 'placements': ['v'], 'num_chunks': 2}
    points = frontier(6, m, bounds, seconds=240, progress=shares.append, **own)
    assert shares == sorted(shares) and 0 <= shares[0] < 0.1 and 0.8 < shares[-1] <= 1
    values = [made.value for _, made in points]
    assert [limit for limit, _ in points] == sorted(bounds)
    assert values == sorted(values, reverse=True) and values[0] > values[-1]
    for name in ('v-half', 'v-min'):
        known = build(name, 6, m)
        most, value = max(peak(known, costs)), simulate(known, costs).makespan
        assert all(made.value <= value + 1e-9 for limit, made in points if limit >= most)
        assert any(limit >= most for limit, _ in points)


@pytest.mark.parametrize('p', [3, 6])
def test_same_inputs_same_plan(p, monkeypatch):
    """With the exact solver at p = 3, without at p = 6. Steps end both, and not the clock."""
    monkeypatch.setattr(limits, '_STEPS_PER_SECOND', 10_000)
    placements = Placement.v(p), Placement.loop(p)
    candidates = [(at, Costs.uniform(at, 1, 1.2, 0.8)) for at in placements]
    one, other = (plan(candidates, 10, memory_limit=2, seconds=30, seed=3) for _ in range(2))
    assert one == other and one.repeats and one.gap > 0


def test_limits():
    heavy, light = Placement.v(2), Placement.loop(2)
    candidates = [
        (heavy, Costs.of((1.0,) * 4, (1.0,) * 4, (1.0,) * 4, activation=(1, 2, 3, 4))),
        (light, Costs.of((1.0,) * 2, (1.0,) * 2, (1.0,) * 2, activation=(4, 3))),
    ]
    with pytest.raises(ValueError, match=r'limit 3.5 of rank 0 is below 4.*give at least 4,'):
        plan(candidates, 2, memory_limit=3.5)
    assert plan(candidates, 2, memory_limit=4, seconds=0.1).schedule.placement == light
    # activations that no unit of the planner's divides: four of two are eight
    costs = Costs.of((1.0,) * 4, (1.0,) * 4, (1.0,) * 4, activation=(2.0, 2.0, 3.0, 1.0))
    problem = Problem(Placement.loop(4), 4, costs, (8.0,) * 4)
    assert problem.fits(problem.orders(build('1f1b', 4, 4)))


# ---- The named schedules as the planner sees them: those on its placement, and no others.


LOOP = Placement.loop(2)
COSTS = Costs.uniform(LOOP)


@family('both-ways')
def both_ways(num_ranks: int, num_microbatches: int) -> Schedule:
    """Two pipelines against each other, one after the other."""
    placement = Placement.two_way(num_ranks)
    orders: list[list[Pass]] = [[] for _ in range(num_ranks)]
    for i in range(num_microbatches):
        stages = range(num_ranks)
        for kind, visited in (('F', stages), ('BW', reversed(stages))):
            for stage in visited:
                orders[placement.rank_of(stage, i)].append(Pass(kind, stage, i))
    return Schedule.of('both-ways', placement, num_microbatches, orders)


def test_a_family_on_two_routes_is_not_on_a_loop():
    check(both_ways(2, 4))
    problem = Problem(LOOP, 4, COSTS, (inf, inf))
    assert [s.name for s in variants(find('1f1b'), problem)] == ['1f1b']
    assert not [*variants(find(f'{__name__}:both-ways'), problem)]


@pytest.mark.parametrize('placement', [Placement.v(3), Placement.v(3).reversed()])
def test_families_are_mirrored_where_the_placement_is(placement):
    found = on_placement(find('zb-v'), placement, 4)
    check(found)
    assert found.placement == placement
    problem = Problem(placement, 4, Costs.uniform(placement), (inf,) * 3)
    assert 'zb-v' in {each.name for each in named(problem)}


def test_what_begins_on_no_placement_of_the_question():
    assert on_placement(find('zb-v'), Placement.loop(3, 2), 4) is None
    assert on_placement(find('zb-v'), Placement.loop(3), 4) is None, 'it takes two chunks a rank'
    found = plan([(LOOP, COSTS)], 4, seconds=0.1, starts=[both_ways(2, 4)])
    assert found.schedule.placement == LOOP
    search = ActionSearch([(LOOP, COSTS)], 4, None, 'makespan', ())
    search.start(both_ways(2, 4))
    assert search.best is None
    search = ActionSearch([(LOOP, COSTS)], 4, None, 'makespan', (find_technique('recompute'),))
    search.climb(Budget(1.0), Random(7))
    assert search.best is None
