"""The output layer on all ranks: its collectives, what they cost, and what is held for them."""

import json
import random
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from unittest import mock

import pytest
from orders import by_hand, without
from published import published
from vocabulary import split_1f1b

from megatron_zbpp import (
    Costs,
    Layer,
    Layers,
    Pass,
    Placement,
    Schedule,
    build,
    check,
    partition,
    simulate,
)
from megatron_zbpp.analysis.deadlock import DeadlockError, prove
from megatron_zbpp.analysis.fit_costs import measured_costs, middle
from megatron_zbpp.analysis.gain import critical_path
from megatron_zbpp.analysis.lowering import lower
from megatron_zbpp.analysis.memory import live, peak
from megatron_zbpp.analysis.program import Exchange, Receive, Send
from megatron_zbpp.analysis.run_ahead import passes_ahead, passes_run_ahead, split
from megatron_zbpp.ir import chain
from megatron_zbpp.ir.timeline import Timeline
from megatron_zbpp.schedules import Sizes, find, names
from megatron_zbpp.techniques import ASKED
from megatron_zbpp.techniques import find as find_technique
from megatron_zbpp.techniques.base import with_copies
from megatron_zbpp.techniques.composition import techniques_of
from megatron_zbpp.techniques.offload import offloaded
from megatron_zbpp.techniques.recompute import recomputed
from megatron_zbpp.techniques.slices.balance import Attention, balanced, in_parts
from megatron_zbpp.techniques.slices.graph import sliced
from megatron_zbpp.techniques.slices.place import in_slices
from megatron_zbpp.techniques.vocabulary import place
from megatron_zbpp.techniques.vocabulary.graph import (
    EMBEDDING,
    EMBEDDING_GRADIENT,
    TOKENS,
    S,
    T,
    split_vocabulary,
)
from megatron_zbpp.techniques.vocabulary.place import (
    in_embedding_shards,
    in_shards,
    rival_costs,
    with_embedding,
    with_shard_times,
    with_shards,
    with_usual_share,
)


def costs_of(p: int, **more) -> Costs:
    """F 1, B 2 within BW, S 1, T .5."""
    shards = (0.0,) * p
    times = {'S': (*shards, *[1.0] * p), 'T': (*shards, *[0.5] * p)}
    return replace(Costs.uniform(Placement.loop(p)).with_times(**times), **more)


def exchanges(programs, microbatch: int) -> list[tuple]:
    """Collectives of a microbatch, which are those of all ranks."""
    (alike,) = {tuple(i for i in each if isinstance(i, Exchange)) for each in programs}
    own = [i for i in alike if i.producers[0].microbatch == microbatch]
    return [(i.operation, i.message, i.root) for i in own]


def test_three_collectives_a_microbatch_instead_of_a_message_for_each_pair():
    programs = check(split_1f1b(8, 20)).programs
    counts = [Counter(type(i) for i in program) for program in programs]
    assert [count[Exchange] for count in counts] == [60] * 8
    assert [count[Send] for count in counts] == [20, *[40] * 6, 20]
    assert [count[Receive] for count in counts] == [20, *[40] * 6, 20]
    assert exchanges(programs, 0) == of_output(7)


def of_output(root: int) -> list[tuple]:
    gathered = ('all-gather', 'statistics', None)
    return [('broadcast', 'hidden', root), gathered, ('reduce', 'vocabulary', root)]


@pytest.mark.parametrize('barriers', [1, 2])
def test_each_collective_comes_behind_its_last_contributor(barriers):
    graph = split_vocabulary(chain(2), 2, barriers)
    own = ('1B0 3T0', '3T0 1B0')[barriers - 1]
    schedule = by_hand(2, 1, '0F0 2S0 2T0 0BW0', f'1F0 3S0 {own} 1W0', graph=graph)
    ran = [i for i in check(schedule).programs[1] if isinstance(i, Pass | Exchange)]
    words = [i.message if isinstance(i, Exchange) else i.kind for i in ran]
    reduced = ['vocabulary', 'B', 'T'] if barriers == 1 else ['T', 'vocabulary', 'B']
    assert words == ['F', 'hidden', 'S', 'statistics', *reduced, 'W']


def test_ranks_that_enter_collectives_in_two_orders_deadlock():
    programs = [list(program) for program in lower(split_1f1b(4, 4))]
    prove(programs)
    places = [at for at, i in enumerate(programs[2]) if isinstance(i, Exchange)]
    a, b = places[3:5]
    programs[2][a], programs[2][b] = programs[2][b], programs[2][a]
    with pytest.raises(DeadlockError, match=r'rank 2 waits at (broadcast|all-gather|reduce)\('):
        prove(programs)


def test_forwards_that_run_ahead_enter_no_collective():
    """The last stage's is never ahead, so nothing of its microbatch is there to be exchanged."""
    schedule = split_1f1b(4, 6)
    programs = lower(schedule)
    ahead = passes_run_ahead(schedule, passes_ahead(schedule), 4)
    assert ahead
    parts = [split(program, ahead) for program in programs]
    assert not any(isinstance(i, Exchange) for first, _ in parts for i in first)
    prove([(*first, *rest) for first, rest in parts])
    graph = split_vocabulary(sliced(chain(1), 2), 1)
    order = '0F0 1S0 0F0.1 1S0.1 0B0.1 0B0 1T0 1T0.1 0W0.1 0W0'
    (program,) = check(by_hand(1, 1, order, graph=graph)).programs
    cuts = Counter(i.producers[0].slice for i in program if isinstance(i, Exchange))
    assert cuts == {0: 3, 1: 3}


def test_collectives_take_time_from_the_last_contribution_on():
    schedule, times = split_1f1b(2, 1), {'hidden': 0.25, 'statistics': 0.125, 'vocabulary': 0.5}
    costs = costs_of(2, collectives=times)
    timeline = simulate(schedule, costs)
    spans = {str(p): span for p, span in timeline.by_pass.items()}
    assert spans['1F0'] == (1, 2)
    assert spans['3S0'] == (2, 3), 'its own output need not come'
    assert spans['2S0'] == (2.25, 3.25)
    assert spans['1BW0'] == (3.25 + 0.125 + 0.5, 3.875 + 2)
    assert spans['2T0'][0] == spans['0BW0'][1]
    last = next(step for step in critical_path(timeline, costs) if str(step.ran) == '1BW0')
    assert (last.waited, str(last.on)) == ('communication', '2S0')
    alone = simulate(schedule, costs_of(2, comm=0.25)).makespan
    assert alone == 1 + 0.25 + 1 + 0.25 + 1 + 0.25 + 2 + 0.25 + 2 + 0.5, 'else as a message'
    file = '{"F": [1], "B": [1], "W": [1], "collectives": {"hidden": 0.5}}'
    assert Costs.from_json(file).collectives == {'hidden': 0.5}


def test_hidden_states_and_parts_of_gradients_are_held_from_s_to_t():
    schedule = split_1f1b(2, 1)
    amounts = {'logits': 0.5, 'hidden': 0.25, 'gradient_part': 0.125}
    held = {name: (0, 0, each, each) for name, each in amounts.items()}
    costs = Costs.uniform(Placement.loop(2)).with_amounts(**held)
    assert list(map(str, schedule.passes[0])) == ['0F0', '2S0', '0BW0', '2T0']
    assert live(schedule, costs)[0] == (1, 1.875, 0.875, 0)


def test_times_of_collectives_are_measured():
    """The median of those that were waited for: one that came at once, or much later, is not it."""
    schedule = with_shards(build('zb-h1', 2, 5))
    times = {'hidden': 0.0, 'statistics': 0.0, 'vocabulary': 2.0}
    spans = simulate(schedule, costs_of(2, collectives=times)).spans
    backwards = [at for at, p in enumerate(schedule.passes[1]) if p.kind == 'B']
    for at, late in zip(backwards, (0.0, 0.25, 0.25, 0.25, 8.0), strict=True):
        begin = spans[1][at][0]
        later = [[(a >= begin) * late for a, _ in own] for own in spans]
        pairs = [zip(own, by, strict=True) for own, by in zip(spans, later, strict=True)]
        spans = tuple(tuple((a + c, b + c) for (a, b), c in own) for own in pairs)
    found = measured_costs(Timeline(schedule, spans)).collectives
    assert found['statistics'] + found['vocabulary'] == pytest.approx(2.25)
    # its takers come much later: when they do says little of it
    schedule = with_embedding(with_shards(build('zb-h1', 2, 8)))
    times = dict.fromkeys(schedule.graph.collectives, 0.125)
    timeline = simulate(schedule, replace(Costs.known(schedule), collectives=times))
    found = measured_costs(timeline).collectives
    assert found['hidden'] == pytest.approx(0.125)
    slowest = found['statistics'] + found['vocabulary']
    assert found['embedding_gradient'] == pytest.approx(slowest) == pytest.approx(0.25)
    # and told apart from messages. No T of these orders waits, so only the sum of two is seen
    schedule = split_1f1b(4, 8)
    times = {'hidden': 0.25, 'statistics': 0.125, 'vocabulary': 0.5}
    timeline = simulate(schedule, costs_of(4, collectives=times, comm=0.0625))
    found = measured_costs(timeline)
    assert found.comm == pytest.approx(0.0625)
    measured = {'hidden': 0.25, 'statistics': 0.625, 'vocabulary': 0}
    assert found.collectives == pytest.approx(measured)
    assert middle([found, found]).collectives == found.collectives
    assert simulate(schedule, found).makespan == pytest.approx(timeline.makespan)
    assert timeline.lags().keys() == {(a, b) for a in range(4) for b in range(4) if abs(a - b) == 1}


# ---- The word embedding on all ranks: its collectives, who waits for them, and what it costs.


HOSTS = '1f1b', 'zb-h1', 'zb-v', 'v-half', 'interleaved'


def both(host: Schedule, comm: float = 0.0) -> tuple[Schedule, Schedule, Costs]:
    """The host with shards of the output layer, and of the embedding beside it."""
    costs = with_shard_times(Costs.uniform(host.placement, comm=comm), host.placement, 0.2)
    output = in_shards(host, costs)
    return output, in_embedding_shards(output, costs), costs


@pytest.mark.parametrize('name', HOSTS)
@pytest.mark.parametrize('comm', [0.0, 0.1])
def test_it_costs_latencies_at_both_ends(name, comm):
    """At any number of microbatches; no more is held, and the orders of all else stay."""
    output, made, costs = both(build(name, 8, 24), comm)
    check(made)
    assert simulate(made, costs).makespan <= simulate(output, costs).makespan + 8 * comm + 1e-6
    assert peak(made, costs) == peak(output, costs)
    assert without(made, 'DIJ') == output.passes


@pytest.mark.parametrize('name', HOSTS)
@pytest.mark.parametrize('message', [TOKENS, EMBEDDING, EMBEDDING_GRADIENT])
def test_its_collectives_have_the_time_of_a_microbatch(name, message):
    """As long as two forwards, they cost something at an end of the iteration alone."""

    def more(m: int) -> float:
        _, made, costs = both(build(name, 4, m))
        slow = replace(costs, collectives={message: 2.0})
        return simulate(made, slow).makespan - simulate(made, costs).makespan

    assert abs(more(32) - more(24)) < 0.5 and more(24) <= 3 * 2


def test_six_collectives_a_microbatch():
    _, made, _ = both(build('zb-v', 4, 6))
    programs = check(made).programs
    first, loss = made.placement.rank_of(0, 0), made.placement.rank_of(7, 0)
    looked_up = ('broadcast', 'tokens', first), ('reduce', 'embedding', first)
    scattered = ('broadcast', 'embedding_gradient', first)
    assert exchanges(programs, 3) == [*looked_up, *of_output(loss), scattered]


@pytest.mark.parametrize('name', ['1f1b', 'zb-v'])
@pytest.mark.parametrize('technique', [None, *ASKED])
def test_evaluations_look_up_and_scatter_nothing(name, technique):
    """Nor does anything that they keep go elsewhere, or run again."""
    made = both(build(name, 4, 6))[1]
    if technique is not None:
        made = find_technique(technique).request(made, 'all', None)
        assert technique in techniques_of(made)
    made = made.forward_only()
    check(made)
    counts = Counter(p.kind for _, p in made)
    assert counts == {'F': 6 * made.num_stages, 'D': 6, **dict.fromkeys('IST', 24)}


def test_slices_of_an_embedding_have_collectives_of_their_own():
    output, made, costs = both(in_slices('zb-v', 4, 4, 4))
    check(made)
    assert simulate(made, costs).makespan == pytest.approx(simulate(output, costs).makespan)


# ---- Orders: as good as the papers', whatever the host and m.


PLAIN = names(plain=True)


def shared(host: Schedule, share: float, **more: float) -> tuple[Schedule, Costs]:
    costs = with_shard_times(Costs.uniform(host.placement, **more), host.placement, share)
    return in_shards(host, costs), costs


def bubble(schedule: Schedule, costs: Costs) -> float:
    timeline = simulate(schedule, costs)
    return timeline.makespan - max(map(timeline.busy, range(schedule.num_ranks)))


@pytest.mark.parametrize(('p', 'share', 'most', 'comm'), published(__file__, 'shards'))
def test_bubble_and_peak_of_the_table(p, share, most, comm):
    made, costs = shared(build('1f1b', p, 3 * p), share, comm=comm)
    assert bubble(made, costs) <= most + 1e-6
    assert max(peak(made, costs)) == p + 1


def test_ways_that_are_tried():
    """So many simulations an order takes, at any p and m: with 16 ranks some seconds."""
    for name, ways, references in (('1f1b', 54, 6), ('zb-v', 81, 9)):
        with mock.patch.object(place, 'simulate', side_effect=simulate) as simulated:
            shared(build(name, 4, 8), 0.2)
        assert simulated.call_count == ways + references


@pytest.mark.parametrize('m', [1, 3, 9, 64])
@pytest.mark.parametrize('share', [0.05, 0.8])
def test_bubble_does_not_grow_with_m(m, share):
    """At most one F above 1F1B's was asked for: it is below that."""
    host = build('1f1b', 8, m)
    made, costs = shared(host, share)
    assert bubble(made, costs) <= bubble(host, Costs.uniform(host.placement)) + 1e-6
    assert max(peak(made, costs)) <= 9


@pytest.mark.parametrize(
    ('name', 'slices', 'share'),
    [
        *product(HOSTS, [1], [0.2, 0.5]),
        *product([*HOSTS, 'zb-interleaved', 'seq-zb-v'], [4], [0.2]),
    ],
)
def test_a_host_keeps_its_bubble_and_its_orders(name, slices, share):
    """S and T come first slice first, though backwards come last slice first."""
    host = build(name, 4, 12) if slices == 1 else in_slices(name, 4, 4, slices)
    made, costs = shared(host, share)
    check(made)
    plain = Costs.uniform(host.placement)
    assert bubble(made, costs) <= bubble(host, plain) + 0.5 / slices + 1e-6
    assert max(peak(made, costs)) <= max(peak(host, plain)) + 1 / slices
    for own, before in zip(without(made, 'ST'), host.passes, strict=True):
        for is_forward in (True, False):
            kept = [[p for p in order if (p.kind == 'F') is is_forward] for order in (own, before)]
            assert kept[0] == kept[1] or slices > 1
    for order in made.passes:
        for kind in (S, T):
            own = [(p.microbatch, p.slice) for p in order if p.kind == kind]
            assert own == sorted(own) and len(own) == host.num_microbatches * slices
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
        assert without(made, 'STF') == without(host, 'F')
        assert [{*order} for order in without(made, 'ST')] == [{*order} for order in host.passes]
        sizes, plain = Sizes(p, m, v, n=n), Costs.uniform(made.placement)
        window = max(simulate(made, plain).windows) - 3 * m
        assert window == pytest.approx(family.bubble(sizes)) and family.bubble.where(sizes)
        assert family.memory.where(sizes)
        reached += max(peak(made, plain)) > family.memory(sizes) - 1 / (n * v) - 1e-6
        costs = with_shard_times(plain, made.placement, 0.3)
        shared = build('slimpipe', p, m, num_slices=n, num_chunks=v, costs=costs)
        assert bubble(shared, costs) <= family.bubble(sizes) + 1e-6
    assert reached and build('slimpipe', 4, 4).graph.num_slices == 4


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
    random_, host = random.Random(name), build(name, 3, 6)
    stages = host.num_stages
    times = {kind: [random_.uniform(0.5, 2) for _ in range(stages)] for kind in 'FBW'}
    times |= {kind: [0.0] * stages + [random_.uniform(0.5, 2) for _ in range(3)] for kind in 'ST'}
    made = in_shards(host, Costs.uniform(host.placement, comm=0.1).with_times(**times))
    check(made)
    assert made == Schedule.from_json(made.to_json())


def test_memory_limit():
    """Without a further forward there is less to do while S runs."""
    host = build('1f1b', 4, 8)
    free, costs = shared(host, 0.3)
    tight = in_shards(host, costs, 4.5)
    assert max(peak(free, costs)) == 5 and max(peak(tight, costs)) == 4
    assert bubble(tight, costs) > bubble(free, costs)


def test_plans_of_both_layers(zbpp):
    both = '--vocab-layers input+output --vocab-parallel 0.3'
    zbpp(f'plan --pp 4 --microbatches 8 {both} --seconds 1 -o plan.json')
    zbpp('check plan.json')
    techniques = json.loads(Path('plan.json').read_text())['schedule']['techniques']
    assert techniques == [['split_vocabulary', [4, 1]], ['split_embedding', [4]]]


def test_the_rival_of_shards_has_the_whole_layer():
    """All that shards take is on its last stage; F of a shard, a share of F, is half of S."""
    host = build('1f1b', 4, 8)
    known = with_shard_times(Costs.uniform(host.placement), host.placement, 0.5)
    assert known.times[S][4:] == (1.0,) * 4 and known.times[T][4:] == (0.5,) * 4
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
