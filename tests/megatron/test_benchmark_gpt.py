"""The GPT benchmark at its smallest: the same code as on GPUs, on CPU and gloo."""

import json
import os
import sys

import commands
import pytest
from nvidia import Off, _find_megatron, needs_training
from paths import ROOT, SUPPORT
from test_benchmark import benched

from benchmarks.gpt import models, predict
from benchmarks.gpt.jobs import Job, stages
from benchmarks.gpt.processes import Crew
from benchmarks.gpt.results import FAILED, PREDICTED, Results, table
from megatron_zbpp.schedules import build, find

pytestmark = pytest.mark.one_release

SCRIPT = ROOT / 'scripts' / 'benchmark_gpt.py'
QUICK = ['--models', 'tiny', '--warm-up', '1', '--iterations', '2']
JOB = Job('tiny', 'zbpp', 'zb-v', 2, 1, 4, 1, 2, 2, 'local', 1, 2)
STAGE = {
    **{'model': 'tiny', 'layers': 2, 'micro_batch': 2, 'parameters': 1000},
    **{'f_seconds': 0.01, 'b_seconds': 0.012, 'w_seconds': 0.008},
    **{'fused_f_seconds': 0.01, 'fused_bw_seconds': 0.019, 'optimizer_seconds': 0.005},
    **{'b_bytes': 3e6, 'w_bytes': 1e6, 'message_bytes': 8192},
    **{'device': 'made up', 'device_bytes': 2e7, 'device_peak_tflops': 1.0},
}


def torchrun(folder, *flags):
    file = folder / 'result.json'
    launch = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node=2']
    done = commands.run([*launch, SCRIPT, *QUICK, '--json', file, *flags], timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, json.loads(file.read_text())['rows']


@pytest.mark.full
def test_sweep_goes_on_and_resumes(tmp_path):
    """What fails, before or in its processes, is a row; what is there is not measured again."""
    flags = ['--microbatches', '4', '--schedules']
    printed, rows = torchrun(
        tmp_path, *flags, 'megatron:interleaved,dualpipe-v', '--virtual-stages=9'
    )
    by_name = {row['schedule']: row for row in rows}
    assert by_name['interleaved']['kind'] == FAILED, '8 layers on 18 stages'
    assert '8 layers cannot be placed on 18 stages' in by_name['interleaved']['error']
    check_measured(by_name['dualpipe-v'])
    why = by_name['interleaved']['error']
    assert f'failed: tiny megatron:interleaved p=2 m=4 v=9: {why}' in printed
    picture = tmp_path / 'chart.svg'
    _, more = torchrun(tmp_path, *flags, 'dualpipe-v,megatron:1f1b', '--png', picture)
    assert more[:2] == rows, 'kept as they were'
    (row,) = more[2:]
    assert (row['runner'], row['schedule']) == ('megatron', '1f1b')
    check_measured(row)
    assert '<svg' in picture.read_text()
    assert (tmp_path / 'result.logs').is_dir()


def check_measured(row):
    assert row['kind'] == 'measured'
    assert len(row['seconds']) == 2 and min(row['seconds']) > 0
    tokens = row['m'] * row['micro_batch'] * models.find('tiny').sequence
    speed = row['tokens_per_second_per_gpu']
    assert speed == pytest.approx(tokens / row['median_seconds'] / 2)
    assert row['tflops_per_gpu'] == pytest.approx(
        speed * models.find('tiny').flops(1) / models.find('tiny').sequence / 1e12
    )
    assert 0 < row['bubble'] <= row['idle_all_ranks'] < 1 and row['peak_bytes'] > 1e6
    assert 5 < row['loss'] < 9, 'about log(1000) of random words'
    assert row['device'] == 'cpu' and row['mfu'] is None


@pytest.mark.on_ranks(2)
def test_a_killed_rank_ends_the_others(tmp_path):
    """Of two supervisors: theirs end by a signal and not at all, and both would be said to hang."""
    os.environ['PYTHONPATH'] = str(SUPPORT)
    row = Crew(tmp_path, timeout=180).run('doomed_worker', JOB, lambda text: None)
    assert 'rank 1: ended by signal 9' in row['error'] and '.1.log' in row['error']


def test_timeout(tmp_path):
    file = tmp_path / 'stage.json'
    flags = ['--single-gpu', '--timeout', '0.5', '--json', file]
    done = commands.run([sys.executable, SCRIPT, *QUICK, *flags], timeout=200)
    assert done.returncode == 1
    assert 'tiny stage: rank 0: not done after 0.5 s (--timeout); see' in done.stderr
    assert [row['kind'] for row in json.loads(file.read_text())['rows']] == [FAILED]


def test_single_gpu(tmp_path):
    flags = [*QUICK, '--single-gpu', '--predict-ranks', '8', '--schedules', '1f1b,zb-v,interleaved']
    flags += ['--processes', '1', '--peak-tflops', '0.5']
    printed, result = benched('benchmark_gpt', tmp_path, *flags)
    stage, *predicted = result['rows']
    f, b, w = (stage[f'{name}_seconds'] for name in 'fbw')
    fused = stage['fused_f_seconds'] + stage['fused_bw_seconds']
    assert stage['split_over_fused'] == pytest.approx((f + b + w) / fused)
    assert stage['b_bytes'] > stage['w_bytes'] > 0
    linear = 2 * 32 * 2 * (4 * 64 + (3 + 1 + 4 + 1) * 64) * 2  # inputs and gradients, bf16
    assert stage['w_bytes'] == pytest.approx(linear, rel=0.3)
    assert stage['mfu'] == pytest.approx(stage['tflops_per_gpu'] / 0.5)
    assert {row['schedule'] for row in predicted} == {'1f1b', 'zb-v', 'interleaved'}
    assert {row['kind'] for row in predicted} == {PREDICTED}
    assert 'predicted' in printed and 'held to W' in printed
    again = benched('benchmark_gpt', tmp_path, *flags)[1]['rows']
    assert again == result['rows'], 'measured and planned once'


def predicted(name, p=4, m=12, **changed):
    v = stages(find(name), None)
    (row,) = predict.predicted([STAGE | changed], predict.Pipeline('zbpp', name, p, m, v, 1e9))
    return row


def test_prediction_by_hand():
    link = 8192 / 1e9
    row = predicted('1f1b')
    makespan = (12 + 3) * (0.01 + 0.019) + 2 * 3 * link + 0.005
    # the edges that the steady state does not hide
    assert row['median_seconds'] == pytest.approx(makespan, rel=1e-3)
    assert row['tokens_per_second_per_gpu'] == pytest.approx(
        12 * 2 * 32 / row['median_seconds'] / 4
    )
    assert row['activation_bytes'] == 4 * 3e6
    assert row['peak_bytes'] == 1000 * 18 + 4 * 3e6
    assert row['fits'] and not predicted('1f1b', p=8)['fits']
    assert predicted('zb-v')['median_seconds'] < row['median_seconds'], 'W fills'
    more, less = (predicted('zb-2p', w_bytes=size)['activation_bytes'] for size in (3e6, 1e6))
    assert (more, less) == (8 * 3e6, 7 * 3e6 + 1e6), 'of one, B has run and W has not'
    impossible = predict.Pipeline('zbpp', 'zb-v', 4, 0, 2, 1e9)
    assert predict.predicted([STAGE], impossible) == []


def test_flops_of_the_papers_models():
    """Against GPT-3's own 6 N D, which leaves attention out."""
    for name, billions in {'1.5b': 1.5, '6.2b': 6.2, '28.3b': 28.3, '175b': 175}.items():
        model = models.find(name)
        attention = 6 * model.layers * model.hidden * model.sequence**2
        assert model.flops(1, model.tensor) - attention == pytest.approx(
            6e9 * billions * model.sequence, rel=0.03
        )


@needs_training
@pytest.mark.on_ranks(2)
def test_flops_are_megatrons():
    _find_megatron()
    from megatron.training.training import num_floating_point_operations

    for model in models.MODELS.values():
        sizes = Off(
            num_layers=model.layers,
            hidden_size=model.hidden,
            ffn_hidden_size=4 * model.hidden,
            num_attention_heads=model.heads,
            kv_channels=model.hidden // model.heads,
            seq_length=model.sequence,
            padded_vocab_size=model.vocabulary(model.tensor),
        )
        found = num_floating_point_operations(sizes, 24)
        assert found == pytest.approx(model.flops(24, model.tensor), rel=1e-12)


def test_results_file(tmp_path):
    file = tmp_path / 'result.json'
    results = Results(file)
    assert not results.has(JOB)
    results.add(JOB, {'error': 'rank 1: out of memory'})
    again = Results(file)
    assert again.has(JOB) and not again.has(JOB, retry_failed=True)
    figures = {'tokens_per_second_per_gpu': 7.0, 'tflops_per_gpu': 0.25, 'bubble': 0.125}
    figures |= {'idle_all_ranks': 0.25}
    again.add(JOB, figures | {'peak_bytes': 2**30, 'device_peak_tflops': 1.0, 'device': 'x'})
    (row,) = Results(file).rows
    assert row['mfu'] == 0.25 and 'error' not in row, 'in place of the failure'
    assert table([row]).split()[-5:] == ['25.0%', '1.0', 'GiB', '12.5%', '25.0%']
    file.write_text('[1]')
    with pytest.raises(
        ValueError,
        match=r'is not a result of this benchmark \(.* is not an object .*\): give another --json',
    ):
        Results(file)


@pytest.mark.parametrize('name', models.MODELS)
def test_published_pipelines_can_be_had(name):
    """Every rank has equal work, and the stage that is measured is one of them."""
    model = models.find(name)
    per_rank, rest = divmod(model.layers + 2 * model.ends, model.pipeline)
    assert rest == 0
    if name not in ('tiny', '175b'):
        assert model.stage_layers == per_rank
    build('zb-v', model.pipeline, 3 * model.pipeline)
