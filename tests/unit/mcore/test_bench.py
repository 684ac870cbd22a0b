"""Launch lines of a bench, what it reads of a log, and benches that end early."""

import json
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_zbpp.cli import main
from megatron_zbpp.launch.launch_line import OWN, Bench, Printed, Step

FLAGS = (
    '--num-layers 4 --micro-batch-size 1 --global-batch-size 8 --seq-length 16 '
    '--pipeline-model-parallel-size 2'
).split()
TORCHRUN = ['torchrun', '--nproc-per-node', '2']


def test_lines_differ_in_the_schedule_alone():
    job = Bench.of([*TORCHRUN, 'pretrain_gpt.py', *FLAGS, '--save', 'mine', '--train-iters=500'])
    start, stock, ours = job.start('c'), job.run(OWN, 4, 'c'), job.run('zb-v', 4, 'c')
    assert start[:6] == [*TORCHRUN, '-m', 'megatron_zbpp.launch', 'pretrain_gpt.py']
    assert [word for word in ours if word not in stock] == ['--pipeline-schedule', 'zb-v']
    assert 'mine' not in stock and '--train-iters=500' not in stock
    assert stock[stock.index('--train-iters') + 1] == '4'
    assert start[start.index('--train-iters') + 1] == '1'
    assert stock[stock.index('--load') + 1] == 'c' == start[start.index('--save') + 1]
    assert job.tokens == 8 * 16 and job.load is None and job.own == ()
    # with its schedule, and stock without any flag of ours writes the checkpoint
    ours = ['--pipeline-schedule', 'zb-h1', '--pipeline-offload', 'half']
    job = Bench.of([*TORCHRUN, 'pretrain_gpt.py', *FLAGS, *ours, '--load', 'mine'], cpu=True)
    assert '--cpu' in job.launcher and job.load == 'mine'
    own, other = job.run(OWN, 4, 'mine'), job.run('zb-v', 4, 'mine')
    assert own[own.index('--pipeline-schedule') + 1] == 'zb-h1' and '--pipeline-offload' in own
    assert other[other.index('--pipeline-schedule') + 1] == 'zb-v' and 'zb-h1' not in other
    assert '--ckpt-format' not in own, "the user's checkpoint is read as it is"
    assert not {'--pipeline-schedule', '--pipeline-offload', 'half'} & {*job.start('c')}
    with pytest.raises(ValueError, match='the launch line names no script: give all of it'):
        Bench.of(FLAGS)


def test_what_a_log_tells():
    printed = Printed()
    for line in (
        '[Rank 1] (after 1 iterations) memory (MB) | allocated: 9.1 | max allocated: 20.5 | ...\n',
        '  error_injection_rate ............................ 0\n',
        ' [2026] iteration        1/       2 | elapsed time per iteration (ms): '
        '250.5 | lm loss: 5.555363E+00 | grad norm: 1.0 | idle GPU time: 12.5% | pipeline bubble: ',
        ' [2026] iteration        2/       2 | elapsed time per iteration (ms): 100.0 | ...\n',
        'x.py: error: first: no\n',
        'RuntimeError: connection closed\n',
    ):
        printed.read(line)
    assert printed.steps == [Step(0.2505, '5.555363E+00', 0.125), Step(0.1, None, None)]
    assert printed.peak_bytes == 20.5 * 2**20
    assert printed.said == 'x.py: error: first: no'


JOB = """
ms=$(({ms})); case "$*" in *zb-v*) {ours} ;; esac
echo " iteration 1/ 2 | elapsed time per iteration (ms): 20.0 | lm loss: 5.1E+00 |"
echo " iteration 2/ 2 | elapsed time per iteration (ms): $ms.0 | lm loss: {loss}E+00 |"
echo ran >> ran
"""


def printed(folder: Path, capsys, *words: str, rounds: int = 2, **job: str) -> tuple[int, str]:
    """Exit code and output of a bench of a shell script that logs as Megatron does."""
    usual = {'ours': 'true', 'loss': '5.0', 'ms': '10'}
    (folder / 'job.sh').write_text(JOB.format(**{**usual, **job}))
    of = ['--rounds', str(rounds), '--iterations', '2', '--schedules', 'zb-v', *words, '--']
    code = main(['bench', *of, 'sh', 'job.sh', 'megatron_zbpp.launch', 'job.py'])
    return code, capsys.readouterr().out


def bench(folder: Path, capsys, rounds: int = 2, **job: str) -> tuple[int, dict]:
    """Exit code and JSON of it."""
    code, out = printed(folder, capsys, '--json', rounds=rounds, **job)
    return code, json.loads(out)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_runs_are_in_turns_and_kept(folder, capsys):
    code, found = bench(folder, capsys)
    own, ours = found['schedules']
    assert code == 0 and (own['name'], ours['name']) == (OWN, 'zb-v')
    assert own['runs'] == [0.01, 0.01] and ours['gain'] == 0 and ours['losses_equal'] is True
    assert (folder / 'ran').read_text().count('ran') == 5, 'the start, and two runs of each'
    again = bench(folder, capsys)
    assert again == (code, found), 'nothing is run again'
    assert (folder / 'ran').read_text().count('ran') == 5
    assert (folder / 'zbpp-bench/bench.png').exists() and not (folder / 'zbpp-bench/start').exists()
    bench(folder, capsys)
    words = ['--iterations', '3', '--', 'sh', 'job.sh', 'megatron_zbpp.launch', 'job.py']
    assert main(['bench', *words]) == 2
    assert 'has runs of other iterations: name another folder' in capsys.readouterr().err


def test_a_run_that_fails_is_told(folder, capsys):
    """The others run on; the table says why, and the exit code that something failed."""
    code, found = bench(folder, capsys, ours='echo "ValueError: no such layer"; exit 1')
    own, ours = found['schedules']
    assert code == 1 and own['error'] is None and own['gain'] == 0
    assert ours['error'] == 'ValueError: no such layer' and ours['seconds'] is None


WAVES = '10 + $(cat ran | wc -l) % 3'  # runs of a schedule take 10, 11 or 12 ms


def test_the_spread_of_one_run_is_unknown(folder, capsys):
    """And with it whether a gain is more than noise; more rounds go on in the same folder."""
    _, out = printed(folder, capsys, rounds=1, ours='ms=7')
    assert re.search(r'^zb-v +7.0 +unknown +30.0%\? ', out, re.M), out
    assert 'no gain is known to be more than noise: take --rounds 3 or more' in out
    assert '--pipeline-schedule' not in out
    _, found = bench(folder, capsys, rounds=1, ours='ms=7')
    assert [(row['spread'], row['noise']) for row in found['schedules']] == [(None, None)] * 2
    _, out = printed(folder, capsys, rounds=3, ours='ms=7')
    assert re.search(r'^zb-v +7.0 +0.0% +30.0% ', out, re.M), out
    assert out.partition('for your script')[2].split('--pipeline-schedule ')[1].startswith('zb-v\n')


@pytest.mark.parametrize(('ours', 'sure'), [('ms=$((ms - 1))', False), ('ms=7', True)])
def test_a_gain_below_the_noise_is_none(folder, capsys, ours, sure):
    _, out = printed(folder, capsys, rounds=3, ours=ours, ms=WAVES)
    _, found = bench(folder, capsys, rounds=3, ours=ours, ms=WAVES)
    own, row = found['schedules']
    assert own['spread'] > 0 and row['noise'] == max(own['spread'], row['spread'])
    assert row['gain'] > 0 and (row['gain'] > row['noise']) == sure
    assert (f'{row["gain"]:.1%}?' in out) != sure
    assert ('for your script' in out) == sure
    assert ('no schedule is faster than that of the line by more than the noise' in out) != sure


def test_other_losses_are_told(folder, capsys):
    _, found = bench(folder, capsys, ours='echo "lm loss" > /dev/null', loss='$(cat ran | wc -l)')
    assert [row['losses_equal'] for row in found['schedules']] == [True, False]


def test_ctrl_c_prints_what_ran(folder):
    """And ends the run that is under way."""
    os.mkfifo(folder / 'begun')
    os.mkfifo(folder / 'never')
    begun = os.open(folder / 'begun', os.O_RDONLY | os.O_NONBLOCK)
    waits = 'echo $$ > begun; cat never'
    (folder / 'job.sh').write_text(JOB.format(ours=waits, loss='5.0', ms='10'))
    words = 'bench --rounds 2 --iterations 2 --schedules zb-v --json'.split()
    line = ['--', 'sh', 'job.sh', 'megatron_zbpp.launch', 'job.py']
    command = [sys.executable, '-m', 'megatron_zbpp.cli', *words, *line]
    # what runs in the background of a shell ignores it, and so would the bench
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    finally:
        signal.signal(signal.SIGINT, before)
    with process:
        assert select.select([begun], [], [], 120)[0], 'the second run begins'
        run = int(os.read(begun, 100))
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate()
    assert process.returncode == 130 and 'interrupted: this ran by then' in errors
    assert [row['name'] for row in json.loads(out)['schedules']] == [OWN]
    os.close(begun)
    with pytest.raises(ProcessLookupError):
        os.kill(run, 0)
