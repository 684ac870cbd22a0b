"""Launch lines that `zbpp advise` reads, what it says of them, and the lines that it proposes."""

from __future__ import annotations

import json
import re
import shlex
import sys
from dataclasses import replace
from typing import Any

import pytest
from forked import run
from jsonschema import Draft202012Validator
from paths import ROOT
from tables import rows_of

from megatron_zbpp.cli import main
from megatron_zbpp.emulation import cpu
from megatron_zbpp.launch.advise import AdvisedLine
from megatron_zbpp.partitioning.advice import advise
from megatron_zbpp.partitioning.layers import Layers
from megatron_zbpp.partitioning.setup_costs import FULL, NONE, SELECTIVE, Job, Setup, layer_costs
from megatron_zbpp.partitioning.setup_prediction import BY_RATES, BY_TIMES, predict
from megatron_zbpp.partitioning.shapes import Shape, layers_of

pytestmark = pytest.mark.one_release

TORCHRUN = 'torchrun --nproc-per-node 8 pretrain_gpt.py'
SIZES = (
    '--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --bf16 '
    '--micro-batch-size 1 --global-batch-size 16 --ffn-hidden-size 128 --swiglu '
)
PARALLEL = '--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel '
RATES = '--tflops 1 --bandwidth 100 --vocab 128'
LINE = f'{TORCHRUN} {SIZES}{PARALLEL}'
PLAIN = Setup(2, 2, 1, 1, 1, '1f1b', NONE, True)
EXPERTS = '--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 '


def read(words: str, gpus: int = 8) -> AdvisedLine:
    return AdvisedLine.of(words.split(), gpus)


def job_of(line: AdvisedLine, gpus: int = 8) -> Job:
    shape = line.shape(1.0, 100.0, 128)
    return Job(shape, gpus=gpus, memory=5 * 2.0**30, **line.job_sizes(gpus))


def test_the_model_and_its_setup() -> None:
    line = read(f'{LINE} --use-distributed-optimizer --transformer-impl local')
    job = job_of(line)
    more = {'ffn': 128, 'head_dim': 16, 'bandwidth': 100.0}
    assert job.shape == Shape('llama', 8, 64, 4, 128, 32, 1.0, **more)
    sizes = job.global_batch, job.shards_optimizer, job.overlaps, job.fused
    assert sizes == (16, True, False, False)
    assert line.own(job) == PLAIN


FULL_LAYERS = '--recompute-granularity full --recompute-method uniform --recompute-num-layers 1'


@pytest.mark.parametrize(
    ('words', 'setup'),
    [
        ('--num-virtual-stages-per-pipeline-rank 4', {'chunks': 4, 'schedule': 'interleaved'}),
        ('--pipeline-schedule zb-v', {'chunks': 2, 'schedule': 'zb-v'}),
        (FULL_LAYERS, {'saving': FULL}),
        ('--recompute-granularity selective', {}),
        ('--recompute-granularity selective --recompute-modules mlp', {'saving': SELECTIVE}),
        ('--decoder-first-pipeline-num-layers 3', {'layers': (3, 5)}),
    ],
)
def test_setups_of_lines(words: str, setup: dict[str, Any]) -> None:
    line = read(f'{LINE} {words}')
    assert line.own(job_of(line)) == replace(PLAIN, **setup)


@pytest.mark.parametrize(
    ('words', 'wanted'),
    [
        ('', {'overlaps': False, 'cp': 1, 'etp': 0, 'ends': (False, False), 'fused': True}),
        ('--overlap-grad-reduce', {'overlaps': True}),
        ('--context-parallel-size 2', {'cp': 2}),
        ('--expert-tensor-parallel-size 1', {'etp': 1}),
        ('--account-for-embedding-in-pipeline-split', {'ends': (True, False)}),
        ('--account-for-loss-in-pipeline-split', {'ends': (False, True)}),
        ('--attention-backend unfused', {'fused': False}),
        ('--attention-backend flash', {'fused': True}),
        ('--transformer-impl local --use-flash-attn', {'fused': True}),
    ],
)
def test_jobs_of_lines(words: str, wanted: dict[str, object]) -> None:
    job = job_of(read(f'{LINE} {words}'))
    assert {name: getattr(job, name) for name in wanted} == wanted


def test_sizes_that_follow_from_others() -> None:
    """Without a batch one microbatch of each replica, as Megatron has it."""
    line = read(LINE.replace('--global-batch-size 16', '').replace('batch-size 1', 'batch-size 3'))
    assert line.job_sizes(8)['global_batch'] == 3 * 8 // (2 * 2)
    plain = LINE.replace('--ffn-hidden-size 128', '')
    gated = job_of(read(f'{plain} --kv-channels 32')).shape
    assert (gated.ffn, gated.head_dim) == (64 * (4 * 64 * 2 // 3 // 64), 32)
    shape = job_of(read(plain.replace('--swiglu', ''))).shape
    assert (shape.model, shape.ffn, shape.width) == ('gpt', 4 * 64, 16)


OF_THE_LINE = """--pipeline-model-parallel-layout Et|tL --decoder-first-pipeline-num-layers 1
    --decoder-last-pipeline-num-layers 1 --num-layers-per-virtual-pipeline-stage 1
    --num-virtual-stages-per-pipeline-rank 2 --expert-model-parallel-size 2 --sequence-parallel
    --recompute-granularity selective --recompute-method block --recompute-num-layers 2
    --recompute-modules mlp core_attn --recompute-activations --distribute-saved-activations
    --pipeline-schedule zb-h1 --pipeline-offload half --enable-optimizer-post-validation"""


def test_proposed_lines_have_nothing_of_the_setup_of_the_line() -> None:
    """Whatever that was made of; and all else."""
    line = read(LINE)
    line = replace(line, words=(*line.words, *OF_THE_LINE.split(), '--lr', '1e-4'))
    setup = Setup(1, 4, 1, 1, 2, '1f1b', NONE, False)
    words = line.line_of(job_of(line), setup)
    kept = LINE.replace(PARALLEL, '').replace('--micro-batch-size 1 ', '').split()
    given = """--tensor-model-parallel-size 1 --pipeline-model-parallel-size 4
        --micro-batch-size 2""".split()
    assert words == [*kept, '--lr', '1e-4', *given]


def test_proposed_lines_are_read_as_what_they_propose() -> None:
    """All setups of a job: each line has the model, batch and setup that it is proposed for."""
    line = read(f'{LINE} --lr 1e-4 --recompute-activations')
    job = job_of(line)
    made = advise(job, ('1f1b', 'interleaved', 'zb-h1', 'zb-v', 'zb-interleaved'), count=10_000)
    assert len({each.setup.schedule for each in made.best}) == 5
    for each in made.best[:: max(1, len(made.best) // 40)]:
        words = line.line_of(job, each.setup)
        again = AdvisedLine.of(words, 8)
        own = again.own(job_of(again))
        assert job_of(again) == job and own == each.setup, shlex.join(words)
        assert words.count('--lr') == 1 and '--recompute-activations' not in words
        ours = '--pipeline-schedule' in words
        assert ('megatron_zbpp.launch' in words) == ours
        assert predict(job, own) == each


def test_more_processes() -> None:
    line = read(LINE, 32)
    words = line.line_of(job_of(line, 32), Setup(1, 4, 2, 1, 1, 'zb-v', sequence_parallel=False))
    start = 'torchrun --nnodes 4 --nproc-per-node 8 -m megatron_zbpp.launch pretrain_gpt.py'
    assert words[: len(start.split())] == start.split() and '--sequence-parallel' not in words


def test_experts() -> None:
    line = read(f'{LINE} {EXPERTS} --expert-model-parallel-size 2 --moe-layer-freq [0]+[1]*7')
    if line.lacks:
        with pytest.raises(ValueError, match='without it advice is for dense models alone'):
            job_of(line)
        return
    job = job_of(line)
    shape = job.shape
    assert (shape.model, shape.experts, shape.top_k, shape.expert_ffn) == ('moe', 4, 2, 32)
    assert (shape.dense_first, line.own(job).ep) == (1, 2)
    with pytest.raises(ValueError, match=r'--moe-layer-freq \[0, 1, 0, 1'):
        job_of(read(f'{LINE} {EXPERTS} --moe-layer-freq [0,1]*4'))


SHARDED = '--use-distributed-optimizer'
RESHARDABLE = '--dist-ckpt-optim-fully-reshardable'
# flags of the line, whether lines of another placement load and save, and what the note says
CHECKPOINTS = [
    ('', True, 'goes to all lines; where tp or pp differ'),
    (f'{SHARDED} {RESHARDABLE}', True, f'all lines if it was saved with {RESHARDABLE}, too; where'),
    (f'{SHARDED} --no-load-optim', True, 'goes to all lines; where tp or pp differ'),
    (SHARDED, False, f'kept by rank: save it once with {RESHARDABLE}'),
    ('--ckpt-format torch', False, '--ckpt-format torch keeps files by rank: convert it'),
    (f'--ckpt-format=torch {SHARDED} {RESHARDABLE}', False, 'torch keeps files by rank'),
]


@pytest.mark.parametrize(('words', 'goes', 'told'), CHECKPOINTS)
def test_checkpoints_go_where_megatron_takes_them(words: str, goes: bool, told: str) -> None:
    """Elsewhere a line neither loads nor, from scratch then, saves over them; a note says why."""
    line = read(f'{LINE} --load old --save=new --save-interval 9 {words}')
    job = job_of(line)
    own = line.own(job)
    (note,) = line.checkpoint_notes()
    assert told in note
    others = [replace(own, tp=1), replace(own, pp=4), replace(own, schedule='zb-v', chunks=2)]
    for setup in (own, replace(own, schedule='zb-h1'), *others):
        made = line.line_of(job, setup)
        kept = goes or setup not in others
        assert ('--load' in made, '--save=new' in made, 'old' in made) == (kept,) * 3, setup
        assert '--save-interval' in made
    assert not read(f'{LINE} {words}').checkpoint_notes()


def asked(words: str, *more: str, rates: str = RATES) -> list[str]:
    given = ['advise', '--gpus', '8', '--memory', '5GiB', *more, *rates.split()]
    return [*given, '--', *words.split()]


@pytest.fixture(autouse=True)
def imported(monkeypatch) -> None:
    """Megatron is imported already, as these tests are in one process with others."""
    monkeypatch.setattr(cpu, 'install', lambda: None)


def test_printed(capsys, monkeypatch) -> None:
    """The first row is the line as it is, and the best is no slower."""
    monkeypatch.setenv('COLUMNS', '80')
    few = ('--count', '3', '--schedules', '1f1b,zb-v')
    words = [sys.executable, '-m', 'megatron_zbpp.cli', *asked(LINE, '--json', *few)]
    done = run(words, timeout=200)
    found = json.loads(done.stdout)
    schema = json.loads((ROOT / 'docs/zbpp.schema.json').read_text())
    own = {'$ref': '#/$defs/advise', '$defs': schema['$defs']}
    assert not list(Draft202012Validator(own).iter_errors(found))
    assert found['is_own'] and found['against']['launch_line'] == LINE.strip()
    assert found['best'][0]['seconds'] <= found['against']['seconds']
    assert found['against']['seconds_to'] == BY_RATES[1] * found['against']['seconds']
    assert main(asked(LINE, *few)) == 0
    printed = capsys.readouterr().out
    assert all(len(line) <= 80 for line in printed.splitlines())
    rows = printed.splitlines()[1:6]
    assert rows[1].startswith('launch line') and [row[0] for row in rows[2:5]] == ['1', '2', '3']
    pasted = printed.partition('1: ')[2].partition('\n  torchrun')[2].partition('\n\n')[0]
    pasted, best = f'torchrun{pasted}'.replace('\\\n', ' '), found['best'][0]['launch_line']
    assert shlex.split(pasted) == shlex.split(best)


@pytest.mark.parametrize(('line', 'told'), rows_of('refused_lines.txt', 'zbpp advise'))
def test_what_cannot_work(line: str, told: str, capsys) -> None:
    for name, words in (('LINE', LINE), ('RATES', RATES), ('TORCHRUN', TORCHRUN)):
        line = line.replace(name, words)
    assert main(['advise', '--gpus', '8', '--memory', '5GiB', *line.split()]) == 2
    said = capsys.readouterr().err
    assert said.count('\n') == 1 and re.search(told, said), said


def test_segments_of_a_pattern() -> None:
    line = read(f'{LINE} --hybrid-layer-pattern M*-M|M*-M')
    with pytest.raises(ValueError, match='without' if line.lacks else r'give letters M'):
        job_of(line)


def test_measured_layers_of_slow_links(tmp_path, capsys) -> None:
    """Others take what they do at the rate that the layers were made with: links have their own."""
    slow = '--within 0.005 --between 0.005'
    line = read(LINE)
    job = replace(job_of(line), within=0.005, between=0.005)
    job = replace(job, shape=replace(job.shape, tflops=0.01, bandwidth=0.0))
    file = tmp_path / 'layers.json'
    file.write_text(layer_costs(job, line.own(job)).layers.to_json())
    words = f'advise --gpus 8 --memory 5GiB --vocab 128 {slow} --json --schedules 1f1b --count 99'
    assert main([*words.split(), '--layers-file', str(file), '--', *LINE.split()]) == 0
    rows = json.loads(capsys.readouterr().out)['best']
    assert len({row['tp'] for row in rows}) == 3
    for row in rows:
        others = Setup(row['tp'], row['pp'], 1, 1, row['micro_batch'], '1f1b', row['recompute'])
        made = predict(job, replace(others, sequence_parallel=row['tp'] > 1))
        assert row['seconds'] == pytest.approx(made.seconds, rel=1e-6), others
    slower = ['--within', '0.002', '--layers-file', str(file), '--', *LINE.split()]
    assert main([*words.split(), *slower]) == 2
    told = r'--within 0\.002, .* alone would take .* and all of --layers-file .*: give the rates of'
    assert re.search(told, capsys.readouterr().err)


def test_measured_layers(tmp_path, capsys) -> None:
    """A line that takes as long as measured; its others in proportion."""
    shape = Shape('llama', 8, 64, 4, 128, 32, 0.01, ffn=128, tp=2)
    layers = Layers(layers_of(shape).layers)
    file = tmp_path / 'layers.json'
    words = ['advise', '--gpus', '8', '--memory', '5GiB', '--schedules', '1f1b', '--vocab', '128']
    took = []
    for factor in (1.0, 3.0):
        file.write_text(layers.scaled(factor).to_json())
        assert main([*words, '--json', '--layers-file', str(file), '--', *LINE.split()]) == 0
        own = json.loads(capsys.readouterr().out)['against']
        assert own['seconds_to'] == BY_TIMES[1] * own['seconds']
        took.append(own['seconds'])
    assert took[1] / took[0] == pytest.approx(3, rel=0.05)
    sums = sum(layer.time for layer in layers)
    assert took[0] == pytest.approx(sums * (8 + 1) / 2, rel=0.1), 'm + p - 1 turns of half of it'
    file.write_text(Layers(layers_of(shape).layers[1:]).to_json())
    assert main([*words, '--layers-file', str(file), '--', *LINE.split()]) == 2
    assert '--layers-file has 9 layers, the launch line 8 and' in capsys.readouterr().err


def doctored(capsys, words: list[str], *rates: str) -> dict[str, Any]:
    code = main(['doctor', '--json', *rates, '--', *words])
    found = json.loads(capsys.readouterr().out)
    assert code == 0 or found['missing_script'], found
    return found['launch_line']


@pytest.mark.parametrize('machine', ['', '--within 0.01', '--gpus-per-node 2 --between 0.1'])
def test_doctor_and_advise_agree(machine: str, capsys) -> None:
    """Gain, time and memory of each advised line, and of the line itself, are the same in both."""
    rates = [*RATES.split(), *machine.split()]
    few = ('--schedules', '1f1b,zb-h1,zb-v,v-half', '--pp', '2', '--tp', '2', '--micro-batch', '1')
    assert main(asked(LINE, *few, '--json', rates=' '.join(rates))) == 0
    made = json.loads(capsys.readouterr().out)
    rows = [row for row in made['best'] if row['recompute'] == 'none']
    assert len({row['gain'] for row in rows}) >= 3
    for row in [made['against'], *rows]:
        found = doctored(capsys, shlex.split(row['launch_line']), *rates)['predicted']
        assert found['nbytes'] == row['bytes'] and found['seconds'] == row['seconds']
        assert 1 - found['seconds'] / found['rival'] == row['gain']
        both = zip(found['fixed'], found['nbytes'], strict=True)
        assert all(0 < own < most for own, most in both)
        main(['doctor', *rates, '--', *shlex.split(row['launch_line'])])
        text = capsys.readouterr().out
        more = 'more' if row['gain'] < 0 else 'less'
        gain = f'predicted: {row["seconds"]:.4g} s an iteration, {abs(row["gain"]):.1%} {more} time'
        assert gain in text and f'{max(row["bytes"]) / 2**30:.1f} GiB on the fullest' in text
        others = text.replace(gain, '').count('time than')
        assert others == ('--pipeline-schedule' not in row['launch_line']) * 2, 'one gain of a line'


@pytest.mark.parametrize(
    ('words', 'rates', 'told'), rows_of('refused_lines.txt', 'memory that is not predicted')
)
def test_memory_that_is_not_predicted(words: str, rates: str, told: str, capsys) -> None:
    given = {'RATES': RATES.split(), 'none': []}[rates]
    found = doctored(capsys, f'{LINE} {words}'.split(), *given)['predicted']
    assert not found['nbytes'] and found['seconds'] is None
    (note,) = found['notes']
    assert note.startswith('memory in GiB is not predicted: ') and told in note


def test_memory_without_rates(capsys) -> None:
    """Bytes need the model's shape alone, not its times."""
    line = f'{LINE} --pipeline-schedule zb-v'.split()
    plain = doctored(capsys, line, '--vocab', '128')['predicted']
    timed = doctored(capsys, line, *RATES.split())['predicted']
    assert plain['nbytes'] == timed['nbytes'] and plain['seconds'] is None
