"""What is done with activations, whatever the schedule: no pass moves, no rank holds more."""

from collections.abc import Callable
from functools import partial

import pytest
from orders import by_hand, texts, without

from megatron_zbpp import Costs, Schedule, build, check, simulate
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.schedules import names
from megatron_zbpp.techniques.evict import with_eviction
from megatron_zbpp.techniques.offload import offloaded
from megatron_zbpp.techniques.recompute import recomputed


def evicted(schedule: Schedule) -> Schedule:
    """The first rank may hold three quarters of what it does."""
    costs = Costs.uniform(schedule.placement)
    before = peak(schedule, costs)
    limits = [0.75 * before[0], *before[1:]]
    return with_eviction(schedule, range(schedule.num_stages), costs, limits)


# by name: what makes it, and its passes
TECHNIQUES: dict[str, tuple[Callable[[Schedule], Schedule], str]] = {
    **{f'recompute {n}': (partial(recomputed, amount=n), 'R') for n in ('half', 'all', '1')},
    **{f'offload {n}': (partial(offloaded, amount=n), 'OL') for n in ('half', 'all', 'auto')},
    'evict': (evicted, 'EK'),
}
LESS = ('1f1b', 'interleaved')  # with W right behind B


@pytest.mark.parametrize('name', names(plain=True))
@pytest.mark.parametrize('technique', TECHNIQUES)
def test_any_schedule(technique, name):
    if (technique, name) == ('evict', '2bp'):
        return  # it holds the most behind its last B, for W: none of that can leave
    make, kinds = TECHNIQUES[technique]
    plain = build(name, 4, 8)
    made, costs = make(plain), Costs.uniform(plain.placement)
    check(made)
    assert without(made, kinds) == plain.passes
    after, before = peak(made, costs), peak(plain, costs)
    assert all(a <= b for a, b in zip(after[:3], before[:3], strict=True))
    assert after[3] <= before[3] or technique == 'evict'
    stages = {p.stage for _, p in made if p.kind in kinds}
    if technique == 'evict':
        assert {made.rank_of(p) for _, p in made if p.kind in kinds} <= {0} and after[
            1:3
        ] == before[1:3]
        if stages:
            assert after[0] < before[0] and after[3] > before[3]
            assert simulate(made, costs).makespan == simulate(plain, costs).makespan
    elif technique.startswith('recompute') and technique != 'recompute all':
        assert all(plain.placement.chunk_of(stage) == 0 for stage in stages)
    elif technique == 'offload all' and name in LESS:
        assert max(after) < max(before)


@pytest.mark.parametrize('technique', ['recompute all', 'offload all', 'evict'])
def test_passes_that_run_as_one(technique):
    """They stay so, but those that an R comes between."""
    make, kinds = TECHNIQUES[technique]
    order = ' '.join(f'{{0}}F{k}' for k in range(5)) + ' ({0}F5&{0}BW0) '
    order += ' '.join(f'{{0}}BW{k}' for k in range(1, 6))
    second = ' '.join(f'1F{k} 1BW{k}' for k in range(6))
    schedule = by_hand(2, 6, order.format(0), second)
    made = make(schedule)
    check(made)
    assert any(p.kind in kinds for _, p in made)
    pairs = [' '.join(map(str, made.passes[rank][at : at + 2])) for rank, at in made.together]
    assert pairs == ([] if kinds == 'R' else ['0F5 0BW0'])
    assert texts(schedule)[0].startswith('0F0 0F1')
