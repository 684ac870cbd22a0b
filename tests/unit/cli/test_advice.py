"""What `zbpp advise` prints of a shape: the figures are those of the predictions, by rank."""

import json
from pathlib import Path

import pytest

from megatron_zbpp import Layer, Layers, load, simulate
from megatron_zbpp.ir.formats import BYTES
from megatron_zbpp.partitioning.advice import advise
from megatron_zbpp.partitioning.setup_costs import Job
from megatron_zbpp.partitioning.setup_prediction import BY_RATES
from megatron_zbpp.partitioning.shapes import Shape

GIB = 2.0**30
FEW = ('1f1b', 'zb-v')
SHAPE = '--model gpt --num-layers 16 --hidden 4096 --heads 32 --vocab 51200 --seq 2048'
RATES = '--tflops 245 --bandwidth 2039 --global-batch-size 16'
MODEL = Shape('gpt', 16, 4096, 32, 51200, 2048, 245.0, bandwidth=2039.0)
# GPUs that are alone have pipelines, those of one node share layers and larger microbatches
MACHINES = {'alone': (1, 20), 'a node': (8, 40)}


def asked(machine: str, more: str = '') -> str:
    node, gib = MACHINES[machine]
    words = f'advise --gpus 8 --memory {gib}GiB --gpus-per-node {node} {RATES} {SHAPE}'
    return f'{words} --schedules {",".join(FEW)} --count 4 {more}'


@pytest.mark.parametrize('machine', MACHINES)
def test_rows_are_the_predictions(zbpp, machine):
    made = zbpp(asked(machine, '--json'))
    node, gib = MACHINES[machine]
    job = Job(MODEL, 16, 8, gib * GIB, gpus_per_node=node)
    best = advise(job, FEW, count=4).best
    (rival,) = advise(job, ('1f1b', 'interleaved'), count=1).best
    assert made['against']['seconds'] == rival.seconds and not made['is_own']
    unlike = [len(set(each.nbytes)) for each in best] if node == 1 else []
    unlike += [min(each.setup.tp, each.setup.micro_batch) for each in best] if node > 1 else []
    assert max(unlike) > 1
    for row, each in zip(made['best'], best, strict=True):
        setup = each.setup
        assert (row['pp'], row['tp'], row['vpp']) == (setup.pp, setup.tp, setup.chunks)
        assert row['pp'] * row['tp'] * row['dp'] == 8
        assert row['dp'] * row['micro_batch'] * row['microbatches'] == 16
        assert (row['schedule'], row['recompute']) == (setup.schedule, setup.saving)
        assert row['bytes'] == list(each.nbytes) and row['fits']
        assert row['gain'] == pytest.approx((rival.seconds - each.seconds) / rival.seconds)
        shares = [row[name] / each.seconds for name in ('seconds_from', 'seconds_to')]
        assert shares == pytest.approx(BY_RATES) and row['idle_all_ranks'] == each.idle
        assert f'--micro-batch-size {setup.micro_batch}' in row['launch_line']


@pytest.mark.parametrize('machine', MACHINES)
def test_text_has_the_same_figures(zbpp, monkeypatch, machine):
    monkeypatch.setenv('COLUMNS', '200')
    made, text = zbpp(asked(machine, '--json')), zbpp(asked(machine))
    lines = text.splitlines()
    heads = lines[1].split()
    names = ['schedule', 'pp', 'tp', 'dp', 'mb', 're', 's/step', 'idle', 'gain', 'GiB']
    assert heads == names
    short = {'none': '-', 'selective': 'sel', 'full': 'full'}
    for number, row in enumerate(made['best'], 1):
        _, *cells = lines[2 + number].split()
        gib = [f'{own / GIB:.1f}' for own in row['bytes']]
        wanted = [row['pp'], row['tp'], row['dp'], row['micro_batch'], short[row['recompute']]]
        wanted += [f'{row["seconds"]:.4g}', f'{row["idle_all_ranks"]:.1%}', f'{row["gain"]:.1%}']
        assert cells[-9:] == [*map(str, wanted), f'{max(row["bytes"]) / GIB:.1f}']
        low, high = (f'{row[name]:.4g}' for name in ('seconds_from', 'seconds_to'))
        told = f'{number}: {row["seconds"]:.4g} s, probably {low} to {high}; GiB of each pipeline '
        assert f'{told}rank: {" ".join(gib)}' in ' '.join(text.split())


@pytest.mark.parametrize(
    ('flag', 'name', 'size', 'megatrons'),
    [
        ('--pp', 'pp', 2, '--pipeline-model-parallel-size 2'),
        ('--tp', 'tp', 2, '--tensor-model-parallel-size 2'),
        ('--vpp', 'vpp', 7, ''),
        ('--micro-batch', 'micro_batch', 4, '--micro-batch-size 4'),
        ('--cp', 'cp', 2, '--context-parallel-size 2'),
    ],
)
def test_held_sizes(zbpp, flag, name, size, megatrons):
    """All setups have them, the best of stock's included, and the lines say so."""
    more = '--json --num-layers 14 --schedules 1f1b,zb-v,zb-interleaved --count 20'
    free, made = (zbpp(asked('a node', f'{more} {own}')) for own in ('', f'{flag} {size}'))
    assert {row[name] for row in made['best']} == {size} != {row[name] for row in free['best']}
    assert made['against'][name] == size or name == 'vpp'
    assert all(megatrons in row['launch_line'] for row in made['best'])


# ---- Limits of memory beside --layers-file: in its unit or in GiB, answered as they are counted.


SIZES = '--pp 2 --microbatches 6'
TIMES = 1.0, 1.2, 0.8
# on the even split each rank has 4 layers, of 4 GiB for each microbatch, and 8 GiB of parameters
LAYERS = [
    Layer('E', 0.1, 0.0, 0.1, activation=0.0, parameters=0.0),
    *[Layer('t', *TIMES, activation=GIB, parameters=2 * GIB)] * 8,
    Layer('L', 0.1, 0.1, 0.1, activation=0.0, parameters=0.0),
]


@pytest.fixture
def run(zbpp):
    Path('bytes.json').write_text(Layers(tuple(LAYERS)).to_json())
    plain = [Layer('t', *TIMES, activation=1.0, parameters=2.0)] * 8
    Path('units.json').write_text(Layers(tuple(plain)).to_json())
    return zbpp


def test_a_plan_stays_within_it(run):
    """More memory never costs time; the file says the layout, by which the job is placed."""
    line = f'plan {SIZES} --vpp 1 --layers-file bytes.json --seconds 0.5 --no-cache -o plan.json'
    taken = []
    for limit in (12.5, 16.5, 20.5):
        out = run(f'{line} --memory-limit {limit}GiB')
        assert 'peak memory ' in out and ' GiB\n' in out and '\nlayout Etttt|ttttL\n' in out
        made = json.loads(Path('plan.json').read_text())
        assert max(made['peak_activations']) + 8 * GIB <= limit * GIB, 'parameters count'
        assert made['units']['memory'] == BYTES and made['layout'] == 'Etttt|ttttL'
        taken.append(made['makespan'])
        assert simulate(load('plan.json')).makespan == pytest.approx(made['makespan'])
    assert taken[0] > taken[-1] and taken == sorted(taken, reverse=True), taken


@pytest.mark.parametrize(('file', 'unit'), [('units.json', ''), ('bytes.json', 'GiB')])
def test_a_limit_means_the_same_to_each_command(run, file, unit):
    """Activations and parameters together, whether in bytes or not."""
    cases = {
        f'plan {SIZES} --vpp 1 --seconds 0.2 --no-cache --layers-file {file}': 12,
        f'partition {file} {SIZES} --placements loop --seconds 0.2': 12,
        f'partition {file} {SIZES} --strategy pipedream': 12,
        f'simulate --schedule 1f1b {SIZES} --layers-file {file}': 16,
        f'compare {SIZES} --schedules 1f1b --layers-file {file}': 15,  # on other layers
    }
    for line, least in cases.items():
        run(f'{line} --memory-limit {least}{unit}')
        run(f'{line} --memory-limit {least - 0.5:g}{unit}', code=2)  # a picture comes before
        assert run.err.count('\n') == 1, run.err
