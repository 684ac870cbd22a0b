"""Orders with the output layer on all ranks: as good as the papers', whatever the host and m."""

from __future__ import annotations

import json
import random
import re
from unittest import mock

import pytest
from two_ways import two_ways

from megatron_zbpp import Layer, Layers, partition
from megatron_zbpp.analysis.checker import check
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.cli import main
from megatron_zbpp.ir import Placement, Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.schedules import Sizes, build, find, names
from megatron_zbpp.techniques.base import with_copies
from megatron_zbpp.techniques.offload.place import offloaded
from megatron_zbpp.techniques.recompute.place import recomputed
from megatron_zbpp.techniques.slices.balance import Attention, balanced, in_parts
from megatron_zbpp.techniques.slices.place import in_slices
from megatron_zbpp.techniques.vocabulary import place
from megatron_zbpp.techniques.vocabulary.graph import S, T
from megatron_zbpp.techniques.vocabulary.place import (
    in_shards,
    rival_costs,
    with_shard_times,
    with_shards,
    with_usual_share,
)

HOSTS = '1f1b', 'zb-h1', 'zb-v', 'v-half', 'interleaved'
PLAIN = names(plain=True)
# p, forward of a shard, bubble: of the orders of arXiv 2411.05288, or squeezed blocks if better;
# the last two with messages and collectives of .1 each, where 1F1B's is 26.4
TABLE = [
    (4, 0.1, 8.8),
    (4, 0.3, 8.4),
    (4, 0.8, 7.4),
    (8, 0.05, 21.85),
    (8, 0.1, 21.7),
    (8, 0.2, 21.4),
    (8, 0.3, 20.4),
    (8, 0.5, 20.0),
    (8, 0.8, 19.4),
    (16, 0.1, 45.7),
    (8, 0.1, 23.5, 0.1),
    (8, 0.3, 22.8, 0.1),
]


def shared(host: Schedule, share: float, **more: float) -> tuple[Schedule, Costs]:
    costs = with_shard_times(Costs.uniform(host.placement, **more), host.placement, share)
    return in_shards(host, costs), costs


def bubble(schedule: Schedule, costs: Costs) -> float:
    timeline = simulate(schedule, costs)
    return timeline.makespan - max(map(timeline.busy, range(schedule.num_ranks)))


@pytest.mark.parametrize(('p', 'share', 'most', 'comm'), [(*row, 0.0)[:4] for row in TABLE])
def test_bubble_and_peak_of_the_table(p, share, most, comm):
    made, costs = shared(build('1f1b', p, 3 * p), share, comm=comm)
    assert bubble(made, costs) <= most + 1e-6
    assert max(peak(made, costs)) == p + 1


def test_ways_that_are_tried():
    """So many simulations an order takes, at any p and m: with 16 ranks some seconds."""
    for name, ways in (('1f1b', 54), ('zb-v', 81)):
        host = build(name, 4, 8)
        costs = with_shard_times(Costs.uniform(host.placement), host.placement, 0.2)
        with mock.patch.object(place, 'simulate', side_effect=simulate) as simulated:
            in_shards(host, costs)
        references = ways // 9
        assert simulated.call_count == ways + references


@pytest.mark.parametrize('m', [1, 3, 9, 64])
@pytest.mark.parametrize('share', [0.05, 0.8])
def test_bubble_does_not_grow_with_m(m, share):
    """At most one F above 1F1B's was asked for: it is below that."""
    host = build('1f1b', 8, m)
    made, costs = shared(host, share)
    assert bubble(made, costs) <= bubble(host, Costs.uniform(host.placement)) + 1e-6
    assert max(peak(made, costs)) <= 9


@pytest.mark.parametrize('share', [0.2, 0.5])
@pytest.mark.parametrize('name', HOSTS)
def test_a_host_keeps_its_bubble_and_its_orders(name, share):
    host = build(name, 4, 12)
    made, costs = shared(host, share)
    check(made)
    plain = Costs.uniform(host.placement)
    assert bubble(made, costs) <= bubble(host, plain) + 0.5 + 1e-6
    assert max(peak(made, costs)) <= max(peak(host, plain)) + 1
    for own, before in zip(made.passes, host.passes, strict=True):
        for is_forward in (True, False):
            kept = [p for p in own if p.kind not in (S, T) and (p.kind == 'F') is is_forward]
            assert kept == [p for p in before if (p.kind == 'F') is is_forward]


@pytest.mark.parametrize('name', [*HOSTS, 'zb-interleaved', 'seq-zb-v'])
def test_slices_of_a_host_keep_their_bubble(name):
    """S and T come first slice first, though backwards come last slice first."""
    host = in_slices(name, 4, 4, 4)
    made, costs = shared(host, 0.2)
    check(made)
    plain = Costs.uniform(host.placement)
    assert bubble(made, costs) <= bubble(host, plain) + 0.5 / 4
    assert max(peak(made, costs)) <= max(peak(host, plain)) + 1 / 4
    for order in made.passes:
        for kind in (S, T):
            own = [(p.microbatch, p.slice) for p in order if p.kind == kind]
            assert own == sorted(own) and len(own) == 16
    assert made == Schedule.from_json(made.to_json())


@pytest.mark.parametrize(('name', 'most'), [('1f1b', 1.04), ('zb-v', 0.4), ('v-half', 0.75)])
def test_slices_of_unlike_sizes(name, most):
    """S and T take as long as their slice has tokens; each has the time that its own S leaves."""
    host, attention = in_slices(name, 4, 4, 8), Attention(0.6)
    plain = Costs.uniform(host.placement)
    sizes = balanced(8, 65536, attention, plain)
    plain = in_parts(plain, sizes, attention)
    costs = with_shard_times(plain, host.placement, 0.8)
    made = in_shards(host, costs)
    check(made)
    assert bubble(made, costs) <= most
    for p, (start, end) in simulate(made, costs).by_pass.items():
        if p.kind in (S, T):
            length = {S: 1.6, T: 0.8}[p.kind] * sizes[p.slice] / 65536
            assert end - start == pytest.approx(length)
    assert max(peak(made, costs)) <= max(peak(host, plain)) + 2 * sizes[0] / 65536


@pytest.mark.parametrize('slices', [1, 4])
@pytest.mark.parametrize('name', ['1f1b', 'zb-v', 'interleaved'])
def test_activations_leave_or_are_made_again_beside_shards(name, slices):
    """The output layer's own stage, too: S keeps what it has got, and waits for no R."""
    made, costs = shared(in_slices(name, 4, 4, slices), 0.3)
    costs = with_copies(costs, 0.3)
    again = recomputed(made, 'all', costs)
    assert sum(peak(again, costs)) < sum(peak(made, costs))
    for other in (again, offloaded(made, 'all', costs), offloaded(again, 'half', costs)):
        check(other)
        assert max(peak(other, costs)) <= max(peak(made, costs))
        assert {p.kind for _, p in other} & {'O', 'R'}
        assert other == Schedule.from_json(other.to_json())
        shards = [[p for p in order if p.kind in (S, T)] for order in other.passes]
        assert shards == [[p for p in order if p.kind in (S, T)] for order in made.passes]


def test_stages_of_a_partition():
    """Of unlike stages the slowest rank alone is busy all the time."""
    host = in_slices('zb-h1', 4, 4, 4)
    plain = Costs.by_layers(host.placement, (3, 4, 4, 5))
    costs = with_shard_times(plain, host.placement, 0.3)
    made = in_shards(host, costs)
    check(made)
    assert bubble(made, costs) <= bubble(host, plain)


@pytest.mark.parametrize(('name', 'most'), [('1f1b', 2), ('zb-h1', 1)])
def test_of_equal_orders_that_with_fewest_logits(name, most):
    """Though nobody has said what they take."""
    made, _ = shared(build(name, 4, 12), 0.2)
    for order in made.passes:
        kinds = [p.kind for p in order]
        held = [kinds[:at].count(S) - kinds[:at].count(T) for at in range(len(kinds) + 1)]
        assert max(held) == most


def test_slimpipe():
    """The interleaved form in slices, as it is, with S and T; about one microbatch is held."""
    family, reached = find('slimpipe'), 0
    for p, m, n, v in ((2, 3, 2, 2), (4, 1, 4, 2), (4, 4, 8, 2), (3, 3, 5, 3), (4, 4, 4, 1)):
        made = build('slimpipe', p, m, num_slices=n, num_chunks=v)
        check(made)
        host = in_slices('interleaved', p, m, n, num_chunks=v)
        for own, before in zip(made.passes, host.passes, strict=True):
            kept = [q for q in own if q.kind not in (S, T)]
            assert {*kept} == {*before} and [q for q in kept if q.kind != 'F'] == [
                q for q in before if q.kind != 'F'
            ]
        sizes, plain = Sizes(p, m, v, n=n), Costs.uniform(made.placement)
        window = max(simulate(made, plain).windows) - 3 * m
        assert window == pytest.approx(family.bubble(sizes)) and family.bubble.where(sizes)
        held = max(peak(made, plain))
        assert held <= family.memory(sizes) and family.memory.where(sizes)
        reached += held > family.memory(sizes) - 1 / (n * v) - 1e-6
        costs = with_shard_times(plain, made.placement, 0.3)
        assert bubble(build('slimpipe', p, m, num_slices=n, num_chunks=v, costs=costs), costs) <= (
            family.bubble(sizes) + 1e-6
        )
    assert reached
    sizes = Sizes(8, 48, 2, 2, 3, 1.5, n=8)
    for formula in (family.bubble, family.memory):  # its text computes its number
        term = re.split(r' \(m?n >=', formula.text.removeprefix('at most '))[0]
        term = re.sub(r'(?<=[\dpnvW)])(?=[pnvF(])', '*', term)
        assert eval(term, sizes._asdict()) == pytest.approx(formula(sizes)), formula.text
    assert build('slimpipe', 4, 4).graph.num_slices == 4


SLOW = [pytest.param(name, marks=pytest.mark.full) for name in HOSTS[2:]]


@pytest.mark.parametrize('share', [0.2, 0.5])
@pytest.mark.parametrize('name', [*HOSTS[:2], *SLOW])
def test_never_slower_than_the_best_partition(name, share):
    """Of 4 layers a rank, and an output layer that a partition cannot divide."""
    p, host = 4, build(name, 4, 12)
    made, costs = shared(host, share)
    layers = Layers((*[Layer('t', 0.25, 0.25, 0.25)] * 4 * p, Layer('L', *[share * p] * 3, 0)))
    rival = partition(layers, p, 12, schedules=[name], placements=[host.placement], seconds=0.5)
    assert simulate(made, costs).makespan <= rival.value


@pytest.mark.parametrize('name', PLAIN)
def test_every_plain_family_can_have_shards_that_differ(name):
    random_ = random.Random(name)
    host = build(name, 3, 6)
    stages = host.num_stages

    def some(count: int) -> tuple[float, ...]:
        return tuple(random_.uniform(0.5, 2) for _ in range(count))

    behind = (0.0,) * stages
    times = {kind: (*behind, *some(3)) for kind in (S, T)}
    costs = Costs.of(some(stages), some(stages), some(stages), 0.1, times=times)
    made = in_shards(host, costs)
    check(made)
    assert made == Schedule.from_json(made.to_json())


def test_memory_limit():
    """Without a further forward there is less to do while S runs."""
    host = build('1f1b', 4, 8)
    costs = with_shard_times(Costs.uniform(host.placement), host.placement, 0.3)
    free, tight = (in_shards(host, costs, limit) for limit in (None, 4.5))
    assert max(peak(free, costs)) == 5 and max(peak(tight, costs)) == 4
    assert bubble(tight, costs) > bubble(free, costs)
    cure = r'memory limit 3.5: 1f1b with the output layer on all ranks holds at least 4: raise'
    with pytest.raises(ValueError, match=cure):
        in_shards(host, costs, 3.5)


@pytest.mark.parametrize(
    ('make', 'why'),
    [
        (lambda: build('pipedream', 4, 8), 'it has updating already'),
        (lambda: two_ways(2, 4), 'it has two routes'),
        (
            lambda: build('dualpipe-v', 4, 8, together=True),
            'such a pair has no between',
        ),
        (lambda: build('1f1b', 4, 8).forward_only(), 'it has forwards only'),
    ],
)
def test_what_cannot_be_a_host(make, why):
    with pytest.raises(ValueError, match=f'{why}: take a schedule of F, B and W alone'):
        in_shards(make(), Costs.uniform(Placement.loop(4)))


def test_times_of_shards_are_told_once():
    host = build('1f1b', 4, 8)
    costs = Costs.uniform(host.placement)
    with pytest.raises(ValueError, match='costs have no times of S and T: give a file'):
        in_shards(host, costs)
    known = with_shard_times(costs, host.placement, 0.5)
    assert known.times[S][4:] == (1.0,) * 4 and known.times[T][4:] == (0.5,) * 4
    with pytest.raises(ValueError, match=r'times of S are in the file and follow from 0\.5'):
        with_shard_times(known, host.placement, 0.5)


def run(capsys, line: str) -> dict:
    assert main([*line.split(), '--json']) == 0
    return json.loads(capsys.readouterr().out)


def test_command_line(capsys, tmp_path):
    shape = '--pp 4 --microbatches 8'
    facts = run(capsys, f'simulate --schedule 1f1b {shape} --vocab-parallel 0.3')
    assert facts['name'] == '1f1b + vocabulary'
    assert facts['makespan'] == pytest.approx(8 * 3.9 + 8.4)
    times = {kind: [0.0] * 4 + [length] * 4 for kind, length in ((S, 0.6), (T, 0.3))}
    costs = tmp_path / 'costs.json'
    costs.write_text(json.dumps({**{kind: [1] * 4 for kind in 'FBW'}, 'times': times}))
    line = f'simulate --schedule 1f1b {shape} --times {costs} --vocab-parallel file'
    assert run(capsys, line)['makespan'] == facts['makespan']
    sliced = run(capsys, f'simulate --schedule 1f1b {shape} --slices 4 --vocab-parallel 0.3')
    assert sliced['makespan'] == pytest.approx(8 * 3.9 + 8.4 / 4)
    slim = run(capsys, f'simulate --schedule slimpipe {shape} --slices 8 --vocab-parallel 0.3')
    assert slim['makespan'] == pytest.approx(8 * 3.9 + 9 / 16) and slim['name'] == 'slimpipe'
    made = tmp_path / 'plan.json'
    line = f'convert --schedule zb-v {shape} --vocab-parallel 0.3 --to json -o {made}'
    assert main(line.split()) == main(['check', str(made)]) == 0
    capsys.readouterr()
    found = run(capsys, f'compare --schedules 1f1b,bpipe,zb-v {shape} --vocab-parallel 0.3')
    rows = {each['name']: each['makespan'] for each in found['schedules']}
    assert list(rows) == ['zb-v + vocabulary', '1f1b + vocabulary']


def test_the_rival_of_shards_has_the_whole_layer():
    """All that shards take is on its last stage; F of a shard is half of S."""
    host = build('1f1b', 4, 8)
    schedule = with_shards(host)
    costs = with_usual_share(schedule, Costs.uniform(schedule.placement))
    assert costs.times[S] == (0,) * 4 + (0.4,) * 4 and costs.times[T] == (0,) * 4 + (0.2,) * 4
    whole = rival_costs(schedule, costs)
    assert whole.times == {kind: pytest.approx((1, 1, 1, 1.8)) for kind in 'FBW'}
    assert rival_costs(host, costs) is costs and with_usual_share(host, whole) is whole
    given = costs.with_times(S=(0,) * 4 + (1,) * 4)
    assert with_usual_share(schedule, given) is given
    untimed = Costs.uniform(schedule.placement)
    assert rival_costs(schedule, untimed) is untimed
