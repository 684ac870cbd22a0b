"""The benchmarks at their smallest: every runner does the same work, and says what it measured."""

import json
import re
import sys
from importlib import import_module

import forked
import pytest
import wheels
from commands import run
from paths import ROOT
from tables import rows_of

from benchmarks.common import overhead
from benchmarks.pipelines import emulated
from benchmarks.pipelines.entries import known, selected
from benchmarks.pipelines.measure import Sample, checksums_agree
from benchmarks.training import cli as training
from megatron_zbpp.schedules import own_families
from megatron_zbpp.techniques.composition import TRAINED_BY
from scripts.benchmark_asynchronous import METHODS

pytestmark = pytest.mark.one_release


OURS = ['1f1b', 'zb-h1', 'zb-v', 'seq-zb-v', 'auto']
SOME = ['megatron', 'torch:1F1B', 'torch:ZBVZeroBubble', *OURS]
P, M, TIMES = 2, 4, [2.0, 3.0, 1.0]


def benched(script, folder, *flags):
    """A script as a user calls it: what it printed, and its JSON."""
    file = folder / 'result.json'
    command = [sys.executable, f'scripts/{script}.py', '--json', file, *flags]
    done = forked.run(command, cwd=ROOT, timeout=240, env={'XDG_CACHE_HOME': str(folder)})
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout, json.loads(file.read_text())


def pipelines(folder, *flags):
    common = ['--pp', P, '--microbatches', M, '--times-ms', ','.join(map(str, TIMES))]
    return benched('benchmark_pipelines', folder, *common, *flags)


def test_side_by_side(tmp_path):
    picture = tmp_path / 'chart.svg'
    flags = ['--schedules', ','.join(SOME), '--rounds', '2', '--svg', str(picture)]
    text, result = pipelines(tmp_path, *flags)
    rows = {(row['runner'], row['schedule']): row for row in result['rows']}
    named = [('torch', '1F1B'), ('torch', 'ZBVZeroBubble')]
    named += [('zbpp', name) for name in OURS]
    assert list(rows) == [('megatron', '1f1b'), ('megatron', 'interleaved'), *named]
    sliced = rows['zbpp', 'seq-zb-v']
    (checksum, *others) = {row['checksum'] for row in rows.values() if row is not sliced}
    assert sliced['checksum'] == pytest.approx(checksum, rel=1e-5), 'sums of slices'
    assert checksum > 0
    assert not others, 'all did the same work, to the bit'
    for row in rows.values():
        assert (row['p'], row['m'], row['times_ms']) == (P, M, TIMES)
        assert len(row['ms_per_iteration']) == 2
        ideal = M * sum(TIMES)
        assert min(row['ms_per_iteration']) >= row['simulated_ms'] >= ideal
        assert row['bubble'] == pytest.approx(1 - ideal / row['median_ms'])
        assert row['live_activations'] == row['simulated_live_activations']
        assert row['overhead_us_per_pass'] > 0
        if sys.platform == 'linux':
            assert 0 < row['core_wait_us_per_pass'] < 1e3 * row['median_ms']
    assert rows['megatron', '1f1b']['ratio_to_1f1b'] == 1
    assert rows['zbpp', 'zb-v']['simulated_ms'] < rows['zbpp', '1f1b']['simulated_ms']
    assert len(text.splitlines()) == len(rows) + 1
    drawn = picture.read_text()
    assert '<svg' in drawn and 'the axis does not start at 0' in drawn
    for said in ('1f1b  (Megatron)', '1F1B  (torch)', '1f1b  (ours)'):
        assert f'<!-- {said} -->' in drawn, 'told apart without colour'


@pytest.mark.full
def test_both_ways(tmp_path):
    """The mean of two replicas is what one way has, but for the order of sums."""
    flags = ['--schedules', 'zb-v,chimera,bitpipe', '--rounds', '1', '--pp', '4']
    _, result = pipelines(tmp_path, *flags)
    checksum, *others = [row['checksum'] for row in result['rows']]
    assert checksum > 0 and others == [pytest.approx(checksum, rel=1e-5)] * 3


@pytest.mark.full
def test_with_optimizer(tmp_path):
    """Steps that wait for all ranks, and steps that do not."""
    names = 'zb-v,zb-v+post-validation,pipedream-2bw,pipedream-2bw+global-norm'
    flags = ['--schedules', names, '--rounds', '1', '--optimizer']
    _, result = pipelines(tmp_path, *flags, '--iterations-per-sample', '3')
    stock, ours, early, late, waiting = result['rows']
    assert stock['optimizer'] and ours['optimizer'] and early['optimizer']
    assert ours['checksum'] == pytest.approx(stock['checksum'], rel=1e-5)
    assert early['checksum'] == ours['checksum']
    assert late['checksum'] == pytest.approx(stock['checksum'], rel=1e-5), 'at rate 0'
    work = late['m'] * sum(late['times_ms'])
    assert late['simulated_ms'] == pytest.approx(work), 'a call has no bubble'
    assert waiting['checksum'] == late['checksum']
    assert waiting['simulated_ms'] > late['simulated_ms'], 'with a meeting behind each call'
    assert early['simulated_ms'] <= ours['simulated_ms'], 'the window, not the makespan'


BENCHMARKS = 'pipelines.cli', 'training.cli', 'training.splitting', 'gpt.cli', 'partition.cli'
MAINS = [*(f'benchmarks.{name}' for name in (*BENCHMARKS, 'copies.cli'))]


@pytest.mark.parametrize('program', [*MAINS, 'scripts.benchmark_asynchronous'])
def test_refuses_before_it_starts(capsys, monkeypatch, program):
    for line, message in rows_of('refused_lines.txt', program):
        monkeypatch.delenv('WORLD_SIZE', raising=False)
        variable, *flags = line.split() if '=' in line else ['', *line.split()]
        if variable:
            monkeypatch.setenv(*variable.split('='))
        with pytest.raises(SystemExit) as ended:
            import_module(program).main(flags)
        assert ended.value.code == 2
        assert message in capsys.readouterr().err


def test_selection():
    everything = selected(None)
    assert everything[0] == ('megatron', '1f1b')
    assert len(everything) == sum(map(len, known().values()))
    assert selected(['ZBV', 'torch:dualpipev', 'zb_v', 'AUTO+post-validation']) == [
        ('megatron', '1f1b'),
        ('zbpp', 'zb-v'),
        ('torch', 'DualPipeV'),
        ('zbpp', 'auto+post-validation'),
    ]


def test_work_that_differs_is_noticed():
    samples = [Sample(1, 0, 0, 1, checksum) for checksum in (5.0, 5.0, 5.1)]
    assert checksums_agree(samples[:2])
    assert not checksums_agree(samples)
    assert not checksums_agree([Sample(1, 0, 0, 1, 0.0)])


def test_a_pass_lasts_as_told():
    meter = emulated.Meter()
    start = emulated.starting()
    meter.fill(start, 0.01)
    end = emulated.starting()
    assert end.clock - start.clock >= 0.01
    assert 0 < meter.awake <= end.used - start.used


def test_what_a_pass_takes_of_the_core_is_counted_though_the_core_was_away(monkeypatch):
    """Between the sleep and the end of a pass other programs may run: that is no work of ours."""
    meter = emulated.Meter()
    start = emulated.starting()
    sleep = emulated.time.sleep
    monkeypatch.setattr(emulated.time, 'sleep', lambda seconds: sleep(seconds + 0.05))
    meter.fill(start, 0.01)
    assert meter.awake < 0.05


def test_overhead(capsys, tmp_path):
    file = tmp_path / 'overhead.json'
    flags = ['--pp', '4', '--microbatches', '8', '--repeats', '3', '--limit-us', '1e6']
    assert overhead.main([*flags, '--profile', '--json', str(file)]) == 0
    text = capsys.readouterr().out
    assert 'W ' in text.splitlines()[-1] or 'run_backward' in text
    found = json.loads(file.read_text())['us_per_pass']
    assert list(found) == ['1f1b', 'zb-h1', 'zb-v']
    assert all(microseconds > 0 for microseconds in found.values())
    assert overhead.main([*flags, '--limit-us', '0']) == 1


@pytest.mark.full
def test_training(tmp_path):
    small = '--layers 4 --hidden-size 64 --seq-length 16 --microbatches 2 --rounds 2'.split()
    small += ['--schedules', 'zb-h1,zb-v,seq1f1b']
    printed, result = benched('benchmark_training', tmp_path, *small)
    found = {row['schedule']: row for row in result['rows']}
    assert list(found) == ['megatron', '1f1b', 'zb-h1', 'zb-v', 'seq1f1b']
    kinds = [set(row['pass_ms']) for row in found.values()]
    assert kinds == [set(), {'F', 'BW'}, set('FBW'), set('FBW'), {'F', 'BW'}]
    assert [row['simulated_live'] for row in found.values()] == [2, 2, 2, 2, 1.25]
    for name, row in found.items():
        assert (row['to_simulated'] or 1) > 0
        ranks = 0 if name == 'megatron' else 2
        assert len(row['resident']) == len(row['planned']) == ranks
        assert all(held > 0 for held in row['planned'])  # so small, pages may be there already
    assert all(len(row['ms_per_iteration']) == 2 for row in found.values())
    assert found['megatron']['ratio_to_stock'] == found['1f1b']['backward_to_fused'] == 1
    assert found['zb-h1']['backward_to_fused'] > 0
    assert len(printed.splitlines()) == 1 + len(found)


def test_training_compares_rounds():
    """Each schedule with stock, and its backwards with the fused ones, of the same round."""
    job = training.Job(('megatron', '1f1b', 'zb-h1'), 2, 2, 4, 64, 16, rounds=3)
    loads = 1, 5, 2  # what else the machine did in each round
    samples = [
        [training.Sample(3 * load, {}) for load in loads],
        [training.Sample(3 * load, {'F': [load], 'BW': [2 * load]}) for load in loads],
        [
            training.Sample(2 * load, {'F': [load], 'B': [load, load], 'W': [0.5 * load]})
            for load in loads
        ],
    ]
    stock, fused, split = training.rows(job, samples)
    assert (stock['ratio_to_stock'], fused['ratio_to_stock']) == (1, 1)
    assert split['ratio_to_stock'] == pytest.approx(2 / 3)
    assert (fused['backward_to_fused'], split['backward_to_fused']) == (1, 1.25)
    assert split['pass_ms'] == {'F': 2e3, 'B': 2e3, 'W': 1e3}


@pytest.mark.full
def test_splitting(tmp_path):
    """Layers of both kinds, alone and shared by two ranks, large and small."""
    small = '--layers 1 --hidden-size 512 --seq-length 64 --rounds 2'.split()
    te = ['--te', wheels.transformer_engine(wheels.NEWEST)]
    printed, result = benched('benchmark_splitting', tmp_path, *small, *te)
    rows = result['rows']
    found = [(row['layers'], row['tp'], row['shared'], row['hidden']) for row in rows]
    kinds = [(of, tp, False) for of in ('local', 'te') for tp in (1, 2)] + [('te', 2, True)]
    assert found == [(*kind, hidden) for kind in kinds for hidden in (512, 64)]
    assert all(row[part] > 0 for row in rows for part in ('fused', 'b', 'w', 'ratio'))
    # Transformer Engine splits by itself, too: ours is what we take longer than that
    assert all((row['hooks'] == row['more']) == (row['layers'] == 'local') for row in rows)
    assert len(printed.splitlines()) == 1 + len(rows)


SCRIPT = [sys.executable, ROOT / 'scripts' / 'benchmark_asynchronous.py']


def test_all_methods():
    """All asynchronous schedules but for another order of one of them."""
    others = [each.name for each in own_families(every=True) if each.asynchronous]
    assert {*METHODS} == {*others} - {*TRAINED_BY.values()}


@pytest.mark.full
def test_losses_by_step_and_time(tmp_path):
    small = ['--ranks', 2, '--iterations', 7, '--hidden-size', 8, '--seq-length', 8]
    done = run([*SCRIPT, *small, '--methods', 'paci,wpipe', '--output', tmp_path])
    assert done.returncode == 0, done.stderr
    rows = re.findall(r'^\| `(\S+)` \| (\S+) \| (\S+) \| (\d+) \| (\S+) \|$', done.stdout, re.M)
    times = {'1f1b': '9', 'zb-v': '6.5', 'paci': '6', 'wpipe': '6.5'}
    assert dict(row[:2] for row in rows) == times
    stock, same, paci, wpipe = rows
    assert stock[2] == same[2] != paci[2] == paci[4]
    assert wpipe[2] not in (stock[2], paci[2])
    assert [row[3] for row in rows] == ['4', '6', '7', '6']
    assert (tmp_path / 'losses.png').stat().st_size > 10_000
