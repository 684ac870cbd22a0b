"""Launch lines that `zbpp advise` reads, what it says of them, and the lines that it proposes."""

from __future__ import annotations

import json
import re
import shlex
import sys

import pytest
from commands import run
from jsonschema import Draft202012Validator
from paths import ROOT

from megatron_zbpp.cli import main
from megatron_zbpp.mcore.command_line import doctor
from megatron_zbpp.mcore.command_line.advise import AdvisedLine
from megatron_zbpp.partitioning.advise.job import FULL, NONE, SELECTIVE, Job, Setup
from megatron_zbpp.partitioning.advise.prediction import predict
from megatron_zbpp.partitioning.advise.search import advise
from megatron_zbpp.partitioning.layers import Layers
from megatron_zbpp.partitioning.shapes import Shape, layers_of

TORCHRUN = 'torchrun --nproc-per-node 8 pretrain_gpt.py'
SIZES = (
    '--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --bf16 '
    '--micro-batch-size 1 --global-batch-size 16 --ffn-hidden-size 128 --swiglu '
)
PARALLEL = '--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel '
RATES = '--tflops 1 --bandwidth 100 --vocab 128'
LINE = f'{TORCHRUN} {SIZES}{PARALLEL}'
EXPERTS = '--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 '


def read(words: str, gpus: int = 8) -> AdvisedLine:
    return AdvisedLine.of(words.split(), gpus)


def job_of(line: AdvisedLine, gpus: int = 8) -> Job:
    shape = line.shape(1.0, 100.0, 128)
    return Job(shape, gpus=gpus, memory=5 * 2.0**30, **line.sizes(gpus))


def test_the_model_and_its_setup() -> None:
    line = read(f'{LINE} --use-distributed-optimizer --transformer-impl local')
    job = job_of(line)
    assert job.shape == Shape('llama', 8, 64, 4, 128, 32, 1.0, ffn=128, bandwidth=100.0)
    assert (job.global_batch, job.shards_optimizer, job.overlaps, job.fused) == (
        16,
        True,
        False,
        False,
    )
    assert line.own(job) == Setup(2, 2, 1, 1, 1, '1f1b', NONE, True)


@pytest.mark.parametrize(
    ('words', 'setup'),
    [
        (
            '--num-virtual-stages-per-pipeline-rank 4',
            Setup(2, 2, 4, 1, 1, 'interleaved', NONE, True),
        ),
        ('--pipeline-schedule zb-v', Setup(2, 2, 2, 1, 1, 'zb-v', NONE, True)),
        (
            '--recompute-granularity full --recompute-method uniform --recompute-num-layers 1',
            Setup(2, 2, 1, 1, 1, '1f1b', FULL, True),
        ),
        ('--recompute-granularity selective', Setup(2, 2, 1, 1, 1, '1f1b', NONE, True)),
        (
            '--recompute-granularity selective --recompute-modules mlp',
            Setup(2, 2, 1, 1, 1, '1f1b', SELECTIVE, True),
        ),
        (
            '--decoder-first-pipeline-num-layers 3',
            Setup(2, 2, 1, 1, 1, '1f1b', NONE, True, (3, 5)),
        ),
    ],
)
def test_setups_of_lines(words: str, setup: Setup) -> None:
    line = read(f'{LINE} {words}')
    assert line.own(job_of(line)) == setup


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
    if line.line.lacks:
        with pytest.raises(ValueError, match='without it advice is for dense models alone'):
            job_of(line)
        return
    job = job_of(line)
    shape = job.shape
    assert (shape.model, shape.experts, shape.top_k, shape.expert_ffn) == ('moe', 4, 2, 32)
    assert (shape.dense_first, line.own(job).ep) == (1, 2)
    with pytest.raises(ValueError, match=r'--moe-layer-freq \[0, 1, 0, 1'):
        job_of(read(f'{LINE} {EXPERTS} --moe-layer-freq [0,1]*4'))


def asked(words: str, *more: str, rates: str = RATES) -> list[str]:
    given = ['advise', '--gpus', '8', '--memory', '5GiB', *more, *rates.split()]
    return [*given, '--', *words.split()]


@pytest.fixture(autouse=True)
def imported(monkeypatch) -> None:
    """Megatron is imported already, as these tests are in one process with others."""
    monkeypatch.setattr(doctor, '_make_importable', lambda: None)


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
    assert main(asked(LINE, *few)) == 0
    printed = capsys.readouterr().out
    assert all(len(line) <= 80 for line in printed.splitlines())
    rows = printed.splitlines()[1:6]
    assert rows[1].startswith('launch line') and [row[0] for row in rows[2:5]] == ['1', '2', '3']
    pasted = printed.partition('1: ')[2].partition('\n  torchrun')[2].partition('\n\n')[0]
    assert shlex.split('torchrun' + pasted.replace('\\\n', ' ')) == shlex.split(
        found['best'][0]['launch_line']
    )


REFUSED = {
    'too little': (
        asked(f'{LINE} --micro-batch-size 2', '--memory', '4.0001GiB', '--schedules', '1f1b'),
        r'nothing fits 4\.00 GiB on each of 8 GPUs: the least is 4\.0\d GiB .*give --memory 5GiB',
    ),
    'no vocabulary': (asked(LINE, rates='--tflops 1'), 'it has no --vocab-size: give --vocab'),
    'no rates': (asked(LINE, rates='--vocab 128'), 'give --tflops, what a matrix product reaches'),
    'no hidden size': (asked(LINE.replace('--hidden-size 64', '')), '--hidden-size is missing'),
    'no batch': (
        asked(LINE.replace('--micro-batch-size 1 --global-batch-size 16', '')),
        '--global-batch-size is missing: add it',
    ),
    'auto': (asked(f'{LINE} --pipeline-schedule auto'), 'auto is no schedule by name'),
    'a file': (asked(f'{LINE} --pipeline-schedule-file x.json'), 'schedule-file is no schedule by'),
    'GPUs': (asked(LINE, '--gpus', '6'), '6 GPUs do not divide by tp 2 x cp 1 x pp 2'),
    'a shape beside it': (asked(LINE, '--hidden', '64'), '--hidden is in the launch line: leave'),
    'two-way': (asked(LINE, '--schedules', 'chimera'), '--schedules chimera: advice is for whole'),
}


@pytest.mark.parametrize('name', REFUSED)
def test_what_cannot_work(name: str, capsys) -> None:
    """One line that names the value and the cure."""
    words, told = REFUSED[name]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.count('\n') == 1 and re.search(told, said), said


def test_segments_of_a_pattern() -> None:
    line = read(f'{LINE} --hybrid-layer-pattern M*-M|M*-M')
    with pytest.raises(ValueError, match='without' if line.line.lacks else r'give letters M'):
        job_of(line)


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
        took.append(json.loads(capsys.readouterr().out)['against']['seconds'])
    assert took[1] / took[0] == pytest.approx(3, rel=0.05)
    sums = sum(layer.time for layer in layers)
    assert took[0] == pytest.approx(sums * (8 + 1) / 2, rel=0.1), 'm + p - 1 turns of half of it'
    file.write_text(Layers(layers_of(shape).layers[1:]).to_json())
    assert main([*words, '--layers-file', str(file), '--', *LINE.split()]) == 2
    assert '--layers-file has 9 layers, the launch line 8 and' in capsys.readouterr().err
