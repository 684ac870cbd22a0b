"""What slices of a sequence cost: sizes that balance, times and memory of each, plans with them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rivals import of_two_chunks

from megatron_zbpp.analysis.checker import check
from megatron_zbpp.analysis.fit_costs import fit, middle
from megatron_zbpp.analysis.memory import live, peak
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import Placement, Schedule, Task, chain
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.planner import budget
from megatron_zbpp.planner.plans import plan
from megatron_zbpp.schedules import build
from megatron_zbpp.techniques.offload.graph import offload
from megatron_zbpp.techniques.recompute.graph import recompute
from megatron_zbpp.techniques.slices.balance import TILE, Attention, balanced, in_parts
from megatron_zbpp.techniques.slices.graph import Slicing, sized, sliced
from megatron_zbpp.techniques.slices.place import in_slices
from megatron_zbpp.techniques.slices.sizes import sizes_of

LONG = 2**20  # tokens: rounding to one of them does not show


def by_flops(placement: Placement, share: float) -> Costs:
    """Attention has `share` of F, 2.5 times that of B, and nothing of W; linear layers the rest."""
    return Costs.uniform(placement, 1.0, 1 + 1.5 * share, 1 - share)


# Of the specification, for Seq1F1B: p, m, n and attention's share of F; then for equal slices, for
# those that balance F, and F, B and W: the share of the makespan that the busiest rank idles, and
# the peak.
TABLE = {
    (8, 16, 4, 0.1): ((0.166, 2.75), (0.107, 2.79), (0.104, 2.80)),
    (8, 16, 4, 0.3): ((0.271, 2.75), (0.116, 2.89), (0.111, 2.90)),
    (8, 16, 4, 0.6): ((0.379, 2.75), (0.115, 3.03), (0.112, 3.05)),
    (8, 16, 8, 0.1): ((0.134, 1.88), (0.062, 1.92), (0.058, 1.93)),
    (8, 16, 8, 0.3): ((0.256, 1.88), (0.072, 2.02), (0.067, 2.04)),
    (8, 16, 8, 0.6): ((0.378, 1.88), (0.071, 2.16), (0.070, 2.18)),
    (8, 4, 16, 0.3): ((0.235, 1.44), (0.112, 1.56), (0.105, 1.57)),
    (8, 4, 16, 0.8): ((0.375, 1.44), (0.106, 1.82), (0.105, 1.84)),
}


@pytest.mark.parametrize('instance', TABLE, ids=str)
def test_bubbles_of_the_table(instance):
    p, m, n, share = instance
    made = build('seq1f1b', p, m, num_slices=n)
    attention, costs = Attention(share), by_flops(made.placement, share)
    nothing = (0.0,) * p
    ways = (
        (LONG // n,) * n,
        balanced(n, LONG, attention, costs.with_times(B=nothing, W=nothing), multiple=1),
        balanced(n, LONG, attention, costs, multiple=1),
    )
    for sizes, (bubble, held) in zip(ways, TABLE[instance], strict=True):
        own = in_parts(costs, sizes, attention)
        assert simulate(made, own).bubble_makespan == pytest.approx(bubble, abs=0.001)
        assert max(peak(made, own)) == pytest.approx(held, abs=0.0051)


@pytest.mark.parametrize(('share', 'without', 'with_w'), [(0.1, 0.308, 0.175), (0.6, 0.312, 0.283)])
def test_attention_leaves_less_to_w(share, without, with_w):
    """p 8 m 4 n 4, balanced: what splitting backwards gains."""
    for name, bubble in (('seq1f1b', without), ('seq1f1b-zb', with_w)):
        made = build(name, 8, 4, num_slices=4)
        attention, costs = Attention(share), by_flops(made.placement, share)
        own = in_parts(costs, balanced(4, LONG, attention, costs, multiple=1), attention)
        assert simulate(made, own).bubble_makespan == pytest.approx(bubble, abs=0.001)


SHARES = st.floats(0, 1)


@given(st.integers(1, 16), st.integers(40, 400), SHARES, st.sampled_from((1, 8, TILE)))
def test_balanced_sizes(n, tiles, share, multiple):
    """They descend, in multiples, and take the same time but for rounding."""
    length, costs = tiles * multiple, by_flops(Placement.loop(2), share)
    attention = Attention(share)
    sizes = balanced(n, length, attention, costs, multiple)
    assert sum(sizes) == length and len(sizes) == n and min(sizes) > 0
    assert all(size % multiple == 0 for size in sizes[:-1])
    own, graph = in_parts(costs, sizes, attention), Slicing(n)(2)
    times = [sum(own.duration(graph, kind, 0, 0, part) for kind in 'FBW') for part in range(n)]
    # a tile at the end of a sequence takes up to twice the mean of its tokens
    assert max(times) - min(times) <= 2 * 2 * sum(times) / tiles + 1e-9
    assert sum(times) == pytest.approx(sum(costs.times[kind][0] for kind in 'FBW'))


def test_too_many_slices_to_balance():
    costs = by_flops(Placement.loop(2), 0.5)
    assert balanced(4, 512, Attention(0.0), costs) == (128,) * 4
    with pytest.raises(ValueError, match='slices: 5 are too many for balanced slices of 512'):
        balanced(5, 512, Attention(0.0), costs)


def test_what_each_slice_takes():
    """By hand: F 8, of which attention 1/4 and 1/8 for a pass; slices of 3/4 and 1/4."""
    whole = Costs.of([8], [11], [6], amounts={'input': [2], 'kv': [3]})
    costs = in_parts(whole, (3, 1), Attention(0.25, 0.125))
    graph = Slicing(2)(1)
    # 8 = 1 fixed + 5 of tokens + 2 of pairs; 11 = 1 + 5 + 5; 6 = 1 + 5
    fixed, tokens, pairs = 1, (3.75, 1.25), (9 / 16, 7 / 16)
    for part in range(2):
        found = [costs.duration(graph, kind, 0, 0, part) for kind in ('F', 'B', 'W', 'BW')]
        forward, backward = (fixed + tokens[part] + k * pairs[part] for k in (2, 5))
        weight = fixed + tokens[part]
        assert found == pytest.approx([forward, backward, weight, backward + weight])
        assert costs.share('input', Task('F', 0, part), 2) == (0.75, 0.25)[part]
        assert costs.share('kv', Task('F', 0, part), 2) == 0.5
    assert costs.duration(chain(1), 'F', 0, 0) == 8, 'whole sequences'
    moved = costs.with_times(R=[4], O=[4], S=[0, 8])
    assert moved.share('S', Task('S', 1, 1), 2) == 0.25, 'behind the stages'
    techniques = offload(recompute(graph, [0]), [0])
    assert moved.duration(techniques, 'O', 0, 0) == 3
    assert moved.duration(techniques, 'R', 0, 0, 1) == costs.duration(graph, 'F', 0, 0, 1) / 2
    told = in_parts(whole.with_parts(F=[(0.9, 0.1)]), (3, 1), Attention(0.25))
    assert told.duration(graph, 'F', 0, 0) == pytest.approx(7.2), 'measured shares win'


@pytest.mark.parametrize(
    ('make', 'says'),
    [
        (lambda: Attention(1.2), 'attention takes 1.2 of F'),
        (lambda: Attention(0.8, 0.3), 'attention takes 0.8 of F beside 0.3 that is fixed'),
        (lambda: two(F=[(0.5, 0.5), (0.2, 0.3, 0.5)]), 'parts are of 2 and 3 slices'),
        (lambda: two(F=[(0.5, 0.5)]), 'parts of F has 1 entries: .* each of 2 stages'),
        (lambda: two(F=[(0.5, -0.5), (1, 1)]), 'parts of F = -0.5 is not a cost'),
        (lambda: two(X=[(0.5, 0.5)] * 2), 'parts of X, which has no time nor amount'),
        (
            lambda: simulate(in_slices('1f1b', 2, 2, 3), two(F=[(0.5, 0.5)] * 2)),
            'costs have parts of 2 slices, and the schedule has 3: ',
        ),
        (lambda: sliced(chain(2), 2, (3, 4, 5)), 'sizes 3, 4, 5 of 2 slices: give the tokens'),
        (
            lambda: Costs.from_json('{"F":[1],"B":[1],"W":[1],"parts":{"F":[1]}}'),
            "'parts': .* is not an object of a list a",
        ),
    ],
)
def test_what_costs_of_slices_are_not(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def two(**parts: object) -> Costs:
    return Costs.of([1, 1], [1, 1], [1, 1]).with_parts(**parts)


def uneven(placement: Placement, sizes: tuple[int, ...], share: float, **more: object) -> Costs:
    """Stages that differ, in what slices take of them, too."""
    one = in_parts(by_flops(placement, share), sizes, Attention(share))
    scaled = {
        kind: tuple(time * (1 + stage / 8) for stage, time in enumerate(one.times[kind]))
        for kind in 'FBW'
    }
    last = in_parts(by_flops(placement, share / 4), sizes, Attention(share / 4))
    parts = {name: (*own[:-1], last.parts[name][-1]) for name, own in one.parts.items()}
    return replace(one.with_times(**scaled), parts=parts, **more)


@pytest.mark.parametrize('name', ['zb-h1', 'zb-v', '1f1b'])
def test_measured_times_of_slices(name):
    """Simulated anew, each pass takes what it took; of several measurements, the medians."""
    made = in_slices(name, 2, 3, 3)
    costs = uneven(made.placement, (5, 2, 3), 0.5)
    measured = simulate(made, costs)
    for found in (fit(measured), middle([fit(measured), costs, fit(measured)])):
        again = simulate(made, found)
        assert [x for own in again.spans for span in own for x in span] == pytest.approx(
            [x for own in measured.spans for span in own for x in span]
        )


def test_files_carry_what_slices_take():
    costs = uneven(Placement.loop(2), (5, 2, 3), 0.5)
    assert Costs.from_fields(json.loads(json.dumps(asdict(costs)))) == costs
    assert Costs.from_json(json.dumps(asdict(costs))) == costs


def test_files_carry_sizes():
    """Those of before have none; with other sizes a graph is another one."""
    made = in_slices('zb-v', 2, 2, 3)
    own = replace(made, graph=sized(made.graph, (5, 2, 3)))
    check(own)
    assert sizes_of(Schedule.from_json(own.to_json()).graph) == (5, 2, 3)
    assert Schedule.from_json(own.to_json()) == own != made
    assert sizes_of(made.graph) == sizes_of(chain(2)) == ()
    assert own.graph == Slicing(3, (5, 2, 3))(4) and made.graph == Slicing(3)(4)
    text = made.to_json().replace('3\n   ]', '3, ["many", 2, 3]\n   ]')
    with pytest.raises(ValueError, match=r"technique sliced does not take \(3, \('many', 2, 3\)\)"):
        Schedule.from_json(text)


# ---- Keys and values.


def test_keys_and_values_are_held_of_all_slices():
    """From the first F of a microbatch to the last B, their gradients from its first B."""
    made = build('seq1f1b', 1, 2, num_slices=2)
    assert ' '.join(map(str, made.passes[0])) == '0F0 0F0.1 0BW0.1 0F1 0BW0 0F1.1 0BW1.1 0BW1'
    costs = Costs.of([1], [1], [1], amounts={'kv': [10], 'kv_gradient': [100]})
    for own in (costs, in_parts(costs, (3, 1), Attention())):
        nothing = own.with_amounts(activation=[0], retained=[0])
        assert live(made, nothing) == ((10, 10, 110, 120, 10, 10, 110, 0),)
    assert live(build('1f1b', 1, 2), costs) == ((1, 0, 1, 0),), 'whole sequences have none'


def test_keys_and_values_do_not_move_with_an_activation():
    graph = offload(Slicing(2)(1), [0])
    costs = Costs.of([1], [1], [1], amounts={'kv': [10], 'kv_gradient': [100]})
    assert costs.changes(graph)['O', 0, 0] == -0.5
    assert set(costs.changes(graph, 'host').values()) == {0.5, -0.5}


# ---- The planner.

INSTANCES = [
    (p, m, n, share, limit)
    for p, m, n in ((2, 2, 2), (2, 3, 3), (3, 2, 4), (4, 2, 2), (4, 4, 4))
    for share in (0.2, 0.7)
    for limit in (None, 1.9)
]


@pytest.mark.parametrize(('p', 'm', 'n', 'share', 'limit'), INSTANCES)
def test_plans_of_slices_that_differ(p, m, n, share, limit):
    """Twenty instances: no worse than each named schedule in slices, and as long as simulated.

    Slices of equal length, of which the last take longest, with keys and values.
    """
    held = {'kv': (0.05,) * 2 * p, 'kv_gradient': (0.05,) * 2 * p}
    candidates = [
        (each, uneven(each, (1,) * n, share, comm=0.05).with_amounts(**held))
        for each in (Placement.loop(p, 2), Placement.v(p))
    ]
    with patch.object(budget, '_STEPS_PER_SECOND', 100):
        found = plan(candidates, m, graph=Slicing(n), memory_limit=limit, seconds=2.0)
    check(found.schedule, memory_limit=limit, costs=found.costs)
    assert found.value == pytest.approx(simulate(found.schedule, found.costs).makespan)
    assert found.lower_bound <= found.value + 1e-9
    compared = 0
    for name, makespan in of_two_chunks(candidates, m, n, limit):
        compared += 1
        assert found.value <= makespan + 1e-9, name
    assert compared > 3 or limit


def test_an_optimum_is_no_longer_than_its_bound():
    """One rank: the bound is its work, whatever slices take."""
    costs = uneven(Placement.loop(1), (1, 5), 0.5)
    found = plan([(Placement.loop(1), costs)], 2, graph=Slicing(2), seconds=0.1)
    assert (
        found.lower_bound == found.value == pytest.approx(2 * sum(costs.times[k][0] for k in 'FBW'))
    )


def test_a_limit_that_keys_and_values_pass():
    """One microbatch is what fits at least: its activations, keys and values, and gradients."""
    placement = Placement.loop(2)
    costs = Costs.uniform(placement).with_amounts(kv=(0.5, 0.5), kv_gradient=(0.25, 0.25))
    with pytest.raises(ValueError, match=r'memory limit 1.7 .* below 1.75, one microbatch'):
        plan([(placement, costs)], 2, graph=Slicing(2), memory_limit=1.7, seconds=0.1)
    found = plan([(placement, costs)], 2, graph=Slicing(2), memory_limit=1.75, seconds=0.1)
    check(found.schedule, memory_limit=1.75, costs=found.costs)
