"""Orders and memory actions in one search: never worse than what has a name at equal memory."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from figures import require_kept

from megatron_zbpp import Costs, Placement, Schedule, ScheduleError, build, check, simulate
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.ir.formats import load_plan
from megatron_zbpp.partitioning.shapes import Shape, layers_of
from megatron_zbpp.planner import limits
from megatron_zbpp.planner.actions import plan_within
from megatron_zbpp.planner.cp_sat import solve_offload
from megatron_zbpp.planner.limits import Candidate
from megatron_zbpp.planner.plans import plan
from megatron_zbpp.planner.problem import Problem
from megatron_zbpp.techniques.base import with_copies
from megatron_zbpp.techniques.offload import offloaded

NAMED = ('po-h', 'po-f', 'v-half', 'v-min')
TIMES = ((1, 1, 1), (1, 1.2, 0.8), (1, 1.4, 0.6), (1, 1.1, 1.3), (0.8, 1.5, 0.7))
SIZES = ((4, 8), (6, 12))
RATIOS = (0.5, 0.8, 1.0, 1.5)
INSTANCES = [
    pytest.param(*case, marks=() if at in (0, 14) else pytest.mark.full)
    for at, case in enumerate(itertools.product(SIZES, TIMES, RATIOS))
]


def costed(placement: Placement, times: tuple[float, ...], ratio: float = 1.0) -> Candidate:
    """With all that actions ask for: an input is a twentieth of what a stage saves."""
    costs = with_copies(Costs.uniform(placement, *times), ratio, ('E', 'K'))
    times_of = {**costs.times, 'R': costs.times['F']}
    inputs = tuple(0.05 * amount for amount in costs.amounts['activation'])
    return placement, costs.with_times(**times_of).with_amounts(input=inputs)


KINDS = {'offload': 'OL', 'recompute': 'R', 'evict': 'EK'}


def does(schedule: Schedule) -> set[str]:
    return {technique.name for technique in schedule.graph.techniques}


@pytest.mark.parametrize(('sizes', 'times', 'ratio'), INSTANCES)
def test_never_worse_than_named_schedules_at_equal_memory(sizes, times, ratio):
    """40 instances: sizes, times of F, B and W, and how long copies take."""
    p, m = sizes
    loop, v = (costed(at, times, ratio) for at in (Placement.loop(p, 2), Placement.v(p)))
    for name in NAMED:
        _, costs = loop if name.startswith('po') else v
        known = build(name, p, m, **({'costs': costs} if name.startswith('po') else {}))
        limit = max(peak(known, costs))
        made = plan_within([loop, v], m, actions=('offload',), memory_limit=limit, seconds=0.2)
        require_kept(made, limit)
        assert made.value <= simulate(known, costs).makespan + 1e-9


def test_actions_of_single_stages_beat_every_name():
    """At p = 3 with one chunk a rank, where no name has any."""
    case = costed(Placement.loop(3), (1, 1, 1), 0.5)
    limit = 1.6
    plain = plan_within([case], 6, memory_limit=limit, seconds=1)
    made = plan_within([case], 6, actions=('offload', 'recompute'), memory_limit=limit, seconds=2)
    require_kept(made, limit)
    assert does(made.schedule) and made.value < plain.value - 0.5
    assert made.best_named is None or made.value < made.best_named[1]
    # stage 0 has no time to copy: a copy takes as long as ten passes. It recomputes
    placement, costs = costed(Placement.loop(2, 2), (1, 1, 1), 0.6)
    slow = (9.0, *costs.times['O'][1:])
    costs = costs.with_times(O=slow, L=slow)
    made = plan_within(
        [(placement, costs)], 6, actions=('offload', 'recompute'), memory_limit=0.8, seconds=2
    )
    require_kept(made, 0.8)
    assert 0 in {task.stage for task in made.schedule.graph.needs if task.kind == 'R'}


@pytest.mark.parametrize(
    ('action', 'placement', 'm', 'limit', 'ratio'),
    [
        ('offload', Placement.loop(4), 8, 2, 0.1),
        ('recompute', Placement.loop(3), 6, 1.15, 0.5),
        # the first rank has little, its partner has much: no order of a V does without
        ('evict', Placement.v(4), 8, (2, 4, 4, 6), 0.2),
    ],
)
def test_each_action_is_taken_where_it_must_win(action, placement, m, limit, ratio):
    """Nothing that keeps its activations can take as little: by the bound of those."""
    case = costed(placement, (1, 1, 1), ratio)
    plain = plan_within([case], m, memory_limit=limit, seconds=0.1)
    made = plan_within([case], m, actions=(action,), memory_limit=limit, seconds=0.3)
    assert made.value < plain.lower_bound - 0.5
    assert {p.kind for _, p in made.schedule} >= {*KINDS[action]}
    require_kept(made, limit)


def test_all_actions_in_one_plan():
    """A rank with little: its stages do what they like best, and none holds more."""
    case = costed(Placement.loop(4, 2), (1, 1, 1), 0.3)
    limits = (1.5, 2.5, 2.5, 3.5)
    every = ('offload', 'recompute', 'evict')
    require_kept(plan_within([case], 6, actions=every, memory_limit=limits, seconds=0.1), limits)


@pytest.mark.parametrize(
    ('placement', 'm', 'limit', 'optimum'),
    [
        (Placement.loop(2), 4, 1, 18),
        (Placement.loop(3), 4, 1, 20),
        (Placement.loop(3), 4, 2, 15),
        (Placement.loop(4), 5, 2, 20),
        pytest.param(Placement.loop(2, 2), 4, 1, 13.25, marks=pytest.mark.full),
    ],
)
def test_small_plans_with_offload_are_proven(placement, m, limit, optimum):
    """The exact form's bound is what a schedule takes in simulation, copies and all."""
    case = costed(placement, (1, 1, 1), 0.5 if placement.num_chunks == 1 else 1.0)
    made = plan_within([case], m, actions=('offload',), memory_limit=limit, seconds=30)
    require_kept(made, limit)
    assert made.value == made.lower_bound == optimum


@pytest.mark.parametrize('times', [(1, 1, 1), (2, 3, 1), (1, 1.3, 0.7)])
def test_the_exact_form_forbids_nothing_that_runs(times):
    """No simulated schedule with offload is below its bound."""
    placement, costs = costed(Placement.loop(3), times, 0.6)
    plain = build('gpipe', 3, 4)
    for schedule in (offloaded(plain, 'all', costs), offloaded(build('zb-h1', 3, 4), 'all', costs)):
        value = simulate(schedule, costs).makespan
        problem = Problem(placement, 4, costs, peak(schedule, costs))
        found = solve_offload(problem, 0.0, value, effort=2.0, seconds=60.0)
        assert found.schedule is not None and found.bound <= value + 1e-9


def test_parameters_count_here_too():
    placement, costs = costed(Placement.loop(2, 2), (1, 1, 1))
    heavy = replace(costs, parameters=(2.0,) * 4)
    question = {'actions': ('offload',), 'seconds': 0.2}
    bare = plan_within([(placement, costs)], 6, memory_limit=1.5, **question)
    made = plan_within([(placement, heavy)], 6, memory_limit=5.5, **question)
    assert max(peak(made.schedule, heavy)) <= 1.5 and bare.value > 0
    with pytest.raises(ValueError, match=r'all that is known needs [0-9.]+ or more: give that'):
        plan_within([(placement, heavy)], 6, memory_limit=3.5, **question)
    # bpipe is allowed only where eviction is
    case = costed(Placement.loop(6), (1, 1, 1))
    limit = max(peak(build('bpipe', 6, 12), case[1]))
    made = plan_within([case], 12, actions=('evict',), memory_limit=limit, seconds=0.1)
    require_kept(made, limit)
    value = simulate(build('bpipe', 6, 12), case[1]).makespan
    assert made.best_named is not None and made.value <= made.best_named[1] <= value + 1e-9


SELECTIVE = {
    **{kind: [1, 1] for kind in 'FBW'},
    'activation': [1, 1],
    'times': {'O': [3, 3], 'L': [3, 3]},
    'selective': {'B': [1.2, 1.2], 'activation': [0.4, 0.4]},
}


def test_selective_recomputation(zbpp):
    """It is chosen where it must win, not where there is room, and never above the limit."""
    Path('costs.json').write_text(json.dumps(SELECTIVE))
    case = 'plan --pp 2 --vpp 1 --microbatches 4 --times costs.json --no-cache --seconds 0.1'
    actions = '--actions offload,selective --json'
    plain = zbpp(f'{case} --memory-limit 1 --json')
    tight, roomy = (zbpp(f'{case} --memory-limit {limit} {actions}') for limit in (1, 2))
    assert tight['selective'] and not roomy['selective'] and not plain['selective']
    assert tight['makespan'] < plain['lower_bound'] and roomy['makespan'] < tight['makespan']
    assert max(tight['peak_activations']) <= 1
    words = zbpp(f'{case} --memory-limit 1 --actions selective -o plan.json')
    assert '--recompute-granularity selective' in words
    assert load_plan('plan.json').selective
    zbpp('check plan.json')


def test_what_is_copied_with_selective_recomputation_is_less():
    """As much less as activations, where nothing else is told."""
    costs = Costs.from_json(json.dumps(SELECTIVE), selective=True)
    assert costs.times['O'] == pytest.approx((1.2, 1.2)) and costs.amounts['retained'] == (0.4, 0.4)
    told = {**SELECTIVE, 'selective': {**SELECTIVE['selective'], 'times': {'O': [2, 2]}}}
    costs = Costs.from_json(json.dumps(told), selective=True)
    assert costs.times['O'] == (2, 2) and costs.times['L'] == pytest.approx((1.2, 1.2))
    assert Costs.from_json(json.dumps(SELECTIVE)).times['B'] == (1, 1)


def test_on_the_command_line(zbpp):
    case = 'plan --pp 4 --vpp 2 --microbatches 6 --no-cache --seconds 0.2 --actions offload'
    case += ' --copy-ratio 0.5'
    assert 'offload to the host: stages' in zbpp(f'{case} --memory-limit 2 -o plan.json')
    zbpp('check plan.json')
    assert 'techniques' in Path('plan.json').read_text()
    zbpp(f'{case} --frontier 2,3 -o frontier.svg')
    drawn = Path('frontier.svg').read_text()
    assert 'po-h' in drawn and 'po-f' in drawn
    assert 'give --memory-limit or --frontier' in zbpp.refused(case)


# ---- What a rank may hold: its parameters count, and a limit may be in bytes.


GIB = 2**30
PLACEMENT = Placement.v(2)
COSTS = replace(Costs.uniform(PLACEMENT, 3, 4, 2), parameters=(1.0, 3.0, 2.0, 2.0))
FILE = """{"F": [1, 1.1], "B": [1, 1.2], "W": [0.8, 0.9], "activation": [6e9, 6e9]%s}"""


def test_parameters_take_their_part_of_the_limit(monkeypatch):
    """On a V rank 0 has stages 0 and 3, rank 1 has 1 and 2. Steps end the search, not the clock."""
    monkeypatch.setattr(limits, '_STEPS_PER_SECOND', 5_000)
    assert COSTS.static(PLACEMENT) == (3, 5)
    under = plan([(PLACEMENT, COSTS)], 4, memory_limit=[5, 6.5], seconds=30)
    held = peak(under.schedule, COSTS)
    assert held[0] <= 2 and held[1] <= 1.5
    bare = plan([(PLACEMENT, replace(COSTS, parameters=()))], 4, memory_limit=[2, 1.5], seconds=30)
    assert (bare.schedule, bare.value) == (under.schedule, under.value)
    schedule = build('zb-v', 2, 4)
    held = peak(schedule, COSTS)
    check(schedule, memory_limit=max(held[0] + 3, held[1] + 5), costs=COSTS)
    with pytest.raises(ScheduleError, match=r'beside parameters of 5 at .*above the limit of'):
        check(schedule, memory_limit=held[1] + 4.5, costs=COSTS)


def test_bytes_on_the_command_line(zbpp):
    costs, layers = Path('bytes.json'), Path('layers.json')
    shape = '--pp 2 --microbatches 4 --seconds 0.1'
    case = f'plan {shape} --no-cache --times bytes.json --memory-limit'
    costs.write_text(FILE % ', "parameters": [34e9, 30e9]')
    assert 'peak memory 11.176 GiB' in zbpp(f'{case} 47GB')
    assert 'is below 31.67 GiB of weights' in zbpp.refused(f'{case} 30GiB')
    costs.write_text(FILE % '')
    assert 'says nothing of parameters' in zbpp.refused(f'{case} 60GiB')
    made = layers_of(Shape('gpt', 4, 1024, 16, 8192, 1024, 100.0))
    layers.write_text(made.to_json())
    whole = sum(layer.parameters for layer in made) / GIB
    case = f'partition layers.json {shape} --memory-limit'
    assert 'layout' in zbpp(f'{case} {whole:.3f}GiB')
    assert 'no partition holds' in zbpp.refused(f'{case} {whole / 2:.3f}GiB')
    assert 'all limits in bytes' in zbpp.refused(f'{case} 60GiB,4')
