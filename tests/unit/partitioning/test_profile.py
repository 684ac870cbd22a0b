"""Costs of layers: from shapes, against counts by hand; and from times of stages."""

import gzip
import json
import sqlite3
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from instances import P1
from nsight_report import report

from megatron_zbpp import Costs, Devices, Layers, Placement
from megatron_zbpp.partitioning import recordings
from megatron_zbpp.partitioning.fitting import fit_layers, measured_devices
from megatron_zbpp.partitioning.measured_files import parse_log, read_times
from megatron_zbpp.partitioning.recordings import (
    Kernel,
    Range,
    Recording,
    find_passes,
    from_recordings,
    read_trace,
)
from megatron_zbpp.partitioning.shapes import Shape, layers_of
from megatron_zbpp.partitioning.space import Partition, stage_costs
from megatron_zbpp.techniques.slices.balance import non_negative

GPT3 = Shape('gpt', 2, hidden=64, heads=4, vocab=1000, seq=32, tflops=1e-12)  # one FLOP a second


def layer(shape: Shape, kind: str = 't'):
    return next(x for x in layers_of(shape) if x.kind == kind)


def test_gpt():
    """12 h^2 parameters; attention beside them; 34 t h bytes, of which 32 t h wait for W."""
    h, s = 64, 32
    own = layer(GPT3)
    assert own.weight == 2 * s * 12 * h * h
    assert own.forward == own.weight + 2 * s * s * h
    assert own.backward == own.weight + 4 * s * s * h
    assert (own.activation, own.retained) == (34 * s * h, 32 * s * h)
    assert own.parameters == 12 * h * h * 18 and own.output == 2 * s * h
    # the output layer counts as 2 V h over a layer's FLOPs; the embedding takes no time
    head, embedding = layer(GPT3, 'L'), layer(GPT3, 'E')
    assert head.forward == head.backward == head.weight == 2 * 32 * 64 * 1000
    assert head.activation == 32 * (4 * 1000 + 2 * 64)
    assert embedding.time == embedding.activation == 0
    assert embedding.parameters == head.parameters == 64 * 1000 * 18


def test_llama_mla_and_moe():
    """SwiGLU has three matrices, grouped queries few keys: 8B has 218 million a layer."""
    shape = Shape(
        'llama', 32, hidden=4096, heads=32, groups=8, ffn=14336, vocab=128256, seq=8192, tflops=1.0
    )
    each = layer(shape).parameters / 18
    assert each == 4096 * (4096 + 2048 + 4096 + 3 * 14336)
    assert 32 * each + 2 * 4096 * 128256 == pytest.approx(8.03e9, rel=0.01)
    # deepSeek-V2-Lite: latent attention, then 64 experts of which a token takes 6
    common = {'hidden': 2048, 'heads': 16, 'vocab': 102400, 'seq': 4096, 'tflops': 1.0}
    latent = Shape('mla', 1, head_dim=128, kv_rank=512, rope_dim=64, v_dim=128, ffn=10944, **common)
    attention = 2048 * 16 * 192 + 2048 * 576 + 512 * 16 * 256 + 16 * 128 * 2048
    assert layer(latent).parameters / 18 == attention + 3 * 2048 * 10944
    some = {'experts': 64, 'top_k': 6, 'expert_ffn': 1408, 'shared_ffn': 2816, 'dense_first': 1}
    sparse = Shape('mla', 2, head_dim=128, v_dim=128, ffn=10944, **some, **common)
    dense, moe = (x for x in layers_of(sparse) if x.kind == 't')
    assert dense == layer(latent)
    expert = 3 * 2048 * 1408
    assert moe.parameters / 18 == attention + 64 * expert + 2 * expert + 2048 * 64
    token = moe.weight * 1e12 / (2 * 4096)
    assert token == pytest.approx(attention + 8 * expert + 2048 * 64)
    compressed = layer(Shape('mla', 1, q_rank=256, head_dim=128, ffn=10944, **common))
    assert compressed.parameters < layer(latent).parameters


def test_hybrid_and_multi_token_prediction():
    common = {'hidden': 64, 'heads': 4, 'vocab': 100, 'seq': 32, 'tflops': 1.0}
    found = layers_of(Shape('hybrid', 4, pattern='M-*E', experts=4, **common))
    assert found.text((3, 3)) == 'EM-|*EL'
    assert (
        layer(Shape('hybrid', 1, pattern='M', **common), 'M').parameters / 18
        == 64 * (2 * 128 + 2 * 128 + 2) + 128 * 64
    )
    latent = Shape('mla', 1, head_dim=16, **common)
    told = [*layers_of(Shape('hybrid', 3, pattern='*|+-/*-/*', head_dim=16, **common))]
    alone = [*layers_of(Shape('hybrid', 3, pattern='*+-', head_dim=16, **common))]
    assert ''.join(each.kind for each in told) == 'E*+-L'
    assert told[2].weight + told[3].weight == pytest.approx(layer(latent).weight)
    extra = alone[1].weight * 2 + alone[3].weight  # *- and *
    each = alone[-1].weight + 2 * 32 * 2 * 64 * 64 / 1e12  # an output layer, and what joins
    assert told[-1].weight == pytest.approx(alone[-1].weight + extra + 2 * each)
    ahead = layers_of(Shape('llama', 2, mtp=1, **common))
    own, head, mtp = (next(x for x in ahead if x.kind == kind) for kind in 'tLm')
    assert mtp.weight == pytest.approx(own.weight + head.weight + 2 * 32 * 2 * 64 * 64 / 1e12)


def test_bandwidth_and_parallel_ranks():
    """Bytes that passes move take time of their own, beside the products."""
    own, moved = layer(GPT3), layer(Shape(**asdict(GPT3) | {'bandwidth': 1e-9}))  # a byte a second
    weights, held = 12 * 64 * 64, 34 * 32 * 64
    assert moved.forward - own.forward == moved.backward - own.backward == 2 * held + 2 * weights
    assert moved.weight - own.weight == 32 * 32 * 64 + 8 * weights
    assert layer(Shape(**asdict(GPT3) | {'bandwidth': 1e-9}), 'E').time == 0
    one = layer(GPT3)
    two = layer(Shape(**asdict(GPT3) | {'tp': 2, 'dp': 4}))
    assert two.time == one.time / 2 and two.activation == one.activation / 2
    assert two.parameters == one.parameters / 2 * (6 + 3) / 18


def measured(cuts: tuple[int, ...]):
    costs = stage_costs(
        P1, Devices.alike(len(cuts)), Partition(Placement.loop(len(cuts)), cuts, (0, 1, 2, 3))
    )
    return P1.text(cuts), costs


def test_layers_from_stages():
    """What stages of them take gives the layers back, from one layout or from several."""
    for cuts in ([(2, 2, 2, 2)], [(3, 2, 2, 1), (1, 3, 2, 2)]):
        found, error = fit_layers([*map(measured, cuts)])
        assert error < 1e-6
        for own, known in zip(found, P1, strict=True):
            assert own.kind == known.kind
            assert (own.forward, own.backward, own.weight) == pytest.approx(
                (known.forward, known.backward, known.weight), abs=1e-4
            )
    text, costs = measured((3, 2, 2, 1))
    more = type(costs).of(
        *(tuple(x + 0.5 for x in t) for t in (costs.times['F'], costs.times['B'], costs.times['W']))
    )
    found, error = fit_layers([(text, more), measured((3, 2, 2, 1))], constant=True)
    assert error < 0.1 and sum(x.time for x in found) == pytest.approx(50, rel=0.1)
    assert non_negative([[1.0, 1.0], [0.0, 1.0]], [1.0, 2.0]) == pytest.approx([0.0, 1.5])
    # those of stages are theirs, too
    text, costs = measured((3, 2, 2, 1))
    held = replace(costs, parameters=(7.0, 4.0, 4.0, 5.0))
    found, _ = fit_layers([(text, held)])
    for cut, most in zip(found.stages((3, 2, 2, 1)), held.parameters, strict=True):
        assert sum(layer.parameters for layer in cut) == pytest.approx(most, abs=1e-4)


def test_devices_from_stages(zbpp):
    """The rank that takes longer for its layers, and what a message takes; layers are usual."""
    each, hops = [2, 2, 3, 4], [[0.5, 1], [0, 0], [0, 0]]
    stages = {'F': each, 'B': each, 'W': each, 'comm': 0.25, 'hops': hops}
    Path('times.json').write_text(json.dumps(stages))
    one, written = 'Ett|tt|tt|tL=times.json', '-o l.json --write-devices d.json'
    assert zbpp(f'profile --stages {one} {written}').endswith('wrote l.json\nwrote d.json\n')
    found = Devices.from_json(Path('d.json').read_text())
    assert [device.factors for device in found.devices] == [(x, x, x) for x in (1, 1, 1.5, 1)]
    links = [(0, 1), (1, 0), (1, 2), (3, 2), (1, 1)]
    assert [found.edge(*link, 0.0) for link in links] == [0.75, 1.25, 0.25, 0.25, 0]
    decoder = next(x for x in Layers.from_json(Path('l.json').read_text()) if x.kind == 't')
    assert decoder.forward == pytest.approx(1.0)
    assert 'give one --stages' in zbpp.refused(f'profile --stages {one} {one} {written}')
    # rank 2 of a V takes longer in both of its stages; two routes have no rank for a stage
    layout, each = 'Ett|tt|tt|tt|tt|tL', [2, 2, 3, 3, 2, 3]
    stages = {'layout': layout, 'F': each, 'B': each, 'W': each}
    given = 'profile times.json -o l.json --write-devices d.json'

    def of(*routes: list[int]) -> str:
        Path('times.json').write_text(json.dumps({**stages, 'routes': routes}))
        return given

    zbpp(of([0, 1, 2, 2, 1, 0]))
    found = Devices.from_json(Path('d.json').read_text())
    assert [device.factors for device in found.devices] == [(x, x, x) for x in (1, 1, 1.5)]
    decoder = next(x for x in Layers.from_json(Path('l.json').read_text()) if x.kind == 't')
    assert decoder.forward == pytest.approx(1.0)
    zbpp(given.replace('times.json', f'--stages {layout}=times.json'))
    assert Devices.from_json(Path('d.json').read_text()) == found
    ways = of([*range(6)], [*range(6)][::-1])
    assert 'these stages ran on two ranks each' in zbpp.refused(ways)
    said = 'route [0, 1, 1] has 3 stages and F 6 entries: give one rank'
    assert said in zbpp.refused(of([0, 1, 1]))


def test_links_take_the_fastest_message_of_two_ranks():
    """What others take beyond it is of their stages."""
    costs = Costs.of(*[(1.0,) * 4] * 3, comm=0.25, hops=[(0.5, 1), (0, 0), (0.25, 2)])
    found = measured_devices(['t'] * 4, Placement.v(2), costs)
    assert (found.edge(0, 1, 0.0), found.edge(1, 0, 0.0)) == (0.25 + 0.5, 0.25 + 0.25)


# ---- Times of recorded runs: traces, logs, reports; wrong files end in one line.


HERE = Path(__file__).parent / 'recorded'
STOCK, OURS, CHUNKS = (
    [str(HERE / f'{name}-{rank}.json.gz') for rank in (0, 1)] for name in ('stock', 'zbh1', 'vpp')
)
LOG = str(HERE / 'timers-all.log')
MINMAX = (HERE / 'minmax.log').read_text()  # written by hand
FEW = settings(max_examples=40, derandomize=True, suppress_health_check=list(HealthCheck))


def recorded(file: str) -> Recording:
    return read_trace(json.loads(gzip.decompress(Path(file).read_bytes())), file)


def letters(passes) -> str:
    names = {'BW': 'b', 'F': 'f'}
    return ''.join(names.get(p.kind, p.kind) for p in sorted(passes, key=lambda p: p.start))


def test_passes_of_stock_and_ours():
    """Operations of autograd and messages tell the letters of 1F1B, of both iterations."""
    first, last = (find_passes(recorded(file)) for file in STOCK)
    assert letters(first) == 2 * 'ffbfbfbb' and letters(last) == 2 * 'fbfbfbfb'
    assert [own.number for own in first if own.kind == 'F'] == [*range(8)]
    found = [find_passes(recorded(file)) for file in OURS]
    assert [{p.stage for p in own} for own in found] == [{0}, {1}]
    for own in found:
        assert Counter(p.kind for p in own) == {'F': 8, 'B': 8, 'W': 8}


def test_operations_tell_what_call_stacks_tell():
    """Two chunks of a rank; each pass begins within the call of the same number."""
    for file in CHUNKS:
        found = recorded(file)
        steps, runs = recordings._steps(found), recordings._runs(found)
        assert letters(steps) == letters(runs) and Counter(letters(runs)) == {'f': 16, 'b': 16}
        for step, run_ in zip(sorted(steps, key=lambda p: p.start), runs, strict=True):
            assert step.start <= run_.start < step.end


def test_stock(zbpp):
    """The files that it writes are those of `partition` and of --times."""
    given = f'profile {" ".join(reversed(STOCK))} --layout Ett|ttL -o layers.json'
    told = zbpp(f'{given} --write-times times.json')
    assert 'W: not told apart from B' in told and 'half of it counts as W' in told
    assert 'message between ranks' in told
    assert Layers.from_json(Path('layers.json').read_text()).text((3, 3)) == 'Ett|ttL'
    costs = Costs.from_json(Path('times.json').read_text())
    assert costs.times['B'] == costs.times['W'] and costs.comm > 0
    spans = [p.end - p.start for p in find_passes(recorded(STOCK[1])) if p.kind == 'F']
    assert min(spans) < costs.times['F'][1] < max(spans)
    zbpp('simulate --schedule zb-h1 --pp 2 --microbatches 4 --times times.json')
    zbpp('partition layers.json --pp 2 --microbatches 4 --seconds 0.1')
    zbpp('profile times.json -o layers.json')  # what was written is a file of stages, too


def test_weights_apart_or_a_share():
    half, more = (read_times(STOCK, 'Ett|ttL', weight_share=x) for x in (None, 0.75))
    for stage in (0, 1):
        whole = 2 * half.costs.times['B'][stage]
        assert more.costs.times['W'][stage] == pytest.approx(0.75 * whole)
        assert more.costs.times['B'][stage] == pytest.approx(0.25 * whole)
    # b and W are apart, and nothing is guessed
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


def test_timers(tmp_path):
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
    file = tmp_path / 'prefixed.log'
    lines = Path(LOG).read_text().splitlines()
    file.write_text('\n'.join(f'[default1]:{line}' for line in lines))
    assert read_times([str(file)]) == read_times([LOG])


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
    from megatron_zbpp.partitioning.measured_files import from_log

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
    # `emit_nvtx` names operations with the number of their backward
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
    assert letters(plain) == ''.join(merged).replace('m', '')
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


def test_a_database_of_something_else(tmp_path):
    sqlite3.connect(tmp_path / 'db').execute('CREATE TABLE a (b)').connection.close()
    with pytest.raises(ValueError, match='no such table: NVTX_EVENTS: export it by nsys export'):
        read_times([str(tmp_path / 'db')], 'Et|tL')
