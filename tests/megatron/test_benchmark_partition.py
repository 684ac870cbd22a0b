"""The benchmark of partitions at its smallest: all do the same work, and what it says is so."""

import os
import subprocess
import sys

import pytest
from paths import ROOT
from test_benchmark import benched

from benchmarks.partition import cases, resident, shares, two_hosts
from benchmarks.partition.measured import Gpt

pytestmark = pytest.mark.one_release


def run(folder, *flags):
    common = '--pp 2 --microbatches 4 --layers 4 --seconds-per-microbatch 0.04 --planning 0.3'
    return benched('benchmark_partition', folder, *common.split(), '--rounds', '1', *flags)


def test_costs_partition_iterations(tmp_path):
    """Costs by least squares of a real model, then the even split beside the better ones."""
    measuring = ['--measure', '--hidden-size', '64', '--seq-length', '16', '--words', '512']
    text, result = run(tmp_path, *measuring, '--samples', '1', '--slow', '1:1.5', '--busy')
    assert 'gradients are equal to the bit' in text
    even, zb_v, stock, plan = result['rows']
    assert (even['layout'], zb_v['layout']) == ('Ett|ttL', 'Et|t|t|tL')
    assert stock['predicted_ms'] <= even['predicted_ms']
    assert plan['predicted_ms'] <= min(zb_v['predicted_ms'], stock['predicted_ms']) + 1e-9
    for row in result['rows']:
        assert row['median_ms'] > 0.99 * row['predicted_ms']
    assert result['layout'] == 'Ett|ttL' and len(result['stages_s']) == 2


@pytest.mark.full
def test_shards(tmp_path):
    """The output layer on all ranks beside stock's layouts: S and T take their times."""
    text, result = run(tmp_path, '--head', '2', '--shards', '1f1b,zb-v')
    assert 'gradients are equal to the bit' in text
    even, stock, shards, v = result['rows']
    assert [row['name'] for row in (shards, v)] == ['1f1b, shards', 'zb-v, shards']
    assert stock['layout'] == 'Ettt|tL' and even['layout'] == shards['layout'] == 'Ett|ttL'
    assert v['predicted_ms'] < shards['predicted_ms'] < stock['predicted_ms']
    for row in result['rows']:
        assert row['median_ms'] > 0.99 * row['predicted_ms']


@pytest.mark.full
@pytest.mark.skipif(two_hosts.missing() is not None, reason=f'no two hosts: {two_hosts.missing()}')
def test_two_hosts(tmp_path):
    """The message of 64 KiB takes 26 ms at 20 megabits a second, and no less."""
    text, result = run(tmp_path, '--link-mbit', '20', '--rows', '1024')
    assert 'gradients are equal to the bit' in text
    even, *_ = result['rows']
    layers = cases.scaled(cases.gpt(4, 3.0), 0.04, 0.0)
    free = cases.entries(cases.Known(layers, cases.machines(2, None, 1, 0.0)), 4, 0.1)[0]
    assert even['predicted_ms'] > 1e3 * free.predicted + 40
    assert even['median_ms'] > 1e3 * free.predicted + 40


two_processors = pytest.mark.skipif(
    (os.cpu_count() or 1) < 2, reason='two ranks want a processor each'
)
REAL = ['--real', '--hidden-size', '64', '--seq-length', '16', '--words', '512', '--samples', '1']


def limited():
    """Why no process can be limited here; None if it can."""
    try:
        with shares.shared([0.5]):
            return None
    except OSError as error:
        return str(error)


SHARE = [] if limited() else ['--share', '0.45']


@pytest.mark.full
@two_processors
def test_real_passes(tmp_path):
    """Profiled while all ranks train, planned, trained: losses are those of stock, to the bit."""
    text, result = run(tmp_path, *REAL, *SHARE, '--rounds', '1')
    assert 'losses are equal to the bit' in text
    even, zb_v, stock, plan = result['rows']
    assert (even['layout'], zb_v['layout']) == ('Ett|ttL', 'Et|t|t|tL')
    assert stock['predicted_ms'] <= even['predicted_ms']
    assert plan['layout'].replace('|', '') == 'EttttL'
    assert all(row['median_ms'] > 0 for row in result['rows'])
    assert [*result['stages_s']] == ['1f1b', 'zb-h1']


@pytest.mark.full
@two_processors
@pytest.mark.parametrize('layers', [[], ['--tied']])
def test_real_shards(tmp_path, layers):
    """S and T are profiled, too; all begin with the same weights."""
    more = ['--shards', '1f1b,zb-v', '--memory', *layers, '--rounds', '1']
    text, result = run(tmp_path, *REAL, *SHARE, *more)
    assert 'losses are equal to the bit' in text
    names = [row['name'] for row in result['rows']]
    assert names == ['1f1b, even', '1f1b, best layout', '1f1b, shards', 'zb-v, shards']
    collectives = {'hidden', 'statistics', 'vocabulary'} | ({'tokens'} if layers else set())
    for row in result['rows'][2:]:
        assert row['simulated_ms'] > 0 and collectives <= row['collectives_ms'].keys()
    for row in result['rows']:
        assert len(row['planned_bytes']) == len(row['resident_bytes']) == 2
        assert min(row['planned_bytes']) > 0


def test_memory_by_shapes():
    """Two layers and the output layer on the last of two ranks, or half of that on each."""
    sizes = Gpt(2, 4, hidden=64, sequence=16, words=512, iterations=1, num_microbatches=4)
    known = cases.Known(cases.gpt(4, 3.0), cases.machines(2, None, 1, 0.0))
    even, *_ = cases.entries(known, 4, 0.1)
    shards = cases.sharded(known, 4, '1f1b')
    layers, head, values = 2 * (12 * 64**2 + 13 * 64), 512 * 64, 16 * 64
    held = 2 * values * ((2 + 3 + 1) + (2 + 4 + 4)) * 4  # of attention and MLP, with their norms
    whole = resident.planned(sizes, even)[1]
    assert whole == 8 * (layers + head + 2 * 64) + 4 * head + held + 16 * (512 + 64) * 4
    part = resident.planned(sizes, shards)[1]
    logits = 16 * (512 // 2 + 64 + 4 + 2 * 64) * 4  # and hidden states, gradient of these
    made = [p.kind for p in shards.schedule.passes[1]]
    most = max(made[:at].count('S') - made[:at].count('T') for at in range(len(made) + 1))
    assert part <= 8 * (layers + head / 2) + 4 * head / 2 + 2 * held + most * logits < whole


SPIN = """
import threading
import time
from pathlib import PosixPath
from benchmarks.partition.shares import Shares

begun, name = threading.Event(), '/proc/thread-self/cgroup'
groups = []
carries = threading.Thread(target=lambda: (begun.wait(), groups.append(open(name).read())))
carries.start()
{where}.enter(1)
begun.set()
carries.join()
groups.append(open(name).read())
start, used = time.perf_counter(), time.process_time()
while time.perf_counter() < start + 0.8:
    pass
print((time.process_time() - used) / (time.perf_counter() - start))
print(*('{name}' in each for each in groups))
"""


@pytest.mark.skipif(limited() is not None, reason=f'no shares: {limited()}')
def test_a_share_of_a_processor():
    """What computes gets no more than it is given, other threads are free; nothing is left."""
    with shares.shared([0.3, 0.2]) as where:
        assert all(group.exists() for group in where.groups)
        spin = SPIN.format(where=repr(where), name=where.groups[1].name)
        program = [sys.executable, '-c', spin]
        done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=200)
        used, carries, computes = done.stdout.split()
        assert 0 < float(used) < 0.25, done.stderr
        assert (carries, computes) == (str(where.version == 2), 'True')
    assert not any(group.exists() for group in where.groups)


@pytest.mark.parametrize(
    ('version', 'kind', 'written'),
    [
        (1, 'cgroup', {'cpu.cfs_quota_us': '4500', 'cpu.cfs_period_us': '10000'}),
        (2, 'cgroup2', {'cpu.max': '4500 10000', 'cpu.weight': '10000'}),
    ],
)
def test_both_versions_of_control_groups(tmp_path, version, kind, written):
    (tmp_path / 'cgroup.controllers').write_text('cpuset cpu io')
    line = f'cgroup {tmp_path} {kind} rw,cpu 0 0'
    controller = shares.Controller.found(f'proc /proc proc rw 0 0\n{line}')
    assert controller == shares.Controller(tmp_path, version)
    group = controller.make('one', 0.45)
    assert {name: (group / name).read_text() for name in written} == written
    with pytest.raises(OSError, match='no control groups'):
        shares.Controller.found('proc /proc proc rw 0 0')


def test_ranks_share_no_more_than_there_is():
    assert shares.spread([0.45] * 4, [0, 1]) == (0, 0, 1, 1)
    assert shares.spread([0.9, 0.9], [0, 1, 2]) == (0, 1)
    with pytest.raises(ValueError, match='give --share above 0'):
        shares.spread([0.6] * 4, [0, 1])
