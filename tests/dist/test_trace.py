"""Iterations of ranks: pictures, means of an interval, and clocks that are hours apart."""

import json
from dataclasses import asdict
from statistics import fmean

import pytest
import torch
import torch.distributed as dist
from stages import ShiftedClock, TimedPipeline
from vocabulary import executor, split_1f1b

from megatron_zbpp import Costs, Pass, build
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.cli import main
from megatron_zbpp.guests.base import Change, ModelLayers
from megatron_zbpp.guests.tracing import Tracer
from megatron_zbpp.runtime.measure import Interval, Iteration


def trace(folder, costs):
    """After how many iterations there were pictures, before and after a switch."""
    tracer, drawn = Tracer(folder), []
    clock = ShiftedClock(100.0 * dist.get_rank())
    for name in ('zb-h1', '1f1b'):
        pipeline = TimedPipeline(build(name, dist.get_world_size(), 4), clock)
        for i in range(7):
            tracer.after(pipeline.run(), None)
            dist.barrier()
            page = folder / 'pipeline.html'
            if page.exists() and (not drawn or page.read_text() != drawn[-1][1]):
                drawn.append(
                    (i + 1, page.read_text(), (folder / 'pipeline.perfetto.json').read_text())
                )
            dist.barrier()
        tracer.changed(Change(costs))
    return drawn


def panels(page):
    start = page.index('"panels":') + len('"panels":')
    return json.JSONDecoder().raw_decode(page[start:])[0]


@pytest.fixture
def drawn(ranks, tmp_path):
    costs = Costs.uniform(build('1f1b', 3, 4).placement, 1.0, 2.0, 0.0)
    return ranks(3).run(trace, tmp_path / 'new' / 'folder', costs)[0]


def test_pictures(drawn):
    (first, page, perfetto), (second, later, merged) = drawn
    assert (first, second) == (5, 5)
    times = 'planned: simulated, with the times that passes took in'
    assert 'zb-h1, iteration 5<' in page and f'{times} this iteration' in page
    assert '1f1b, iteration 5 after the switch to it<' in later
    assert f'{times} the iterations before the switch' in later
    assert [panel['name'] for panel in panels(page)] == ['planned', 'measured']
    before = panels(later)
    assert [panel['name'] for panel in before] == ['planned', 'measured', 'measured before, zb-h1']
    assert before[2]['rows'] == panels(page)[1]['rows']
    # as it was planned, with the times that it was planned for: F 1, B 2
    row = before[0]['rows'][2]
    assert [round(e - s, 6) for s, e in zip(row['starts'], row['ends'], strict=True)] == [
        {'F': 1, 'BW': 2}[kind] for kind in row['kinds']
    ]
    check_trace(json.loads(perfetto)['traceEvents'], ['rank 0', 'rank 1', 'rank 2'])
    names = [
        f'{line} rank {r}' for line in ('measured', 'measured before, zb-h1') for r in range(3)
    ]
    check_trace(json.loads(merged)['traceEvents'], names)


def check_trace(events, processes):
    named = [e['args']['name'] for e in events if e['name'] == 'process_name']
    assert named == processes
    times = [e['ts'] for e in events if e['ph'] == 'X']
    assert len(times) > 4 * 3 and min(times) == 0
    assert max(times) < 60e6, 'clocks were not aligned'
    assert any(e['ph'] == 'C' for e in events)
    sent = {e['id']: e['ts'] for e in events if e['ph'] == 's'}
    arrived = {e['id']: e['ts'] for e in events if e['ph'] == 'f'}
    assert sent.keys() == arrived.keys() and len(sent) >= 4 * 4
    assert all(arrived[key] >= sent[key] for key in sent)


SLICED = build('seq1f1b-zb', 2, 2, num_slices=3)


def sliced(folder):
    """Returns what each rank held at most, once there are pictures."""
    tracer, pipeline = Tracer(folder), TimedPipeline(SLICED, ShiftedClock(100.0 * dist.get_rank()))
    tracer.starts(lambda: ModelLayers('Et|tL', alike=True))
    for _ in range(5):
        tracer.after(iteration := pipeline.run(), None)
    return iteration.peak()


def test_slices(ranks, tmp_path):
    """Each pass names its own; times of stages are of whole sequences, for `zbpp profile`."""
    held = ranks(2).run(sliced, tmp_path)
    assert held == pytest.approx(list(peak(SLICED, Costs.uniform(SLICED.placement))))
    assert panels((tmp_path / 'pipeline.html').read_text())[1]['rows'][0]['slices'][:3] == [0, 1, 2]
    events = json.loads((tmp_path / 'pipeline.perfetto.json').read_text())['traceEvents']
    passes = [event for event in events if event['ph'] == 'X']
    for event in passes:
        p = Pass.parse(event['name'])
        args = event['args']
        assert (args['stage'], args['microbatch'], args['slice']) == p[1:]
    stages = tmp_path / 'stages.json'
    took = [e['dur'] / 1e6 for e in passes if e['name'].startswith('0F')]
    assert len(took) == 6
    assert json.loads(stages.read_text())['F'][0] == pytest.approx(sum(took) / 2)
    assert (
        main(['profile', '--stages', f'Et|tL={stages}', '-o', str(tmp_path / 'layers.json')]) == 0
    )
    # the folder has its layout inside
    assert main(['profile', str(tmp_path), '-o', str(tmp_path / 'same.json')]) == 0
    assert (tmp_path / 'same.json').read_text() == (tmp_path / 'layers.json').read_text()


@pytest.mark.on_ranks(2)
def test_profiles_name_passes():
    schedule = build('zb-v', 2, 3)
    pipeline = TimedPipeline(schedule, ShiftedClock(0.0))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        pipeline.run()
    names = [event.name for event in profiler.events() if event.name.startswith('PP:')]
    assert names == [f'PP:{p}' for p in schedule.passes[dist.get_rank()]]


def sharded(folder):
    clock, schedule = ShiftedClock(100.0 * dist.get_rank()), split_1f1b(2, 4)
    tracer = Tracer(folder)
    for _ in range(5):
        record = executor(schedule, clock=clock)[0].run()
        tracer.after(Iteration(schedule, dist.group.WORLD, record, clock), None)


def test_collectives(ranks, tmp_path):
    """Three of each microbatch, on both ranks: behind the passes that make what they exchange."""
    ranks(2).run(sharded, tmp_path)
    events = json.loads((tmp_path / 'pipeline.perfetto.json').read_text())['traceEvents']
    ends = {e['name']: e['ts'] + e['dur'] for e in events if e['ph'] == 'X'}
    begun = {(e['name'], e['pid']): e['ts'] for e in events if e['ph'] == 'b'}
    ended = {(e['name'], e['pid']): e['ts'] for e in events if e['ph'] == 'e'}
    names = 'broadcast hidden', 'all-gather statistics', 'reduce vocabulary'
    assert (
        begun.keys()
        == ended.keys()
        == {(f'{name} {i}', rank) for name in names for i in range(4) for rank in range(2)}
    )
    assert all(ended[key] >= ts for key, ts in begun.items())
    for i in range(4):
        made = max(ends[f'{2 + rank}S{i}'] for rank in range(2))
        assert begun[f'all-gather statistics {i}', 0] == pytest.approx(made)
        assert begun[f'reduce vocabulary {i}', 0] == ended[f'all-gather statistics {i}', 0]
        assert begun[f'broadcast hidden {i}', 1] == pytest.approx(ends[f'1F{i}'])


# ---- A line of the log tells the mean of all iterations since the line before.


@pytest.mark.on_ranks(2)
def test_mean_of_the_interval():
    """One iteration of the first three has three times as many microbatches as the others."""
    each, found, interval = [], [], Interval()
    schedules = [build('1f1b', 2, m) for m in (6, 2, 2, 2, 2)]
    assert interval.figures() is None
    for at, schedule in enumerate(schedules):
        iteration = TimedPipeline(schedule, ShiftedClock(0.0)).run()
        each.append(iteration.figures())
        interval.add(iteration)
        if at in (2, len(schedules) - 1):
            found.append(interval.figures((at, at // 3)))
    assert interval.figures() is None
    for some, figures in ((each[:3], found[0]), (each[3:], found[1])):
        for name in ('bubble', 'idle'):
            mean = fmean(asdict(one)[name] for one in some)
            assert asdict(figures)[name] == pytest.approx(mean, abs=1e-9)
        assert all(figures.bubble != one.bubble for one in some), 'of one iteration'
        assert figures.live == max(one.live for one in some)
        assert figures.iterations == len(some)
    assert str(found[1]).endswith('early steps: 2/2, taken back: 1 |')


# ---- Ranks whose clocks are hours apart are measured on one.


AHEAD = (1000.0, -5.0, 7200.0, 0.25)
EXACT = 0.2  # seconds: round trips on one host take far less, even where it is busy


def measure(schedule):
    """The iteration of all ranks as put together, this rank's own times, and two numbers of it."""
    ahead = AHEAD[dist.get_rank()]
    iteration = TimedPipeline(schedule, ShiftedClock(ahead)).run()
    own = [(start - ahead, end - ahead) for start, end in iteration.spans()]
    return iteration.gather(), own, iteration.figures()


@pytest.mark.parametrize(('name', 'p'), [('zb-v', 4), ('1f1b', 3), ('zb-h1', 2)])
def test_one_clock(ranks, name, p):
    results = ranks(p).run(measure, build(name, p, 6))
    measurement = results[0][0]
    timeline = measurement.timeline
    assert min(timeline.lags().values()) > -1e-6
    for found, (same, true, figures) in zip(timeline.spans, results, strict=True):
        assert same == measurement
        assert [end - start for start, end in found] == pytest.approx(
            [end - start for start, end in true], abs=1e-6
        )
        assert found[0][0] - AHEAD[0] == pytest.approx(true[0][0], abs=EXACT)
        assert figures.bubble == pytest.approx(timeline.bubble, abs=1e-6)
        assert 0 < figures.bubble < 1
        assert figures.live == max(measurement.peak_activations)
