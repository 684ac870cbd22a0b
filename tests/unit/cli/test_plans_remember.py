"""A plan's file has the costs that it was made for, and every command that takes it uses them."""

import json
from pathlib import Path

import pytest
from instances import NODES, P4

from megatron_zbpp import Costs, Devices, Layers, Placement, load, simulate
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.guests.tracing import Tracer
from megatron_zbpp.ir import plan_costs

TIMES = {
    'F': [1, 1.5, 2], 'B': [2, 1, 1], 'W': [0.5, 1, 1], 'activation': [1, 2, 1], 'comm': 0.25,
    'edges': [[0, 1, 0.5]], 'speeds': [1, 0.5, 1], 'parameters': [3, 2, 1],
}  # fmt: skip


@pytest.fixture
def run(zbpp):
    """Runs a line of `zbpp`; returns what it says, and what it says on stderr."""
    Path('times.json').write_text(json.dumps(TIMES))
    Path('layers.json').write_text(P4.to_json())
    Path('devices.json').write_text(NODES.to_json())
    return lambda line, code=0: (zbpp(line, code=code), zbpp.err)


def made() -> dict:
    return json.loads(Path('plan.json').read_text())


PLANNED = {
    'plan': 'plan --pp 3 --vpp 1 --microbatches 5 --times times.json --seconds 0.3',
    'copies': 'plan --pp 3 --vpp 1 --microbatches 6 --memory-limit 2 --actions offload --seconds 1',
    'slices': 'plan --pp 2 --vpp 1 --microbatches 4 --slices 2 --attention 0.3 --seconds 0.3',
    'partition': 'partition layers.json --devices devices.json --microbatches 4 --seconds 0.3',
}


@pytest.mark.parametrize('line', PLANNED.values(), ids=PLANNED)
def test_commands_use_its_costs(line, run):
    """All give the makespan, idle time and peak that the planner printed, whatever was planned."""
    run(f'{line} -o plan.json')
    plan = made()
    for command in ('simulate --file plan.json', 'compare --file plan.json --schedules 1f1b'):
        found, said = run(f'{command} --json')
        if 'schedules' in found:
            found = next(each for each in found['schedules'] if each['name'] == 'plan')
        assert not said
        for name in ('makespan', 'window', 'peak_activations'):
            assert found[name] == pytest.approx(plan[name])
    shown = run('show --file plan.json --json')[0]['timeline']
    assert max(end for rank in shown for *_, end in rank) == pytest.approx(plan['makespan'])
    run('convert --file plan.json -o picture.html')
    assert 'times of the plan' in (page := Path('picture.html').read_text())
    assert plan['units']['time'] in page
    run('convert --file plan.json -o again.json')
    assert json.loads(Path('again.json').read_text()) == plan, 'nothing is lost'
    assert simulate(load('plan.json')).makespan == pytest.approx(plan['makespan'])


def test_a_partition_brings_layers_and_devices(run):
    run(f'{PLANNED["partition"]} -o plan.json')
    plan = made()
    assert Layers.from_json(json.dumps(plan['layers'])) == P4
    assert Devices.from_json(json.dumps(plan['devices'])) == NODES
    table = run('simulate --file plan.json')[0].splitlines()
    assert table[-len(NODES) - 1].endswith('layers')
    held = [text for line in table[-len(NODES) :] for text in line.split()[5:]]
    assert sorted(held) == sorted(plan['layout'].split('|'))
    line = 'partition plan.json --devices plan.json --microbatches 4 --seconds 0.1 --json'
    again, _ = run(line)
    assert [again[name] for name in ('layers', 'devices')] == [plan['layers'], plan['devices']]


def test_limits_and_what_the_plan_has(run):
    """A limit is compared with the amounts of the plan; what it says nobody says again."""
    run(f'{PLANNED["plan"]} -o plan.json')
    most = max(made()['peak_activations'])
    assert run(f'check plan.json --memory-limit {most + 3}')
    assert 'activations' in run(f'check plan.json --memory-limit {most - 0.5}', 2)[1]
    assert 'plan.json has 0.25' in run('simulate --file plan.json --comm 1', 2)[1]
    assert '--attention, but' in run('simulate --file plan.json --attention 0.5', 2)[1]
    assert 'bytes' in run('simulate --file plan.json --memory-limit 1GiB', 2)[1]
    # other times are others
    other, own = (
        run(f'simulate --file plan.json {more} --json')[0] for more in ('--times 1,1,1', '')
    )
    assert other['makespan'] != own['makespan']
    times = {**TIMES, 'activation': [2**30] * 3, 'parameters': [2**31] * 3}
    Path('times.json').write_text(json.dumps(times))
    out, _ = run(f'{PLANNED["plan"]} --memory-limit 6GiB -o plan.json')
    assert 'peak memory ' in out and ' GiB' in out
    assert 'peak, GiB' in run('simulate --file plan.json')[0]
    assert 'peak, GiB' in run('compare --file plan.json --memory-limit 6GiB')[0].splitlines()[0]


def test_a_plan_of_an_older_release_says_what_it_lacks(run):
    run(f'{PLANNED["plan"]} -o plan.json')
    old = {name: value for name, value in made().items() if name not in ('costs', 'units')}
    Path('old.json').write_text(json.dumps(old))
    found, said = run('simulate --file old.json --json')
    assert 'old.json: a plan of an older release, which lacks the costs' in said
    assert found['makespan'] != old['makespan']
    found, said = run('simulate --file old.json --times times.json --json')
    assert not said and found['makespan'] == old['makespan']
    Path('bare.json').write_text(json.dumps(old['schedule']))
    assert not run('simulate --file bare.json')[1], 'a schedule has no costs to lack'


@pytest.mark.parametrize(
    ('field', 'value', 'error'),
    [
        ('costs', {}, "costs: field 'times' is missing"),
        ('costs', {'times': {'F': [1], 'B': [1], 'W': [1]}}, 'costs: costs of 1 stages do not fit'),
        ('units', {'time': 3}, "units: 'time': 3 is not text"),
        ('units', {'clock': 's'}, "units: field 'clock' is not known"),
    ],
)
def test_what_is_wrong_in_it_is_named(run, field, value, error):
    run(f'{PLANNED["plan"]} -o plan.json')
    Path('bad.json').write_text(json.dumps({**made(), field: value}))
    assert error in run('simulate --file bad.json', 2)[1]


def test_costs_are_written_to_an_equal_value(run):
    plain = Costs.uniform(Placement.v(2))
    full = Costs.from_json(json.dumps(TIMES))
    for costs in (plain, full, full.with_times(O=[1.0] * 3), full.with_parts(F=[[0.5, 0.5]] * 3)):
        text = json.dumps(plan_costs.written(costs))
        assert Costs.from_fields(json.loads(text)) == costs == Costs.from_json(text)
    assert set(plan_costs.written(plain)) == {'times', 'amounts'}
    run(f'{PLANNED["plan"]} -o plan.json')
    plan = load('plan.json')
    back = plan.reversed()
    assert plan.costs is not None and back.costs is not None
    assert back.costs != plan.costs and back.reversed().costs == plan.costs
    assert simulate(back).makespan == simulate(plan).makespan
    assert peak(back, back.costs) == tuple(reversed(peak(plan, plan.costs)))


def test_a_trace_shows_the_plan(run):
    """Beside what was measured, in its unit: of the plan's times, not of those that passes took."""
    run(f'{PLANNED["plan"]} -o plan.json')
    plan = load('plan.json')
    measured = simulate(plan, Costs.uniform(plan.placement, 0.01, 0.02, 0.01))
    Tracer(Path('trace')).draw(measured)
    page = Path('trace/pipeline.html').read_text()
    assert 'with the times of the plan' in page
    found = json.JSONDecoder().raw_decode(page[page.index('"panels":') + len('"panels":') :])[0]
    shown, own = found[0]['rows'][0], simulate(plan).spans[0]
    busy = sum(end - start for start, end in zip(shown['starts'], shown['ends'], strict=True))
    factor = busy / sum(end - start for start, end in own)
    assert [end / factor for end in shown['ends']] == pytest.approx([end for _, end in own], 1e-3)
    assert factor == pytest.approx(
        sum(map(measured.busy, range(3))) / sum(map(simulate(plan).busy, range(3))), 1e-3
    )
