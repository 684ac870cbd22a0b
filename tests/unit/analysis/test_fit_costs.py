"""Costs as they were measured, by stage and kind of pass."""

import re
from dataclasses import replace

import oracle
import pytest
from grids import grid
from hypothesis import given
from hypothesis import strategies as st
from orders import by_hand

from megatron_zbpp import Costs, Placement, build, simulate
from megatron_zbpp.analysis.fit_costs import fit, full_rank, measured_costs, middle
from megatron_zbpp.ir import chain
from megatron_zbpp.ir.timeline import Timeline
from megatron_zbpp.schedules import names
from megatron_zbpp.techniques.recompute import recompute
from megatron_zbpp.techniques.slices.graph import sliced
from megatron_zbpp.techniques.updates.versions import updating
from megatron_zbpp.techniques.vocabulary.graph import split_vocabulary

V = Costs.of((1.0, 1.1, 1.2, 1.4), (1.5, 1.6, 1.7, 2.0), (0.7, 0.8, 0.9, 1.0))


def times(costs: Costs) -> tuple[tuple[float, ...], ...]:
    return costs.times['F'], costs.times['B'], costs.times['W']


@grid(schedule=('zb-v', 'dualpipe-v'), m=(2, 4, 9))
def test_as_they_were(schedule, m):
    """Whether a stage ran some of its backwards whole, and others not."""
    found = fit(simulate(build(schedule, 2, m), V), comm=0.25)
    assert times(found) == tuple(map(pytest.approx, times(V)))
    assert (found.comm, found.together) == (0.25, 1)


def test_whole_backwards():
    """Where no W runs by itself nobody knows its share."""
    schedule = build('1f1b', 2, 4)
    costs = Costs.of((1.0, 1.5), (2.0, 2.5), (3.0, 3.5))
    assert times(fit(simulate(schedule, costs))) == ((1, 1.5), (5, 6), (0, 0))
    # they are no longer B's: those without W tell
    schedule = by_hand(2, 2, '0F0 0F1 0BW0 0B1 0W1', '1F0 1BW0 1F1 1BW1')
    costs = Costs.of((1.0, 1.0), (2.0, 2.5), (0.5, 0.75))
    assert times(fit(simulate(schedule, costs))) == ((1, 1), (2, 3.25), (0.5, 0))


@pytest.mark.parametrize('share', [0.6, 0.85, 1.2])
def test_what_cells_take(share):
    """Apart from what their passes take alone, which it leaves as it is."""
    costs = replace(V, together=share)
    found = fit(simulate(build('dualpipe-v', 2, 8, together=True), costs))
    assert times(found) == tuple(map(pytest.approx, times(V)))
    assert found.together == pytest.approx(share)
    assert middle([found, V, found]).together == pytest.approx(share)


def test_cells_whose_backwards_leave_w():
    """And the last backward whole: what is left of it is B."""
    schedule = by_hand(2, 2, '0F0 (0F1&0B0) 0W0 0BW1', '1F0 1B0 1W0 1F1 1BW1')
    found = fit(simulate(schedule, Costs.of((1.0, 1.0), (2.0, 2.0), (0.5, 0.5), together=0.5)))
    assert times(found) == ((1, 1), (2, 2), (0.5, 0.5)) and found.together == 0.5


@pytest.mark.parametrize('whole', [False, True])
def test_slices_are_told_of_the_whole_sequence(whole):
    """Seq1F1B, p = m = n = 2: simulated anew, an iteration takes what it took."""
    orders = (
        '0F0 0F0.1 0F1 0BW0.1 0F1.1 0BW0 0BW1.1 0BW1',
        '1F0 1F0.1 1BW0.1 1F1 1BW0 1F1.1 1BW1.1 1BW1',
    )
    if not whole:
        orders = [re.sub(r'(\d)BW(\S+)', r'\1B\2 \1W\2', order) for order in orders]
    schedule = by_hand(2, 2, *orders, graph=sliced(chain(2), 2))
    costs = Costs.of((1.0, 1.5), (2.0, 2.5), (0.5, 0.75))
    measured = simulate(schedule, costs)
    found = fit(measured)
    assert times(found) == (((1, 1.5), (2.5, 3.25), (0, 0)) if whole else times(costs))
    assert simulate(schedule, found).makespan == measured.makespan
    assert found.parts['F'] == ((0.5, 0.5), (0.5, 0.5))


def test_all_kinds_that_compute():
    """Also behind the stages; and of several measurements the medians."""
    graph = updating(recompute(split_vocabulary(chain(2), 2), [0]))
    schedule = by_hand(2, 1, '0F0 2S0 2T0 0R0 0BW0 0U0', '1F0 3S0 1BW0 3T0 1U0', graph=graph)
    kinds = {
        'F': (1.0, 1.5),
        'B': (2.0, 2.5),
        'W': (0.0, 0.0),
        'S': (0.0, 0.0, 0.5, 0.75),
        'T': (0.0, 0.0, 0.25, 0.5),
        'R': (0.5, 1.5, 0.0, 0.0),  # the second as its F: it did not run again
        'U': (2.0, 1.0, 0.0, 0.0),
    }
    measured = simulate(schedule, Costs(kinds))
    found = fit(measured)
    assert found.times == kinds
    assert simulate(schedule, found).spans == measured.spans
    twice = replace(found, times={kind: tuple(2 * t for t in own) for kind, own in kinds.items()})
    assert middle([found, found, twice]).times == kinds


def test_what_copies_take_is_not_known():
    schedule = build('po-h', 2, 4)
    costs = Costs.uniform(schedule.placement).with_times(O=(1.0,) * 4, L=(1.0,) * 4)
    assert fit(simulate(schedule, costs)).times.keys() == {*'FBW'}
    held = dict.fromkeys(range(4), (8.0, 4.0))
    assert full_rank(Placement.two_way(4), held) == full_rank(Placement.loop(4), held) == 8
    assert full_rank(Placement.v(2), held) == 16


SIZES = (1.0, 1.0, 4.0, 1.0, 1.0, 1.0, 2.5, 0.5)  # of which the median is 1


@pytest.mark.parametrize('name', ['1f1b', 'zb-h1', 'zb-v', 'zb-interleaved'])
def test_the_mean_of_microbatches_of_any_length(name):
    """What a rank does in all is as it was: neither a long sequence nor a short one is lost."""
    schedule = build(name, 2, len(SIZES))
    costs = V if schedule.num_stages == 4 else Costs.of((1.0, 1.5), (2.0, 2.5), (0.5, 0.75))
    measured = Timeline(schedule, oracle.spans(schedule, costs, SIZES))
    found = fit(measured)
    mean = sum(SIZES) / len(SIZES)
    wholes = zip(costs.times['B'], costs.times['W'], strict=True)
    both = [mean * (b + w) for b, w in wholes]
    assert found.times['F'] == pytest.approx([mean * each for each in costs.times['F']])
    assert list(map(sum, zip(found.times['B'], found.times['W'], strict=True))) == pytest.approx(
        both
    )
    simulated = simulate(schedule, found)
    for rank in range(2):
        assert simulated.busy(rank) == pytest.approx(measured.busy(rank))


def test_an_iteration_that_was_disturbed_does_not_count():
    """As by another job on the machine: one pass of it took ten times as long."""
    schedule = build('zb-v', 2, 4)
    quiet = simulate(schedule, V)
    disturbed = Timeline(schedule, oracle.spans(schedule, V, (1.0, 10.0, 1.0, 1.0)))
    found = middle([fit(quiet), fit(disturbed), fit(quiet)])
    assert times(found) == tuple(map(pytest.approx, times(V)))
    schedule = build('1f1b', 1, 3)
    assert measured_costs(simulate(schedule, Costs.uniform(schedule.placement))).comm == 0


@pytest.mark.parametrize('name', ['1f1b', 'zb-v'])
def test_each_pair_of_ranks_has_its_latency(name):
    """Some message of each is waited for; with them an iteration is simulated as it was."""
    schedule = build(name, 4, 8)
    costs = Costs.uniform(schedule.placement, comm=0.25)
    slow = [(*pair, time) for a, b, time in ((0, 1, 0.1), (2, 3, 0.7)) for pair in ((a, b), (b, a))]
    timeline = simulate(schedule, replace(costs, edges=tuple(slow)))
    found = measured_costs(timeline)
    assert {(a, b): time for a, b, time in found.edges} == pytest.approx(
        {(a, b): time for a, b, time in slow} | {(1, 2): 0.25, (2, 1): 0.25}
    )
    assert simulate(schedule, found).makespan == pytest.approx(timeline.makespan)
    assert simulate(schedule, replace(found, edges=())).makespan < timeline.makespan - 0.3
    assert middle([found, found, replace(found, edges=())]).edges == found.edges


@pytest.mark.parametrize('name', names())
@pytest.mark.parametrize('sizes', [(2, 4), (2, 3), (4, 8), (4, 4)], ids=str)
def test_an_iteration_is_simulated_as_it_was(name, sizes):
    """Of every family, of every form: no pair of ranks is slow because they were busy."""
    schedule = build(name, *sizes)
    timeline = simulate(schedule, Costs.uniform(schedule.placement, comm=0.25))
    found = measured_costs(timeline)
    assert (found.comm, found.edges, found.hops) == (0.25, (), ())
    assert simulate(schedule, found).makespan == timeline.makespan


def of_hops(costs: Costs, placement: Placement) -> list[float]:
    """Return how long messages take between each stage and the next one."""
    ranks = placement.only_route
    return [costs.edge(*ranks[s : s + 2], (s, s + 1)) for s in range(len(ranks) - 1)]


@pytest.mark.parametrize('ahead', [0.0, 0.05, -0.05])
@pytest.mark.parametrize('name', ['zb-v', 'interleaved', 'dualpipe-v'])
def test_hops_of_a_pair_have_latencies_of_their_own(name, ahead):
    """As bytes of messages have: with them an iteration is simulated as it was."""
    schedule = build(name, 4, 8)
    hops = [(more, more) for more in (0.1, 0.0, 0.3, 0.0, 0.6, 0.7, 0.5)]
    costs = replace(Costs.uniform(schedule.placement, comm=0.25), hops=hops)
    timeline = simulate(schedule, costs)
    spans = [
        [(start + r % 2 * ahead, end + r % 2 * ahead) for start, end in own]
        for r, own in enumerate(timeline.spans)
    ]
    found = measured_costs(Timeline(schedule, tuple(map(tuple, spans))))
    assert of_hops(found, schedule.placement) == pytest.approx(of_hops(costs, schedule.placement))
    assert simulate(schedule, found).makespan == pytest.approx(timeline.makespan)
    assert simulate(schedule, replace(found, hops=())).makespan < timeline.makespan - 1
    assert middle([found, found, replace(found, hops=())]).hops == found.hops
    assert not middle([found, *[replace(found, hops=())] * 2]).hops


@given(st.sampled_from(['zb-v', 'interleaved', 'zb-interleaved', 'v-half']), st.randoms())
def test_hops_are_exact_or_unknown(name, random):
    """What was never waited for takes what the fastest hop of its ranks takes."""
    schedule = build(name, 3, 6)
    n, ranks = schedule.num_stages, schedule.placement.only_route
    times = [[random.choice((1.0, 1.5, 2.0)) for _ in range(n)] for _ in 'FBW']
    hops = [(more, more) for more in (random.choice((0.0, 0.25, 1.0)) for _ in range(n - 1))]
    costs = Costs.of(*times, comm=0.5, hops=hops)
    found = measured_costs(simulate(schedule, costs))
    both = zip(of_hops(costs, schedule.placement), of_hops(found, schedule.placement), strict=True)
    for s, (own, measured) in enumerate(both):
        usual = found.edge(*ranks[s : s + 2])
        assert any(measured == pytest.approx(known) for known in (usual, max(usual, own)))
