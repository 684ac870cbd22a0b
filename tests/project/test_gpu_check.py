"""scripts/gpu_check.sh on a machine that only looks as if it had a GPU; and its rehearsal."""

import json
import os
import re
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from commands import run
from gpu import CUDA
from paths import ROOT

from benchmarks.one_gpu import REHEARSAL, ddp_race, nccl, ranks

SCRIPT = ROOT / 'scripts' / 'gpu_check.sh'
# stands for the interpreter: writes down what it is to run; a virtual environment has it, too
PYTHON = Path(__file__).with_name('stand_in_python.sh').read_text()
KERNELS = ('torch', 'flash', 'cuDNN', 'unfused')
# not what the caller of the tests has set, as .ci/run sets PYTHON
UNSET = dict.fromkeys(
    ('WHEELS', 'PIP_FIND_LINKS', 'TESTS', 'NO_VENV', 'REHEARSE', 'STAGES', 'LIMIT'), ''
)


@pytest.fixture
def check(tmp_path):
    """Runs the script: what it left, what it ran of tests and benchmarks, and how it ended."""

    def run_check(te='yes', fails='nothing', smi='echo NVIDIA H100', **more):
        for name, text in (('python3', PYTHON), ('nvidia-smi', f'#!/bin/sh\n{smi}\n')):
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        env = {'PATH': f'{tmp_path}{os.pathsep}{os.environ["PATH"]}', 'TE': te, 'FAILS': fails}
        env |= {name: str(tmp_path / name.lower()) for name in ('RESULTS', 'VENV', 'CALLS')}
        env |= UNSET | {'PYTHON': 'python3', 'LACKS': 'nothing', 'HANGS': 'nothing', **more}
        done = run(['bash', SCRIPT], env=env)
        calls = tmp_path / 'calls'
        ran = calls.read_text().splitlines() if calls.exists() else []
        tests = [c for c in ran if c.startswith(('-m pytest', '-m benchmarks', 'scripts/'))]
        reports = list((tmp_path / 'results').glob('*.md'))
        return done, tests, reports[0].read_text() if reports else None

    return run_check


def test_order(check):
    """Tests first, then what is proven on one GPU, then what is measured."""
    done, ran, report = check()
    assert done.returncode == 0, done.stderr
    assert [
        re.sub(r' (--(models|json|logs)|tests/(dist|megatron)/).*', '', call) for call in ran
    ] == [
        '-m pytest -v -rs -m gpu',
        '-m pytest -v -rs -m te and not gpu',
        '-m pytest -v -rs tests/unit/emulation/test_te_sources.py',
        '-m benchmarks.one_gpu.ddp_race',
        '-m benchmarks.one_gpu.nccl',
        '-m benchmarks.one_gpu.spinning',
        '-m benchmarks.one_gpu.copies --mib 1024',
        'scripts/benchmark_step.py --parameters 1000',
        *(f'-m benchmarks.one_gpu.slices --attention {kernel}' for kernel in KERNELS),
        '-m benchmarks.one_gpu.shards',
        'scripts/benchmark_gpt.py --single-gpu',
    ]
    assert report.startswith('# NVIDIA H100, ') and 'a table' in report
    assert report.count('3 passed in 0.1s') == 3 and 'benchmark of one stage: done' in report
    assert 'commit them: git add' in done.stderr


SPINNING = '- spinning receives and waiting sends: done'


@pytest.mark.parametrize(
    ('given', 'status', 'number', 'said'),
    [
        ({'te': 'no'}, 0, 12, ['Transformer Engine: not run: it cannot be imported']),
        # a failure does not keep the rest from running
        ({'fails': '-m gpu'}, 1, 14, ['- tests on a GPU: FAILED (1): ', '3 passed']),
        ({'STAGES': 'streams micro'}, 0, 4, [SPINNING]),
        # what does not end is ended, told, and the next begins
        (
            {'STAGES': 'streams micro', 'LIMIT': '6', 'HANGS': 'ddp_race'},
            *(1, 4, ['waits for W: FAILED: not done after 6 s', SPINNING]),
        ),
        # refused before anything runs
        ({'STAGES': 'streams streems'}, 2, 0, ['STAGES has streems: give some of']),
    ],
    ids=['no TE', 'failure', 'stages', 'hangs', 'no stage'],
)
def test_stages(check, given, status, number, said):
    done, ran, report = check(**given)
    assert (done.returncode, len(ran)) == (status, number), done.stderr
    assert (report is None) == (not number)
    assert all(each in (report or done.stderr) for each in said)
    if 'streams' in given.get('STAGES', '') and number:
        assert ran[:2] == ['-m benchmarks.one_gpu.ddp_race', '-m benchmarks.one_gpu.spinning']


def test_earlier_results_stay(check, tmp_path):
    """A second run on a day has files of its own."""
    check(STAGES='streams')
    (first,) = (tmp_path / 'results').glob('*.md')
    said = first.read_text()
    check(STAGES='micro')
    second = first.with_name(f'{first.stem}-2.md')
    assert first.read_text() == said and 'copies both ways' in second.read_text()


def test_without_a_virtual_environment(check, tmp_path):
    """For an interpreter that is in one: only what it lacks is installed, and never torch."""
    done, _, _ = check(NO_VENV='1', STAGES='streams', LACKS='megatron.core')
    assert done.returncode == 0, done.stderr
    calls = (tmp_path / 'calls').read_text().splitlines()
    assert not [call for call in calls if call.startswith('-m venv')]
    (installed,) = [call for call in calls if call.startswith('-m pip install')]
    assert installed.endswith(f'--no-deps --target {tmp_path / "venv"} megatron-core')


def test_a_rehearsal_is_no_result(check):
    """It needs no GPU, names no folder of results by itself, and says what it is."""
    done, ran, _ = check(REHEARSE='1', RESULTS='', smi='exit 9')
    assert done.returncode == 2 and not ran and 'name a folder in RESULTS' in done.stderr


REHEARSED = {
    'streams': (REHEARSAL, 'W returns a dummy, side stream: reduced 1.00, 1.00 expected'),
    'nccl': (REHEARSAL, 'p2, megatron: done', 'p2, zb-v: done'),
    'micro': (REHEARSAL, 'nothing spins here', 'two streams: ', 'validated later ms'),
    'slices': (REHEARSAL, 'torch: slices differ by', 'right', 'flash: Transformer Engine', 'ms'),
    'shards': (REHEARSAL, 'S: ', 'T: ', 'reduction of the gradient, 2 ranks: ', 'right'),
    'stage': ('Rows of kind predicted', 'rehearsal-without-a-GPU.json', 'split/fused'),
}
LONG = ('nccl', 'slices', 'shards')


@pytest.mark.skipif(CUDA, reason='on a GPU nothing is rehearsed')
@pytest.mark.parametrize(
    'stage',
    [pytest.param(stage, marks=pytest.mark.full if stage in LONG else ()) for stage in REHEARSED],
)
def test_rehearsal(tmp_path, stage):
    env = UNSET | {name: str(tmp_path / name.lower()) for name in ('RESULTS', 'VENV')}
    env |= {'REHEARSE': '1', 'NO_VENV': '1', 'PYTHON': sys.executable, 'STAGES': stage}
    words = '--models tiny --warm-up 1 --iterations 2 --predict-ranks 2 --schedules zb-v'.split()
    done = run(['bash', SCRIPT, *words], timeout=900, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    (report,) = (tmp_path / 'results').glob('*.md')
    said = report.read_text()
    assert said.startswith('# rehearsal without a GPU') and 'Nothing here was run on a GPU' in said
    assert all(words in said for words in REHEARSED[stage]), said
    if stage == 'stage':
        rows = json.loads(report.with_suffix('.json').read_text())['rows']
        assert ('predicted', 'zb-v') in {(row['kind'], row['schedule']) for row in rows}
    done = re.findall('^- .*: done$', said, re.M)
    assert len(done) == {'micro': 3, 'slices': 4}.get(stage, 1), said
    assert not list((tmp_path / 'venv').iterdir()), 'nothing had to be installed'


def test_what_it_names_is_there():
    for path in re.findall(r'(?:scripts|tests|docs)/[\w/.]*\w', SCRIPT.read_text()):
        assert (ROOT / path).exists(), path


# ---- benchmarks/one_gpu tells what fails: ranks that end, ranks that hang, other bits.


SLEEPS = ['-c', 'import time; time.sleep(600)']
SAYS = ['-c', 'import os; print(os.environ["NCCL_HOSTID"], os.environ["LOCAL_RANK"])']


def test_each_rank_is_a_host_of_its_own(tmp_path):
    """On the first GPU: NCCL asks host and GPU together, and takes sockets."""
    assert ranks.run(2, SAYS, tmp_path, 120) == ''
    said = [(tmp_path / f'rank{rank}.log').read_text() for rank in range(2)]
    assert said == ['host0 0\n', 'host1 0\n']


@pytest.mark.parametrize(
    ('words', 'seconds', 'said'),
    [
        (SLEEPS, 1, 'ranks [0, 1] hang: they had not ended after 1 s'),
        (['-c', 'import os, sys; sys.exit(3 * int(os.environ["RANK"]))'], 120, 'rank 1 ended with'),
    ],
    ids=['hang', 'end'],
)
def test_ranks_that_fail(tmp_path, words, seconds, said):
    assert ranks.run(2, words, tmp_path, seconds).startswith(said)


@pytest.mark.parametrize('differs', [None, 'loss', 'parameters_sha256', 'optimizer_sha256'])
def test_other_bits_are_told(tmp_path, monkeypatch, capsys, differs):
    """Of losses, parameters and the optimizer's state."""

    def train(size, words, logs, seconds, **more):
        logs.mkdir(parents=True, exist_ok=True)
        (logs / 'rank0.log').write_text('memory: 5\n')
        names = {'loss': 'a', 'parameters_sha256': {'0': 'b'}, 'optimizer_sha256': {'0': 'c'}}
        if differs and 'zb-v' in words:
            names[differs] = 'other'
        hashes = {name: value for name, value in names.items() if name != 'loss'}
        lines = [{'loss': names['loss']}, hashes]
        (logs / 'metrics.jsonl').write_text('\n'.join(map(json.dumps, lines)))
        return ''

    monkeypatch.setattr(ranks, 'run', train)
    args = Namespace(only=['zb-h1', 'zb-v'], logs=tmp_path, iterations=1, seconds=1)
    assert nccl.run_case(nccl.CASES[0], args, tmp_path) == (differs is None)
    out = capsys.readouterr().out
    assert 'p2, zb-h1: done memory: 5' in out
    assert ('zb-v: FAILED: not the bits of the reference' in out) == (differs is not None)


@pytest.mark.parametrize('case', nccl.CASES, ids=lambda case: case.name)
def test_flags_are_the_examples(case, tmp_path, monkeypatch):
    """Each training that is planned is one that the example takes."""
    monkeypatch.syspath_prepend(str(ranks.ROOT / 'examples' / 'gpt'))
    import command_line

    monkeypatch.setenv('WORLD_SIZE', str(case.num_ranks))
    for schedule in ('megatron', *case.schedules):
        words = case.words(schedule, tmp_path / 'metrics', tmp_path / 'text', 6)
        args = command_line.parse_args(words[1:])
        assert (args.pipeline_model_parallel_size, args.data_parallel_size) == case.sizes[::2]


def test_the_defect_is_expected_on_a_gpu(monkeypatch, capsys):
    """A race that does not show proves nothing: it is told, and fails."""
    monkeypatch.setattr(ddp_race.torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(ddp_race.torch.cuda, 'get_device_name', lambda: 'made up')
    for early, code in ((0.0, 0), (1.0, 1)):

        def reduced(device, defined, side, early=early):
            return early if side and not defined else 1.0

        monkeypatch.setattr(ddp_race, 'reduced', reduced)
        assert ddp_race.main() == code
        assert ('NOT AS EXPECTED' in capsys.readouterr().out) == bool(code)
