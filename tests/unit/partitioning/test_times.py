"""Times of stages from what people have: traces, logs, reports; wrong files end in one line.

`recorded` has what the real tools wrote, less what no reader looks at: torch's profiler and the
timers of Megatron's loop of 0.19 (`-m megatron_zbpp.launch --cpu pretrain_script.py`, the flags of
`nvidia.COMMON`, p = 2, m = 4, `--profile --use-pytorch-profiler --profile-step-start 3
--profile-step-end 5 --timing-log-level 2 --timing-log-option all --logging-level 20`): stock 1F1B,
stock with two chunks and `--pytorch-profiler-collect-callstack`, and `zb-h1`.
"""

from __future__ import annotations

import gzip
import json
import sqlite3
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nsight_report import report

from megatron_zbpp import Layers
from megatron_zbpp.cli import main
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.partitioning.times import recording as recordings
from megatron_zbpp.partitioning.times.profilers import read_trace
from megatron_zbpp.partitioning.times.recording import Kernel, Range, Recording, find_passes
from megatron_zbpp.partitioning.times.sources import read_times
from megatron_zbpp.partitioning.times.stage_times import from_recordings
from megatron_zbpp.partitioning.times.timers import parse_log

HERE = Path(__file__).parent / 'recorded'
STOCK, OURS, CHUNKS = (
    [str(HERE / f'{name}-{rank}.json.gz') for rank in (0, 1)] for name in ('stock', 'zbh1', 'vpp')
)
LOG = str(HERE / 'timers-all.log')
FEW = settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def recorded(file: str) -> Recording:
    return read_trace(json.loads(gzip.decompress(Path(file).read_bytes())), file)


def order(passes) -> str:
    names = {'BW': 'b', 'F': 'f'}
    return ''.join(names.get(p.kind, p.kind) for p in sorted(passes, key=lambda p: p.start))


def test_passes_of_stock():
    """Operations of autograd and messages tell the order of 1F1B, of both iterations."""
    first, last = (find_passes(recorded(file)) for file in STOCK)
    assert order(first) == 2 * 'ffbfbfbb' and order(last) == 2 * 'fbfbfbfb'
    assert [own.number for own in first if own.kind == 'F'] == [*range(8)]


def test_operations_tell_what_call_stacks_tell():
    """Two chunks of a rank; each pass begins within the call of the same number."""
    for file in CHUNKS:
        found = recorded(file)
        steps, runs = recordings._steps(found), recordings._runs(found)
        assert order(steps) == order(runs) and Counter(order(runs)) == {'f': 16, 'b': 16}
        for step, run in zip(sorted(steps, key=lambda p: p.start), runs, strict=True):
            assert step.start <= run.start < step.end


def test_passes_of_ours():
    found = [find_passes(recorded(file)) for file in OURS]
    assert [{p.stage for p in own} for own in found] == [{0}, {1}]
    for own in found:
        assert Counter(p.kind for p in own) == {'F': 8, 'B': 8, 'W': 8}


def test_stock(tmp_path, capsys):
    """The files that it writes are those of `partition` and of --times."""
    layers, times = tmp_path / 'layers.json', tmp_path / 'times.json'
    given = ['profile', *reversed(STOCK), '--layout', 'Ett|ttL', '-o', str(layers)]
    assert main([*given, '--write-times', str(times)]) == 0
    told = capsys.readouterr().out
    assert 'W: not told apart from B' in told and 'half of it counts as W' in told
    assert 'message between ranks' in told
    assert Layers.from_json(layers.read_text()).text((3, 3)) == 'Ett|ttL'
    costs = Costs.from_json(times.read_text())
    assert costs.times['B'] == costs.times['W'] and costs.comm > 0
    spans = [p.end - p.start for p in find_passes(recorded(STOCK[1])) if p.kind == 'F']
    assert min(spans) < costs.times['F'][1] < max(spans)
    simulate = 'simulate --schedule zb-h1 --pp 2 --microbatches 4 --times'.split()
    assert main([*simulate, str(times)]) == 0
    search = ['partition', str(layers), *'--pp 2 --microbatches 4 --seconds 0.1'.split()]
    assert main(search) == 0
    # what was written is a file of stages, too
    assert main(['profile', str(times), '-o', str(layers)]) == 0


def test_share_of_weights():
    half, more = (read_times(STOCK, 'Ett|ttL', weight_share=x) for x in (None, 0.75))
    for stage in (0, 1):
        whole = 2 * half.costs.times['B'][stage]
        assert more.costs.times['W'][stage] == pytest.approx(0.75 * whole)
        assert more.costs.times['B'][stage] == pytest.approx(0.25 * whole)


def test_ours():
    """B and W are apart, and nothing is guessed."""
    found = read_times(OURS, 'Ett|ttL')
    assert found.notes == () and found.costs.comm > 0
    assert found.costs.times['B'][0] != found.costs.times['W'][0] > 0
    with pytest.raises(ValueError, match='--weight-share, but W was measured apart'):
        read_times(OURS, 'Ett|ttL', weight_share=0.3)


def test_chunks_by_the_interleaved_order():
    """Forwards of chunk 0 first, p of each; backwards begin with the last chunk."""
    found = read_times(CHUNKS, 'Et|t|t|tL')
    for rank, file in enumerate(CHUNKS):
        passes = find_passes(recorded(file))
        for kind, chunk, at in (('F', 0, 0), ('F', 1, 2), ('BW', 1, 0), ('BW', 0, 2)):
            own = [p for p in passes if p.kind == kind][at::4]
            own += [p for p in passes if p.kind == kind][at + 1 :: 4]
            spans = sorted(p.end - p.start for p in own)
            middle = (spans[3] + spans[4]) / 2
            stage = chunk * 2 + rank
            told = found.costs.times['F' if kind == 'F' else 'B'][stage]
            assert told == pytest.approx(middle if kind == 'F' else middle / 2)


def test_timers():
    """Seconds of a microbatch: medians of iterations 3 to 6; the log has layers and sizes."""
    found = read_times([LOG])
    assert found.layout == 'Ett|ttL'
    log = parse_log(Path(LOG).read_text())
    assert len(log.intervals) == 6
    last = sorted(own['forward-compute'][1] for own in log.intervals[2:])
    assert found.costs.times['F'][1] == pytest.approx((last[1] + last[2]) / 2 / 4 / 1e3)
    assert any('messages: not told' in note for note in found.notes)
    assert read_times([LOG], microbatches=8).costs.times['F'][1] == pytest.approx(
        found.costs.times['F'][1] / 2
    )


def test_prefixes_of_launchers(tmp_path):
    file = tmp_path / 'prefixed.log'
    lines = Path(LOG).read_text().splitlines()
    file.write_text('\n'.join(f'[default1]:{line}' for line in lines))
    assert read_times([str(file)]) == read_times([LOG])


MINMAX = """
  pipeline_model_parallel_size .................... 2
  num_layers ...................................... 4
  global_batch_size ............................... 8
  micro_batch_size ................................ 1
  data_parallel_size .............................. 2
(min, max) time across ranks (ms):
    forward-compute ................................: (40.00, 60.00)
    backward-compute ...............................: (80.00, 100.00)
"""


def test_shortest_and_longest_rank(tmp_path):
    file = tmp_path / 'log.txt'
    file.write_text(MINMAX)
    found = read_times([str(file)])
    assert found.costs.times['F'] == pytest.approx((0.01, 0.015))
    assert any('the longest is taken for the last' in note for note in found.notes)
    for old, new, told in (
        ('(min, max) time', 'max time', 'only the longest time of all ranks'),
        ('num_layers ...................................... 4', '', 'give --layout'),
        ('global_batch', 'other', 'give --microbatches'),
        ('backward-compute', 'other', 'no forward-compute and backward-compute'),
        (MINMAX[:1], 'megatron_zbpp: version 1: zb-v on 2 ranks x 2\n', 'timers do not see W'),
    ):
        file.write_text(MINMAX.replace(old, new, 1))
        with pytest.raises(ValueError, match=told.replace('(', r'\(')):
            read_times([str(file)])
    file.write_text(MINMAX)
    with pytest.raises(ValueError, match='layers of ranks differ'):
        read_times([str(file)], 'Ettt|tL')


def test_ranks_of_a_job():
    """Data parallelism inside, pipelines outside, as Megatron's ranks are; or swapped."""
    lines = ['world_size .... 4', 'pipeline_model_parallel_size .... 2', 'num_layers .... 2']
    lines += ['global_batch_size .... 2', 'micro_batch_size .... 1', 'data_parallel_size .... 2']
    lines += ['times across ranks (ms):']
    for timer in ('forward-compute', 'backward-compute'):
        lines += [f'  {timer}:', *(f'     rank  {r}: {10.0 * (r + 1):.2f}' for r in range(4))]
    text = '\n'.join(lines)
    from megatron_zbpp.partitioning.times.timers import from_log

    assert from_log(parse_log(text), 'x').costs.times['F'] == pytest.approx((0.015, 0.035))
    swapped = 'use_tp_pp_dp_mapping .... True\n' + text
    assert from_log(parse_log(swapped), 'x').costs.times['F'] == pytest.approx((0.02, 0.03))


def test_nsight(tmp_path):
    """Kernels of each process by correlation; without them the ranges of the host."""
    found = read_times([str(report(tmp_path / 'a.any'))], 'Et|tL')
    for kind in 'FBW':
        assert found.costs.times[kind] == pytest.approx((300e-9, 301e-9))
    host = read_times([str(report(tmp_path / 'b', device=False))], 'Et|tL')
    assert host.costs.times['F'] == pytest.approx((100e-9, 100e-9))


def test_nsight_of_stock(tmp_path):
    """`emit_nvtx` names operations with the number of their backward."""
    path = report(tmp_path / 'a', device=False, ranks=0)
    base = sqlite3.connect(path)
    names = ('aten::linear, seq = 4', 'aten::mul, seq = 5', 'c10d::send, op_id = 9')
    names += ('autograd::engine::evaluate_function: MulBackward0, op_id = 8',)
    names += ('MulBackward0, seq = 5',)
    spans = [(0, 20), (20, 30), (31, 32), (40, 80), (41, 79)]
    for name, (start, end) in zip(names, spans, strict=True):
        base.execute(
            'INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, ?, NULL, ?, 0)', (start, end, name, 1 << 24)
        )
    base.commit()
    base.close()
    found = read_times([str(path)], 'EttL')
    assert found.costs.times['F'] == pytest.approx((30e-9,))
    assert found.costs.times['B'] == pytest.approx((20e-9,))


# Properties.


def pipeline(spans, clocks) -> list[Recording]:
    """Recordings of ranks whose clocks differ: F, B and W of each microbatch, one after another."""
    made = []
    for rank, clock in enumerate(clocks):
        ranges, now = [], clock + rank * 0.5
        for microbatch, took in enumerate(spans):
            for kind, time in zip('FBW', took, strict=True):
                ranges.append(Range(f'PP:{rank}{kind}{microbatch}', now, now + time))
                now += time + 0.125
        made.append(Recording(f'rank {rank}', tuple(ranges), rank=rank))
    return made


TIME = st.integers(1, 64).map(lambda n: n / 64)
SPANS = st.lists(st.tuples(TIME, TIME, TIME), min_size=1, max_size=5)


@FEW
@given(SPANS, st.lists(st.integers(-1000, 1000), min_size=2, max_size=3), st.randoms())
def test_neither_order_nor_clocks_matter(spans, clocks, random):
    layout = '|'.join(['Et', *['t'] * (len(clocks) - 2), 'tL'])
    known = from_recordings(pipeline(spans, [0] * len(clocks)), layout)
    shuffled = []
    for own in pipeline(spans, clocks):
        ranges = list(own.ranges)
        random.shuffle(ranges)
        shuffled.append(replace(own, ranges=tuple(ranges)))
    random.shuffle(shuffled)
    found = from_recordings(shuffled, layout)
    for kind in 'FBW':
        assert found.costs.times[kind] == pytest.approx(known.costs.times[kind], abs=1e-9)
    assert found.costs.comm == pytest.approx(known.costs.comm, abs=1e-9)


@FEW
@given(st.lists(st.sampled_from('fbm'), max_size=12), st.integers(1, 4), st.randoms())
def test_nested_ranges_change_nothing(word, length, random):
    """What lies inside of an operation of autograd belongs to it."""
    ranges, operations, inner = [], [], []
    for at, letter in enumerate(word):
        for k in range(1 if letter == 'm' else length + 1):
            start = 10.0 * at + k
            if letter == 'f':
                operations.append((start, start + 0.9))
            else:
                name = 'c10d::send' if letter == 'm' else 'autograd::engine::evaluate_function: X'
                ranges.append(Range(name, start, start + 0.9))
            if letter != 'm':
                name = random.choice(('c10d::send', 'megatron.core.transformer.mlp'))
                inner.append(Range(name, start + 0.25, start + 0.5))
    plain = find_passes(Recording('x', tuple(ranges), tuple(operations)))
    merged = [a for a, b in zip(word, ['', *word], strict=False) if a != b or a == 'm']
    assert order(plain) == ''.join(merged).replace('m', '')
    assert find_passes(Recording('x', (*inner, *ranges), tuple(operations))) == plain


def test_kernels_of_a_device():
    """From the first to the last kernel that was launched within the pass."""
    ranges = (Range('PP:0F0', 0.0, 1.0), Range('PP:0B0', 1.0, 2.0))
    kernels = (
        Kernel('gemm', 5.0, 6.0, 0.5),
        Kernel('gemm', 6.5, 7.0, 0.75),
        Kernel('ncclDevKernel_AllReduce', 7.0, 9.0, 0.875),
        Kernel('gemm', 7.0, 8.0, 1.5),
        Kernel('gemm', 8.0, 9.0, 2.5),
    )
    found = find_passes(Recording('x', ranges, kernels=kernels))
    assert [(p.kind, p.start, p.end) for p in found] == [('F', 5.0, 7.0), ('B', 7.0, 8.0)]


TRACE = gzip.decompress(Path(OURS[0]).read_bytes())
VALUES = st.sampled_from([None, True, -1, 'x', [], {}, 10**400, 1e400, float('nan')])


@FEW
@given(st.integers(0, 60), st.sampled_from(['ph', 'cat', 'name', 'ts', 'dur', 'tid']), VALUES)
def test_odd_events_end_in_one_line(tmp_path, at, name, value):
    data = json.loads(TRACE)
    data['traceEvents'] = [e for e in data['traceEvents'] if e['name'].startswith('PP:')][:61]
    data['traceEvents'][at % len(data['traceEvents'])][name] = value
    refused_or_read(tmp_path, json.dumps(data).encode())


@FEW
@given(st.sampled_from(['trace', 'gzip', 'log', 'sqlite']), st.floats(0, 1), st.binary(max_size=8))
def test_damaged_files_end_in_one_line(tmp_path, kind, share, noise):
    whole = {
        'trace': TRACE[:9000],
        'gzip': Path(OURS[0]).read_bytes(),
        'log': Path(LOG).read_bytes(),
        'sqlite': report_bytes(tmp_path),
    }[kind]
    at = int(share * len(whole))
    refused_or_read(tmp_path, whole[:at] + noise)
    refused_or_read(tmp_path, whole[:at] + noise + whole[at + len(noise) :])


def report_bytes(folder: Path) -> bytes:
    path = folder / 'whole.sqlite'
    return (path if path.exists() else report(path)).read_bytes()


def refused_or_read(folder: Path, content: bytes) -> None:
    path = folder / 'file'
    path.write_bytes(content)
    try:
        read_times([str(path)], 'Et|tL')
    except ValueError as error:
        assert str(path) in str(error) or 'stage' in str(error), error


def test_one_line_with_the_cure(tmp_path, capsys):
    (tmp_path / 'folder').mkdir()
    for name, content in (
        ('empty', b''),
        ('text', b'hello\n'),
        ('report.nsys-rep', b'\xff\xfe\x00\x01'),
        ('cut.json', TRACE[:500]),
        ('other.json', b'{"layers": []}'),
        ('none.json', b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm"}]}'),
        ('stages.json', b'{"F": [1, 1], "B": [1, 1], "W": [1, 1]}'),
        ('two.json', b'{"layout": "EttL", "F": [1, 1], "B": [1, 1], "W": [1, 1]}'),
    ):
        (tmp_path / name).write_bytes(content)
    sqlite3.connect(tmp_path / 'db').execute('CREATE TABLE a (b)').connection.close()
    for words, told in (
        (['empty'], 'is empty: give a folder of --pipeline-trace-dir'),
        (['text'], "a text without Megatron's timers"),
        (['report.nsys-rep'], 'is to be exported first'),
        (['cut.json'], 'is cut off, or no JSON'),
        (['other.json'], 'it is a file of layers, for zbpp partition'),
        (['none.json'], "'ts' of event 0 is None, no time: export the trace again"),
        (['stages.json'], 'give --layout, such as'),
        (['two.json'], 'layout EttL has 1 stages and F 2 entries'),
        (['folder'], 'has no stages.json: give a folder that --pipeline-trace-dir wrote'),
        (['missing'], 'No such file or directory: give another path'),
        (['db'], 'no such table: NVTX_EVENTS: export it by nsys export --type sqlite'),
        (['empty', '--model', 'gpt'], 'one of them'),
        (['stages.json', '--layout', 'Et|tL', '--hidden', '8'], '--hidden is about --model'),
        (['stages.json', '--layout', 'Et|tL', '--weight-share', '2'], 'from 0 to 1'),
        (['stages.json', '--layout', 'Et|tL', '--microbatches', '2'], 'is for logs'),
        (STOCK, 'which layers a stage has is not told: give --layout'),
        ([*STOCK, LOG], 'are of several kinds'),
        ([STOCK[0], '--layout', 'Ett|ttL'], 'give the recordings of all pipeline ranks'),
        ([*OURS, '--layout', 'EttttL'], 'a pass of stage 1 was recorded'),
        ([LOG, '--layout', '|'], "--layout '|' has no layers"),
        ([*STOCK, '--layout', 'xyz|abc'], "layout 'xyz|abc' has abcxyz for layers: give such as"),
        ([LOG, '--layout', 'E|t|t'], 'do not divide among 2 ranks'),
    ):
        given = [
            word if '/' in word or not (tmp_path / word).exists() else tmp_path / word
            for word in words
        ]
        try:
            code = main(['profile', *map(str, given)])
        except SystemExit as end:
            code = end.code
        said = capsys.readouterr().err
        assert code == 2 and told in said and said.count('\n') == 1, (words, said)
