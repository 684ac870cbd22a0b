"""Slices of sequences: orders of every family, their numbers, and what must not be."""

import json
import re
from collections import Counter
from dataclasses import asdict, replace
from itertools import product
from unittest.mock import patch

import pytest
from figures import held, require_kept, timeline
from hypothesis import example, given
from hypothesis import strategies as st
from published import published

from megatron_zbpp import Costs, Placement, Schedule, build, check, simulate
from megatron_zbpp.analysis.fit_costs import fit, middle
from megatron_zbpp.analysis.memory import live, peak
from megatron_zbpp.ir import BW, B, F, Task, W, chain
from megatron_zbpp.ir.timeline import Timeline
from megatron_zbpp.planner import limits
from megatron_zbpp.planner.plans import plan
from megatron_zbpp.schedules import find, names
from megatron_zbpp.techniques import offload as module
from megatron_zbpp.techniques.base import with_copies
from megatron_zbpp.techniques.offload import offload, offloaded, with_offload
from megatron_zbpp.techniques.recompute import recompute, recomputed
from megatron_zbpp.techniques.slices import place
from megatron_zbpp.techniques.slices.balance import (
    TILE,
    Attention,
    balanced,
    exchanged,
    in_parts,
    loads,
    moves,
)
from megatron_zbpp.techniques.slices.graph import (
    Slicing,
    exchanging_context,
    of_one_slice,
    sized,
    sizes_of,
)
from megatron_zbpp.techniques.slices.place import by_rule, cut, in_slices, unsuited

BY_NAME = {
    'seq1f1b': '1f1b',
    'seq1f1b-zb': 'zb-h1',
    'seq-zb-v': 'zb-v',
    'seq1f1b-interleaved': 'interleaved',
}


def facts(schedule: Schedule) -> tuple[float, float, float]:
    """Idle time of the makespan and of the worst window, and peak memory, where F = B = W = 1."""
    found, work = timeline(schedule), 3 * schedule.num_microbatches
    numbers = (found.makespan - work, max(found.windows) - work, max(held(schedule)))
    return tuple(round(each, 6) for each in numbers)


@pytest.mark.parametrize('row', published(__file__, 'seq1f1b'), ids=str)
def test_numbers_of_the_table(row):
    p, m, n, *numbers = row
    for name, expected in zip(BY_NAME, numbers, strict=True):
        if expected is not None:
            made = build(name, p, m, num_slices=n)
            check(made)
            makespan, window, most = facts(made)
            found = (makespan, window, most) if len(expected) == 3 else (makespan, most)
            assert found == pytest.approx(expected, abs=1e-6), name


# those that recompute by their own order cannot be cut
CUT = [name for name in names() if name not in ('merak', 'varuna')]
SHAPES = st.tuples(st.integers(1, 6), st.integers(1, 7), st.integers(1, 7))


@given(st.sampled_from(CUT), SHAPES, st.data())
def test_every_family_runs_in_slices(name, shape, data):
    """It does not deadlock, does each task once, and each stage in the order of units."""
    p, m, n = shape
    family = find(name)
    p = max(p, family.min_ranks)
    chunks = data.draw(st.sampled_from(family.chunks[:3]))
    made = in_slices(name, p, m, n, num_chunks=chunks)
    check(made)
    assert made.graph.num_slices == n
    assert made.num_microbatches == m
    assert made.name == (family.name if n == 1 else f'{family.name} + slices {n}')
    forward = [(i, j) for i in range(m) for j in range(n)]
    backward = [(i, n - 1 - j) for i, j in forward]
    for stage, rank in enumerate(made.placement.only_route):
        for kinds, expected in (((F,), forward), ((B, BW), backward), ((W, BW), backward)):
            own = (p for p in made.passes[rank] if p.stage == stage and p.kind in kinds)
            assert [(p.microbatch, p.slice) for p in own] == expected


@given(st.sampled_from(tuple(BY_NAME)), SHAPES)
def test_their_names_say_the_same(name, shape):
    p, m, n = max(2, shape[0]), *shape[1:]
    named, cut_by_name = build(name, p, m, num_slices=n), in_slices(BY_NAME[name], p, m, n)
    check(named)
    assert named.passes == cut_by_name.passes
    assert in_slices(name, p, m, n) == named


@pytest.mark.parametrize('name', [*names(), *BY_NAME])
def test_one_slice_is_the_whole_sequence(name):
    """Pass by pass, phases and their labels included."""
    plain = BY_NAME.get(name, name)
    for p, m in ((2, 3), (4, 8), (4, 3)):
        made, whole = in_slices(name, p, m, 1), build(plain, p, m)
        assert replace(made, name=whole.name) == whole
        assert made.phases == whole.phases


@pytest.mark.parametrize(
    'name', ['gpipe', '1f1b', 'zb-h1', 'zb-2p', 'interleaved', 'breadth-first']
)
def test_the_least_shift_is_taken(name):
    """With forwards one place later than that, the schedule deadlocks or waits for itself."""
    p, m, n = 4, 4, 4
    made = by_rule(build(name, p, m * n), n)
    plain = build(name, p, m * n)
    shift = 0 if name in ('gpipe', 'breadth-first') else n - 1
    for after, before in zip(made.passes, plain.passes, strict=True):
        ahead = [next(at for at, p in enumerate(order) if p.kind != F) for order in (after, before)]
        assert ahead[0] - ahead[1] == shift
    if shift:
        with pytest.raises(ValueError, match=r'needs|deadlock'):
            check(cut(plain, n))


def test_who_does_not_suit_slices_says_so():
    """Where more than twice an n-th of the bubble is left; and what is better does suit them."""
    why = {
        name: unsuited(in_slices(name, 8, 8, 8), build(name, 8, 8)) for name in names(plain=True)
    }
    assert {name for name, each in why.items() if each} == {
        *('v-half', 'v-min', '1f1b-v', 'hanayo')
    }
    assert re.match(
        'v-half does not suit slices: .*: take one of these, or zbpp plan', why['v-half']
    )


def test_what_moves_activations_is_not_cut():
    """A family of somebody else's, which knows of no slices."""
    own = patch.object(place, 'find', lambda name: replace(find(name), options=()))
    with own, pytest.raises(ValueError, match=r'po-h moves activations, .* such as 1f1b or po'):
        in_slices('po-h', 2, 2, 2)
    made = in_slices('zb-1p', 4, 4, 2, memory_limit=2.0)
    check(made, memory_limit=2.0)
    assert max(held(made)) == 2.0


# ---- Slices that run again, or are elsewhere meanwhile: what is placed, and what that leaves.


@pytest.mark.parametrize('name', ['gpipe', 'po', 'zb-v'])
def test_copies_of_slices_take_an_nth(name):
    """So all but the latest leave, where whole sequences in the same slots would not."""
    whole = in_slices(name, 4, 4, 4)
    gone = offloaded(whole, 'all', ratio=0.5)
    check(gone)
    count = Counter(p.kind for _, p in gone)
    assert count['O'] == count['L'] >= 0.9 * count['F']
    assert facts(gone)[2] < 0.8 * facts(whole)[2]


def test_a_share_is_of_slices():
    """Where k is 2, every second slice leaves, not all slices of every second microbatch."""
    gone = offloaded(in_slices('gpipe', 2, 8, 4), 'auto', ratio=2.0)
    assert {p.slice % 2 for _, p in gone if p.kind == 'O'} == {1}
    assert len({p.microbatch for _, p in gone if p.kind == 'O'}) > 4


@pytest.mark.parametrize('name', ['1f1b', 'gpipe', 'interleaved'])
def test_slices_that_run_again_are_held_one_at_a_time(name):
    whole = in_slices(name, 4, 4, 4)
    again = recomputed(whole, 'all')
    check(again)
    assert facts(again)[2] == pytest.approx(1 / 4 / whole.placement.num_chunks)


def test_long_slices_are_copied_and_run_again_for_longer():
    """Slots are of the longest; R takes as long as its F, copies as long as their bytes do."""
    schedule = in_slices('gpipe', 2, 2, 2)
    uneven = [(0.75, 0.25)] * 2
    costs = with_copies(Costs.uniform(schedule.placement), 0.5)
    costs = costs.with_parts(F=uneven, B=uneven, W=uneven, activation=uneven, retained=uneven)
    for made in (recomputed(schedule, 'all', costs), offloaded(schedule, 'all', costs)):
        for p, (start, end) in simulate(made, costs).by_pass.items():
            long = {'R': 0.75, 'O': 0.5625, 'L': 0.5625}.get(p.kind)
            assert long is None or end - start == pytest.approx(long / (3 if p.slice else 1))
    with patch.object(module, 'with_transfers') as placed:
        with_offload(schedule, [0], costs)
    length, margin = placed.call_args.args[3:5]
    assert (length, margin) == (0.5625, 0.75)


# ---- What slices cost: sizes that balance, times and memory of each, plans with them.


LONG = 2**20  # tokens: rounding to one of them does not show


def by_flops(placement: Placement, share: float) -> Costs:
    """Attention has `share` of F, 2.5 times that of B, and nothing of W; linear layers the rest."""
    return Costs.uniform(placement, 1.0, 1 + 1.5 * share, 1 - share)


@pytest.mark.parametrize('row', published(__file__, 'attention'), ids=str)
def test_bubbles_of_the_table(row):
    p, m, n, share, *numbers = row
    made = build('seq1f1b', p, m, num_slices=n)
    attention, costs = Attention(share), by_flops(made.placement, share)
    nothing = (0.0,) * p
    ways = (
        (LONG // n,) * n,
        balanced(n, LONG, attention, costs.with_times(B=nothing, W=nothing), multiple=1),
        balanced(n, LONG, attention, costs, multiple=1),
    )
    for sizes, (bubble, most) in zip(ways, numbers, strict=True):
        own = in_parts(costs, sizes, attention)
        assert simulate(made, own).bubble_makespan == pytest.approx(bubble, abs=0.001)
        assert max(peak(made, own)) == pytest.approx(most, abs=0.0051)


@pytest.mark.parametrize(
    ('name', 'share', 'bubble'),
    [
        ('seq1f1b', 0.1, 0.308), ('seq1f1b-zb', 0.1, 0.175),
        ('seq1f1b', 0.6, 0.312), ('seq1f1b-zb', 0.6, 0.283),
    ],
)  # fmt: skip
def test_attention_leaves_less_to_w(name, share, bubble):
    """p 8 m 4 n 4, balanced: what splitting backwards gains."""
    made = build(name, 8, 4, num_slices=4)
    attention, costs = Attention(share), by_flops(made.placement, share)
    own = in_parts(costs, balanced(4, LONG, attention, costs, multiple=1), attention)
    assert simulate(made, own).bubble_makespan == pytest.approx(bubble, abs=0.001)


@given(st.integers(1, 16), st.integers(40, 400), st.floats(0, 1), st.sampled_from((1, 8, TILE)))
@example(4, 4, 0.0, 128)
def test_balanced_sizes(n, tiles, share, multiple):
    """They descend, in multiples, and take the same time but for rounding."""
    length, costs = tiles * multiple, by_flops(Placement.loop(2), share)
    attention = Attention(share)
    sizes = balanced(n, length, attention, costs, multiple)
    assert sum(sizes) == length and len(sizes) == n and min(sizes) > 0
    assert share or tiles % n or set(sizes) == {length // n}
    assert all(size % multiple == 0 for size in sizes[:-1])
    own, graph = in_parts(costs, sizes, attention), Slicing(n)(2)
    times = [sum(own.duration(graph, kind, 0, 0, part) for kind in 'FBW') for part in range(n)]
    # a tile at the end of a sequence takes up to twice the mean of its tokens
    assert max(times) - min(times) <= 2 * 2 * sum(times) / tiles + 1e-9
    assert sum(times) == pytest.approx(sum(costs.times[kind][0] for kind in 'FBW'))


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
        assert flat(simulate(made, found)) == pytest.approx(flat(measured))


def flat(measured: Timeline) -> list[float]:
    return [time for own in measured.spans for span in own for time in span]


def test_files_carry_what_slices_take():
    costs = uneven(Placement.loop(2), (5, 2, 3), 0.5)
    assert Costs.from_fields(json.loads(json.dumps(asdict(costs)))) == costs
    assert Costs.from_json(json.dumps(asdict(costs))) == costs
    # those of before have none; with other sizes a graph is another one
    made = in_slices('zb-v', 2, 2, 3)
    own = replace(made, graph=sized(made.graph, (5, 2, 3)))
    check(own)
    assert sizes_of(Schedule.from_json(own.to_json()).graph) == (5, 2, 3)
    assert Schedule.from_json(own.to_json()) == own != made
    assert sizes_of(made.graph) == sizes_of(chain(2)) == ()
    assert own.graph == Slicing(3, (5, 2, 3))(4) and made.graph == Slicing(3)(4)
    assert of_one_slice(exchanging_context(build('seq1f1b', 2, 2).graph)).techniques == ()


def test_keys_and_values_are_held_of_all_slices():
    """From the first F of a microbatch to the last B, their gradients from its first B."""
    made = build('seq1f1b', 1, 2, num_slices=2)
    assert ' '.join(map(str, made.passes[0])) == '0F0 0F0.1 0BW0.1 0F1 0BW0 0F1.1 0BW1.1 0BW1'
    costs = Costs.of([1], [1], [1], amounts={'kv': [10], 'kv_gradient': [100]})
    for own in (costs, in_parts(costs, (3, 1), Attention())):
        nothing = own.with_amounts(activation=[0], retained=[0])
        assert live(made, nothing) == ((10, 10, 110, 120, 10, 10, 110, 0),)
    assert live(build('1f1b', 1, 2), costs) == ((1, 0, 1, 0),), 'whole sequences have none'
    graph = offload(Slicing(2)(1), [0])
    assert costs.changes(graph)['O', 0, 0] == -0.5
    assert set(costs.changes(graph, 'host').values()) == {0.5, -0.5}


@pytest.mark.parametrize('limit', [None, 1.5])
@pytest.mark.parametrize('times', [(1, 1, 1), (1, 1.2, 0.8), 0.2, 0.7], ids=str)
@pytest.mark.parametrize('sizes', [(2, 2, 2), (2, 3, 3), (3, 2, 4), (4, 2, 2), (4, 4, 4)], ids=str)
def test_plans_are_no_worse_than_named_schedules_in_slices(sizes, times, limit):
    """Forty instances, each on both placements of two chunks, and as long as simulated.

    Slices take equal times; or, by attention's share, the last one the longest, with keys and
    values.
    """
    p, m, n = sizes
    placements = Placement.loop(p, 2), Placement.v(p)
    if isinstance(times, tuple):
        candidates = [(each, Costs.uniform(each, *times, comm=0.05)) for each in placements]
    else:
        limit = limit and 1.9
        amounts = {'kv': (0.05,) * 2 * p, 'kv_gradient': (0.05,) * 2 * p}
        candidates = [
            (each, uneven(each, (1,) * n, times, comm=0.05).with_amounts(**amounts))
            for each in placements
        ]
    with patch.object(limits, '_STEPS_PER_SECOND', 100):
        found = plan(candidates, m, graph=Slicing(n), memory_limit=limit, seconds=2.0)
    require_kept(found, limit)
    assert found.schedule.graph == Slicing(n)(2 * p)
    rivals = dict(rivals_of(dict(candidates), m, n, limit))
    assert len(rivals) > 3 or limit
    assert all(found.value <= makespan + 1e-9 for makespan in rivals.values()), rivals
    if isinstance(times, tuple):
        assert found.best_named[1] <= min(rivals.values()) + 1e-9


def rivals_of(costs_of, m, n, limit):
    """Name and makespan of named schedules of two chunks on these placements, within the limit."""
    p = next(iter(costs_of)).num_ranks
    for name in names(plain=True):
        if 2 in find(name).chunks:
            made = in_slices(name, p, m, n, num_chunks=2)
            costs = costs_of.get(made.placement)
            if costs is not None and not (limit and max(peak(made, costs)) > limit + 1e-9):
                yield name, simulate(made, costs).makespan


def test_an_optimum_is_no_longer_than_its_bound():
    """One rank: the bound is its work, whatever slices take."""
    costs = uneven(Placement.loop(1), (1, 5), 0.5)
    found = plan([(Placement.loop(1), costs)], 2, graph=Slicing(2), seconds=0.1)
    work = sum(costs.times[kind][0] for kind in 'FBW')
    assert found.lower_bound == found.value == pytest.approx(2 * work)
    # one microbatch is what fits at least: its activations, keys and values, and gradients
    placement = Placement.loop(2)
    costs = Costs.uniform(placement).with_amounts(kv=(0.5, 0.5), kv_gradient=(0.25, 0.25))
    found = plan([(placement, costs)], 2, graph=Slicing(2), memory_limit=1.75, seconds=0.1)
    check(found.schedule, memory_limit=1.75, costs=found.costs)


# ---- Context exchange of equal slices: every block once, loads alike, and what bubble that leaves.


@pytest.mark.parametrize(('p', 'n'), [(2, 2), (4, 4), (4, 8), (8, 8), (3, 7), (4, 2)])
def test_every_block_is_computed_once_and_loads_differ_by_one(p, n):
    count, made = 0, loads(p, n)
    for tick in range(n):
        running = tuple((tick - rank) % n for rank in range(p))
        found = moves(running)
        assert len({move[:3] for move in found}) == len(found), 'no block twice'
        assert all(move.key < move.query == running[move.source] for move in found)
        own = [part + 0.5 for part in running]
        for move in found:
            own[move.source] -= 1
            own[move.target] += 1
        assert max(own) - min(own) <= 1 and sum(own) == sum(running) + p / 2
        count += len(found)
        assert own == [made[rank][part].blocks for rank, part in enumerate(running)]
    assert sum(load.moved for each in made for load in each) == 2 * count


@pytest.mark.parametrize(
    ('name', 'most'), [('seq1f1b', 0.11), ('seq1f1b-zb', 0.03), ('seq-zb-v', 0.014)]
)
def test_uniform_slices_lose_what_they_gain_but_for_an_exchange(name, most):
    """With as many slices as ranks and 60 % of attention it is better than balanced sizes."""
    schedule, attention = build(name, 8, 16, num_slices=8), Attention(0.6)
    plain = Costs.uniform(schedule.placement)
    even = in_parts(plain, balanced(8, 131072, attention, plain), attention)
    found = simulate(schedule, exchanged(plain, schedule.placement, 8, attention))
    uniform = simulate(schedule, in_parts(plain, (1,) * 8, attention))
    assert found.bubble_makespan < min(most, uniform.bubble_makespan / 2.5)
    assert found.makespan < simulate(schedule, even).makespan


def test_blocks_that_move_are_waited_for():
    placement, attention = Placement.loop(4), Attention(0.4)
    plain = Costs.uniform(placement)
    none, some = (exchanged(plain, placement, 4, attention, wire) for wire in (0.0, 0.01))
    for rank, row in enumerate(loads(4, 4)):
        assert sum(none.parts['F'][rank]) == pytest.approx(1)
        for (part, load), (kind, each) in product(enumerate(row), (('F', 0.01), ('B', 0.0175))):
            wait = some.parts[kind][rank][part] - none.parts[kind][rank][part]
            assert wait == pytest.approx(each * load.moved)
    assert none.parts['W'] == in_parts(plain, (1,) * 4, attention).parts['W']
