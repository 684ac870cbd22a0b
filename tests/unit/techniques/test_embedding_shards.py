"""The word embedding on all ranks: its collectives, who waits for them, and what it costs."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from megatron_zbpp.analysis.checker import check
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.analysis.program import Exchange
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.cli import main
from megatron_zbpp.ir import Schedule, chain
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.grid import ScheduleError
from megatron_zbpp.schedules import build
from megatron_zbpp.techniques import ASKED, find
from megatron_zbpp.techniques.composition import techniques_of
from megatron_zbpp.techniques.slices.place import in_slices
from megatron_zbpp.techniques.vocabulary.graph import (
    EMBEDDING,
    EMBEDDING_GRADIENT,
    TOKENS,
    split_embedding,
)
from megatron_zbpp.techniques.vocabulary.place import (
    in_embedding_shards,
    in_shards,
    with_shard_times,
)

HOSTS = '1f1b', 'zb-h1', 'zb-v', 'v-half', 'interleaved'
ADDED = 'D', 'I', 'J'


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
    for own, before in zip(made.passes, output.passes, strict=True):
        assert [p for p in own if p.kind not in ADDED] == list(before)


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
    (all_alike,) = {tuple(i for i in each if isinstance(i, Exchange)) for each in programs}
    found = [(i.operation, i.message, i.root) for i in all_alike if i.producers[0].microbatch == 3]
    first, loss = made.placement.rank_of(0, 0), made.placement.rank_of(7, 0)
    assert found == [
        ('broadcast', 'tokens', first),
        ('reduce', 'embedding', first),
        ('broadcast', 'hidden', loss),
        ('all-gather', 'statistics', None),
        ('reduce', 'vocabulary', loss),
        ('broadcast', 'embedding_gradient', first),
    ]


@pytest.mark.parametrize('name', ['1f1b', 'zb-v'])
@pytest.mark.parametrize('technique', [None, *ASKED])
def test_evaluations_look_up_and_scatter_nothing(name, technique):
    """Nor does anything that they keep go elsewhere, or run again."""
    made = both(build(name, 4, 6))[1]
    if technique is not None:
        request = find(technique).request
        assert request is not None
        made = request(made, 'all', None)
        assert technique in techniques_of(made)
    made = made.forward_only()
    check(made)
    counts = Counter(p.kind for _, p in made)
    assert counts == {'F': 6 * made.num_stages, 'D': 6, **dict.fromkeys('IST', 24)}


def test_slices_have_collectives_of_their_own():
    output, made, costs = both(in_slices('zb-v', 4, 4, 4))
    check(made)
    assert simulate(made, costs).makespan == pytest.approx(simulate(output, costs).makespan)


@pytest.mark.parametrize(
    ('late', 'early'),
    [('0F0', '2I0'), ('0F0', '3I0'), ('2I0', '0D0'), ('2J0', '0BW0'), ('2J0', '2T0')],
)
def test_needs_are_checked(late, early):
    """What comes before a pass that it needs is refused, on whichever rank that is."""
    _, made, _ = both(build('1f1b', 2, 3))
    orders = [list(order) for order in made.passes]
    places = {str(p): (rank, at) for rank, order in enumerate(orders) for at, p in enumerate(order)}
    (rank, at), (other, to) = places[early], places[late]
    moved = orders[rank].pop(at)
    if rank == other:
        orders[rank].insert(to, moved)
    else:
        orders[rank].append(moved)
    with pytest.raises(ScheduleError):
        check(Schedule.of('mine', made.placement, 3, orders, made.graph))


def test_there_is_no_embedding_without_the_output_layer():
    with pytest.raises(ValueError, match='there is no 2T: the embedding is on all ranks where'):
        split_embedding(chain(2), 2)


def test_command_line(capsys, tmp_path):
    made = tmp_path / 'plan.json'
    words = '--pp 4 --microbatches 8 --vocab-layers input+output'
    line = f'plan {words} --vocab-parallel 0.3 --seconds 1 -o {made}'
    assert main(line.split()) == main(['check', str(made)]) == 0
    techniques = json.loads(made.read_text())['schedule']['techniques']
    assert techniques == [['split_vocabulary', [4, 1]], ['split_embedding', [4]]]
    for command in ('simulate --schedule zb-v', 'plan'):
        assert main(f'{command} {words}'.split()) == 2
        assert 'input+output needs the cost of the output layer' in capsys.readouterr().err
