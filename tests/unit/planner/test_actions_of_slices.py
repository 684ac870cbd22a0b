"""Orders of slices and what is done with their activations: never worse than orders alone."""

import itertools

import pytest
from figures import require_kept
from test_actions import KINDS, costed, does

from megatron_zbpp import Placement
from megatron_zbpp.planner.actions import plan_within
from megatron_zbpp.planner.limits import Budget
from megatron_zbpp.planner.plans import named
from megatron_zbpp.planner.problem import Problem
from megatron_zbpp.techniques.slices.balance import Attention, in_parts
from megatron_zbpp.techniques.slices.graph import Slicing

SIZES = (7, 5, 4)
LEAST = 1.2  # a microbatch on a rank, with keys, values and their gradients
EVERY = ('offload', 'recompute', 'evict')
AMONG = (Placement.v(3), Placement.loop(4)), (2, 4), (LEAST, 1.4, 2.0), (('offload',), EVERY)
INSTANCES = [
    pytest.param(*case, marks=() if at in (0, 7) else pytest.mark.full)
    for at, case in enumerate(itertools.product(*AMONG))
]


@pytest.fixture(autouse=True)
def busy_machine():
    """Leave the clock to end searches here, as it does for users.

    Below what one microbatch needs, the search finds a plan from orders that the clock has cut off,
    and none from the better ones that all of its steps find: a weakness of its starts.
    """


def case(placement, ratio=0.5):
    """Uneven slices, with keys and values, and all that actions ask for."""
    _, costs = costed(placement, (1.0, 1.3, 0.8), ratio)
    held = tuple(0.1 * amount for amount in costs.amounts['activation'])
    costs = costs.with_amounts(kv=held, kv_gradient=held)
    return placement, in_parts(costs, SIZES, Attention(0.3))


@pytest.mark.parametrize(('placement', 'm', 'limit', 'actions'), INSTANCES)
def test_never_worse_than_orders_alone(placement, m, limit, actions):
    """24 instances: half the time is theirs, under the same limit; nor than what has a name."""
    asked, graph = case(placement), Slicing(3, SIZES)
    made = plan_within([asked], m, actions=actions, memory_limit=limit, seconds=0.8, graph=graph)
    require_kept(made, limit)
    assert does(made.schedule) <= {'sliced', *actions}
    assert made.schedule.graph.num_slices == 3 and made.schedule.num_microbatches == m
    limits, cut = (limit,) * placement.num_ranks, graph(placement.num_stages)
    for entry in named(Problem(placement, 3 * m, asked[1], limits, graph=cut)):
        assert made.value <= entry.value + 1e-9, entry.name
    # an eighth of the time that theirs has: a busy machine may stop any search early
    plain = plan_within([asked], m, memory_limit=limit, seconds=0.05, graph=graph)
    assert made.value <= plain.value + 1e-9


@pytest.mark.parametrize(
    ('action', 'placement', 'limit'),
    [
        ('offload', Placement.v(3), 1.0),
        ('recompute', Placement.loop(3), 0.9),
        ('evict', Placement.v(4), (1.1, 2.0, 2.0, 4.0)),
    ],
)
def test_where_one_must_win(action, placement, limit):
    """Orders alone do not fit: a microbatch does not, as keys and values of a sequence stay."""
    asked, graph = case(placement, 0.1), Slicing(3, SIZES)
    made = plan_within([asked], 3, actions=(action,), memory_limit=limit, seconds=0.3, graph=graph)
    assert {p.kind for _, p in made.schedule} >= {*KINDS[action]}
    require_kept(made, limit)
    with pytest.raises(ValueError, match='the least that any of these placements needs'):
        plan_within([asked], 3, memory_limit=limit, seconds=0.3, graph=graph)


def test_how_many_slices(zbpp, monkeypatch):
    """`auto` counts on actions where nothing fits without; steps end it, not a busy clock."""
    monkeypatch.setattr(Budget, 'on_time', lambda self: True)
    words = 'plan --pp 4 --vpp 2 --microbatches 2 --seq-length 8192 --memory-limit 0.8 --slices'
    words += ' auto --least-slice 2048 --copy-ratio 0.5 --actions offload --seconds 2 --no-cache'
    found = zbpp(f'{words} --json')
    assert found['slices'] == 4 and max(found['peak_activations']) <= 0.8
    assert 'offload' in str(found['schedule']['techniques'])


def test_in_words(zbpp):
    words = '--pp 3 --vpp 2 --microbatches 2 --slices 3 --memory-limit 0.8 --copy-ratio 0.1'
    said = zbpp(f'plan {words} --actions offload --seconds 1 --no-cache')
    assert 'offload to the host: stages' in said and 'sliced' not in said
