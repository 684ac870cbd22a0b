"""What `zbpp advise` prints of a shape: the figures are those of the predictions, by rank."""

from __future__ import annotations

import json

import pytest

from megatron_zbpp.cli import main
from megatron_zbpp.partitioning.advise.job import Job
from megatron_zbpp.partitioning.advise.prediction import BY_RATES
from megatron_zbpp.partitioning.advise.search import advise
from megatron_zbpp.partitioning.shapes import Shape

GIB = 2.0**30
FEW = ('1f1b', 'zb-v')
SHAPE = '--model gpt --num-layers 16 --hidden 4096 --heads 32 --vocab 51200 --seq 2048'
RATES = '--tflops 245 --bandwidth 2039 --global-batch-size 16'
MODEL = Shape('gpt', 16, 4096, 32, 51200, 2048, 245.0, bandwidth=2039.0)
# GPUs that are alone have pipelines, those of one node share layers and larger microbatches
MACHINES = {'alone': (1, 20), 'a node': (8, 40)}


HELD = {
    '--pp': ('pp', 2),
    '--tp': ('tp', 2),
    '--vpp': ('vpp', 7),
    '--micro-batch': ('micro_batch', 4),
    '--cp': ('cp', 2),
}


def printed(capsys: pytest.CaptureFixture, machine: str, *more: str) -> str:
    node, gib = MACHINES[machine]
    words = f'advise --gpus 8 --memory {gib}GiB --gpus-per-node {node} {RATES} {SHAPE}'.split()
    assert main([*words, '--schedules', ','.join(FEW), '--count', '4', *more]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize('machine', MACHINES)
def test_rows_are_the_predictions(capsys: pytest.CaptureFixture, machine: str) -> None:
    made = json.loads(printed(capsys, machine, '--json'))
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
def test_text_has_the_same_figures(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, machine: str
) -> None:
    monkeypatch.setenv('COLUMNS', '200')
    made, text = json.loads(printed(capsys, machine, '--json')), printed(capsys, machine)
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


@pytest.mark.parametrize('flag', HELD)
def test_held_sizes(capsys: pytest.CaptureFixture, flag: str) -> None:
    """All setups have them, the best of stock's included, and the lines say so."""
    name, size = HELD[flag]
    more = ['--num-layers', '14', '--schedules', '1f1b,zb-v,zb-interleaved', '--count', '20']
    free = json.loads(printed(capsys, 'a node', '--json', *more))
    made = json.loads(printed(capsys, 'a node', '--json', *more, flag, str(size)))
    assert {row[name] for row in made['best']} == {size} != {row[name] for row in free['best']}
    assert made['against'][name] == size or name == 'vpp'
    asked = {
        'pp': 'pipeline-model-parallel',
        'tp': 'tensor-model-parallel',
        'cp': 'context-parallel',
    }
    if name in asked:
        assert all(f'--{asked[name]}-size {size}' in row['launch_line'] for row in made['best'])


def test_held_sizes_that_divide_nothing(capsys: pytest.CaptureFixture) -> None:
    words = f'advise --gpus 8 --memory 40GiB --pp 3 --tp 2 {RATES} {SHAPE}'.split()
    assert main(words) == 2
    assert 'into any setup with --pp 3, --tp 2: give' in capsys.readouterr().err
