"""Pictures: what they must show, read back from what was written."""

from __future__ import annotations

import itertools
import json
import re
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path

import pytest
from matplotlib.collections import PolyCollection
from matplotlib.text import Text
from oracle import needs

from megatron_zbpp.analysis.memory import live, peak
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import KINDS, Pass, Placement, Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.graph import HOST
from megatron_zbpp.ir.timeline import MEANING, Timeline
from megatron_zbpp.render import frontier, png, scene
from megatron_zbpp.render.colours import HUES, colour, ink, legend, stripes
from megatron_zbpp.render.html import html, waits
from megatron_zbpp.render.perfetto import perfetto
from megatron_zbpp.render.png import loss_png, timeline_png
from megatron_zbpp.render.scene import bars, held, number, ticks
from megatron_zbpp.render.svg import svg
from megatron_zbpp.render.text import time_shown, timeline_text
from megatron_zbpp.schedules import build

COMM = 0.25


def simulated(name: str, ranks: int = 4, microbatches: int = 8) -> tuple[Timeline, Costs]:
    schedule = build(name, ranks, microbatches)
    costs = Costs.uniform(schedule.placement, 1.0, 1.2, 0.8, comm=COMM)
    return simulate(schedule, costs), costs


def later(timeline: Timeline, by: float) -> Timeline:
    """The same timeline on a clock that started earlier."""
    spans = tuple(tuple((a + by, b + by) for a, b in row) for row in timeline.spans)
    return Timeline(timeline.schedule, spans)


# Colours

# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
VISIONS = {
    'full': ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    'no red': ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216),
               (-0.003882, -0.048116, 1.051998)),
    'no green': ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413),
                 (-0.011820, 0.042940, 0.968881)),
    'no blue': ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602),
                (0.004733, 0.691367, 0.303900)),
}  # fmt: skip
TO_XYZ = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))


def times(matrix: tuple, vector: list[float]) -> list[float]:
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def lab(text: str, vision: str) -> list[float]:
    """CIE Lab of a colour as seen by `vision`."""
    rgb = [int(text[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
    seen = [min(1.0, max(0.0, c)) for c in times(VISIONS[vision], linear)]
    white = 0.9505, 1.0, 1.089
    x, y, z = (
        c ** (1 / 3) if c > 0.008856 else 7.787 * c + 16 / 116
        for c in (a / b for a, b in zip(times(TO_XYZ, seen), white, strict=True))
    )
    return [116 * y - 16, 500 * (x - y), 200 * (y - z)]


@pytest.mark.parametrize('vision', VISIONS)
def test_kinds_differ_for_every_colour_vision(vision: str) -> None:
    seen = {kind: lab(hue, vision) for kind, hue in HUES.items()}
    for one, other in itertools.combinations(KINDS, 2):
        distance = sum((a - b) ** 2 for a, b in zip(seen[one], seen[other], strict=True)) ** 0.5
        assert distance > 20, (one, other)


def test_chunks_are_shades_and_their_ink_is_legible() -> None:
    assert colour('F', 0, 4) == HUES['F']
    assert len({colour('F', chunk, 4) for chunk in range(4)}) == 4
    assert ink('#000000') == '#ffffff' and ink('#ffffff') == '#000000'


def test_legend_names_what_occurs() -> None:
    fused, split = build('1f1b', 2, 2), build('zb-v', 2, 2)
    assert [text for text, _ in legend([fused])] == ['F: forward', 'BW: whole backward', 'idle']
    assert 'W of the last chunk' in dict(legend([fused, split]))


@pytest.mark.parametrize(('v', 'named'), [(2, 2), (3, 3), (4, 4), (6, 3)])
def test_legend_names_each_shade(v: int, named: int) -> None:
    """Of up to four chunks; of more the ends, and one for all between them."""
    looped = build('interleaved', 2, 4, num_chunks=v)
    entries = [each for each in legend([looped]) if each[0].startswith('F')]
    shades = [colour('F', chunk, v) for chunk in range(v)]
    assert len(entries) == named and {fill for _, fill in entries} <= {*shades}
    assert [entries[0][1], entries[-1][1]] == [shades[0], shades[-1]]
    assert v > 4 or [fill for _, fill in entries] == shades


# What all pictures share


def test_bars_count_from_the_first_start() -> None:
    timeline, _ = simulated('zb-v')
    shifted = bars(later(timeline, 100.0))
    for row, other in zip(bars(timeline), shifted, strict=True):
        for bar, moved in zip(row, other, strict=True):
            assert bar.start == pytest.approx(moved.start)


@pytest.mark.parametrize('name', ['1f1b', 'zb-h2', 'zb-v'])
def test_memory_curve_peaks_and_ends_empty(name: str) -> None:
    timeline, costs = simulated(name)
    curves = held(timeline, costs)
    assert tuple(max(amount for _, amount in curve) for curve in curves) == peak(
        timeline.schedule, costs
    )
    for curve in curves:
        assert [time for time, _ in curve] == sorted({time for time, _ in curve})
        assert curve[-1][1] == pytest.approx(0)


def test_memory_curve_rises_with_b_and_within_bw() -> None:
    """Where more waits for W than F left."""
    order = map(Pass.parse, '0F0 0BW0 0F1 0B1 0W1'.split())
    schedule = Schedule.of('x', Placement.loop(1), 2, [order])
    costs = Costs.of((1,), (1,), (2,), activation=(2,), retained=(5,))
    assert held(simulate(schedule, costs), costs) == [[(0, 2), (2, 5), (4, 2), (6, 5), (8, 0)]]


@pytest.mark.parametrize('span', [1e-6, 0.07, 1.0, 33.5, 9e8])
def test_ticks_are_few_round_and_inside(span: float) -> None:
    marks = ticks(span, 10)
    assert marks[0] == 0 and 3 <= len(marks) <= 12
    assert marks[-1] <= span * (1 + 1e-9) < marks[-1] + 1.01 * marks[1]
    assert ticks(0.0, 10) == [0.0]


def test_number_is_short() -> None:
    shown = [number(x) for x in (4.0, 26.750000001, 0.1 + 0.2, 1234567.0, 1e-9)]
    assert shown == ['4', '26.75', '0.3', '1234600', '1e-09']


# Text


def test_text_is_to_scale() -> None:
    timeline = simulate(build('zb-h1', 2, 2), Costs.uniform(build('zb-h1', 2, 2).placement))
    assert timeline_text(timeline).splitlines() == [
        'rank 0  0F0 0F1 ····0B0 0W0 0B1 0W1',
        'rank 1  ····1F0 1B0 1F1 1B1 1W0 1W1',
    ]


@pytest.mark.parametrize('width', [20, 80, 120])
@pytest.mark.parametrize('name', ['1f1b', 'zb-v'])
def test_text_keeps_its_width(name: str, width: int) -> None:
    timeline, _ = simulated(name, 12, 40)
    lines = timeline_text(timeline, width).splitlines()
    assert len(lines) == 12 and max(map(len, lines)) <= width
    assert lines[0].endswith('…')
    assert 0 < time_shown(timeline, width) < timeline.makespan
    assert time_shown(timeline, 0) == timeline.makespan


def test_uncut_text_names_every_pass() -> None:
    schedule = build('zb-v', 4, 12)
    timeline = simulate(schedule, Costs.uniform(schedule.placement))
    lines = timeline_text(timeline, 0).splitlines()
    for line, order in zip(lines, schedule.passes, strict=True):
        assert re.findall(r'\d+[FBW]+\d+', line) == list(map(str, order))


def test_text_in_colour_says_the_same() -> None:
    timeline, _ = simulated('zb-v')
    painted = timeline_text(timeline, colours=True)
    assert '\x1b[48;2;31;79;216' in painted
    plain = re.sub(r'\x1b\[[\d;]*m', '', painted)
    assert [x.rstrip() for x in plain.splitlines()] == timeline_text(timeline).splitlines()


def test_text_of_passes_that_take_no_time() -> None:
    schedule = build('1f1b', 2, 2)
    free = simulate(schedule, Costs.uniform(schedule.placement, 0, 0, 0))
    assert timeline_text(free).splitlines() == ['rank 0', 'rank 1']


# SVG

SVG = '{http://www.w3.org/2000/svg}'


@pytest.mark.parametrize('with_memory', [False, True])
def test_svg_has_every_pass_and_curve(with_memory: bool) -> None:
    lines, costs = {}, {}
    for name in ('1f1b', 'zb-v'):
        lines[name], costs[name] = simulated(name)
    heading = 'F, B, W = 1, 1.2, 0.8'
    root = ET.fromstring(svg(lines, costs if with_memory else None, unit='ms', heading=heading))
    groups = [g for g in root.iter(f'{SVG}g') if g.get('class') == 'passes']
    for group, line in zip(groups, lines.values(), strict=True):
        drawn = [path.get('d').count('M') for path in group.iter(f'{SVG}path')]
        assert sum(drawn) == sum(map(len, line.schedule.passes))
    curves = [p for p in root.iter(f'{SVG}path') if p.get('class') == 'memory']
    assert [curve.get('d').count('M') for curve in curves] == ([4, 4] if with_memory else [])
    texts = [text.text for text in root.iter(f'{SVG}text')]
    line = lines['zb-v']
    figures = f'idle GPU time {line.idle_all_ranks:.1%}, bubble {line.bubble:.1%}'
    assert f'zb-v: makespan {number(line.makespan)}, {figures}' in texts and MEANING in texts
    assert 'F, B, W = 1, 1.2, 0.8' in texts
    assert 'ms' in texts
    assert ('max 4' in texts) == with_memory


def test_idle_time_ends_where_a_schedule_ends() -> None:
    """The shorter of two does not look idle at the end."""
    lines = {name: simulated(name)[0] for name in ('zb-v', '1f1b')}
    root = ET.fromstring(svg(lines))
    idle = [path.get('d') for path in root.iter(f'{SVG}path') if path.get('class') == 'idle']
    for d, line in zip(idle, lines.values(), strict=True):
        ends = {float(end) for end in re.findall(r'h(\d[\d.]*)', d)}
        assert ends == {float(f'{line.makespan:.7g}')}


def test_kinds_differ_without_colours() -> None:
    """By the stripes at the foot of their bars, in every shade, in the legend, too."""
    split, fused = simulated('zb-v')[0], simulated('1f1b')[0]
    assert len({len(stripes(kind, 0, 1)) for kind in KINDS}) == len(KINDS)
    root = ET.fromstring(svg({'zb-v': split, '1f1b': fused}))
    drawn = [p.get('d') for p in root.iter(f'{SVG}path') if p.get('class') == 'stripes']
    wanted = {'F': 0, 'B': 1, 'W': 2, 'BW': 3}
    passes = [p.kind for line in (split, fused) for _, p in line.schedule]
    named = [text.split()[0].strip(':') for text, _ in legend([split.schedule, fused.schedule])]
    assert sum(d.count('M') for d in drawn) == sum(wanted.get(k, 0) for k in (*passes, *named))


@pytest.mark.parametrize('width', [600, 1400])
def test_svg_legend_keeps_to_the_width(width: int) -> None:
    """With many kinds in as many lines as it takes, and nothing of it below what follows."""
    lines = {name: copying(name)[0] for name in ('po-h', 'bpipe')} | {'zb-v': simulated('zb-v')[0]}
    entries = legend(line.schedule for line in lines.values())
    root = ET.fromstring(svg(lines, width=width))
    texts = [(t.text, float(t.get('x', 0)), float(t.get('y', 0))) for t in root.iter(f'{SVG}text')]
    drawn = texts[: len(entries)]
    assert [text for text, *_ in drawn] == [text for text, _ in entries]
    assert all(x + 7 * len(text) <= width for text, x, _ in drawn)
    for (text, x, y), (_, after, below) in itertools.pairwise(drawn):
        assert after >= x + 7 * len(text) if below == y else below >= y + 12
    assert len({y for *_, y in drawn}) > 1
    first = next(t for t in root.iter(f'{SVG}text') if t.get('class') == 'name')
    assert float(first.get('y', 0)) > max(y for *_, y in drawn) + 12


def test_svg_escapes_names() -> None:
    timeline, _ = simulated('1f1b')
    root = ET.fromstring(svg({'<a & "b">': timeline}))
    assert any((text.text or '').startswith('<a & "b">') for text in root.iter(f'{SVG}text'))


# PNG


def test_png_is_written(tmp_path: Path) -> None:
    few, _ = simulated('zb-v')
    many, _ = simulated('1f1b', 8, 8)
    timeline_png({'few': few}, tmp_path / 'few.png', unit='s')
    timeline_png({'few': few, 'many': many}, tmp_path / 'both.png')
    timeline_png({'few': few}, tmp_path / 'few.pdf')
    loss_png({'megatron': [3.0, 2.0, 1.5], 'zb-v': [3.0, 2.0, 1.5]}, tmp_path / 'loss.png')
    for file in tmp_path.iterdir():
        assert file.read_bytes().startswith(b'%PDF' if file.suffix == '.pdf' else b'\x89PNG')
    heights = [
        int.from_bytes((tmp_path / name).read_bytes()[20:24], 'big')
        for name in ('few.png', 'both.png')
    ]
    assert heights[1] > heights[0]


def test_png_says_what_is_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Times, units, ends, both shares of idle time and what they mean; equal curves as such."""
    figures, make = [], png.new_figure
    monkeypatch.setattr(png, 'new_figure', lambda *size: figures.append(make(*size)) or figures[-1])
    (few, _), (many, _) = simulated('zb-v'), simulated('1f1b')
    timeline_png({'few': few, 'many': many}, tmp_path / 'a.png', 's', heading='F, B, W = 1, 2, 3')
    upper, lower = figures[0].axes
    assert lower.get_xlabel() == 'time (s)' and figures[0].get_supxlabel() == MEANING
    assert upper.get_title('left') == f'few   {scene.figures(few)}'
    assert 'F, B, W = 1, 2, 3' in [text.get_text() for text in figures[0].texts]
    (background,) = upper.collections[0].get_paths()
    assert background.get_extents().x1 == pytest.approx(few.makespan)
    assert few.makespan < upper.get_xlim()[1]
    middles = {
        (rank, (start + end) / 2, str(p.microbatch))
        for rank, (order, spans) in enumerate(zip(few.schedule.passes, few.spans, strict=True))
        for p, (start, end) in zip(order, spans, strict=True)
    }
    labels = {(t.get_position()[1], t.get_position()[0], t.get_text()) for t in upper.texts}
    assert labels and labels <= middles
    for curves, title in (([3.0, 2.0], 'equal bit for bit'), ([3.0, 2.5], '')):
        loss_png({'a': [3.0, 2.0], 'b': curves}, tmp_path / 'b.png')
        said = figures[-1].axes[0].get_title()
        assert title in said and bool(said) == bool(title)


@pytest.mark.parametrize(('most', 'labelled'), [(24, True), (23, False)])
def test_png_labels_no_more_than_can_be_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, most: int, labelled: bool
) -> None:
    """Of 2 ranks with 4 microbatches of F, B and W."""
    schedule = build('zb-h1', 2, 4)
    figures, make = [], png.new_figure
    monkeypatch.setattr(png, 'new_figure', lambda *size: figures.append(make(*size)) or figures[-1])
    monkeypatch.setattr(png, '_MOST_LABELS', most)
    timeline = simulate(schedule, Costs.uniform(schedule.placement))
    timeline_png({'few': timeline}, tmp_path / 'a.png')
    assert bool(figures[0].axes[0].texts) == labelled


@pytest.mark.parametrize('baseline', [None, 'slow'])
def test_png_marks_what_is_saved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, baseline: str | None
) -> None:
    """Against the baseline, on each timeline that is shorter; nothing without one."""
    names = {'slow': '1f1b', 'fast': 'zb-h1'}
    lines = {}
    for title, name in names.items():
        schedule = build(name, 4, 8)
        lines[title] = simulate(schedule, Costs.uniform(schedule.placement))
    figures, make = [], png.new_figure
    monkeypatch.setattr(png, 'new_figure', lambda *size: figures.append(make(*size)) or figures[-1])
    timeline_png(lines, tmp_path / 'a.png', baseline=baseline)
    slow, fast = figures[0].axes
    said = [text.get_text() for text in fast.texts if 'saves' in text.get_text()]
    assert said == (['saves 18%'] if baseline else []), '27 of 33'
    assert not any('saves' in text.get_text() for text in slow.texts)


def test_png_without_matplotlib_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)
    with pytest.raises(ImportError, match='pip install matplotlib'):
        loss_png({'a': [1.0]}, tmp_path / 'loss.png')


# Bubble against memory


def test_labels_do_not_collide(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of twelve schedules, eleven in one corner."""
    figures = []

    def kept(*size: float):
        figures.append(png.new_figure(*size))
        return figures[-1]

    monkeypatch.setattr(frontier, 'new_figure', kept)
    named = {f'schedule {k}': (8.0 + k / 9, 0.05 + k / 900) for k in range(11)}
    planned = {(4.0, 0.3): '', (8.0, 0.05): 'schedule 0', (12.0, 0.04): 'schedule 1'}
    frontier.frontier_png(
        planned, named | {'1f1b': (8.0, 0.3)}, tmp_path / 'f.png', 'p = 2', 'bubble'
    )
    (axes,) = figures[0].axes
    labels = [note for note in axes.texts if note.get_text()]
    said = {note.get_text() for note in labels}
    assert {'1f1b', 'schedule 0 = planned', 'schedule 1, too'} <= said and len(labels) == 13
    boxes = [Text.get_window_extent(note) for note in labels]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    marks = axes.transData.transform([*planned, *named.values()])
    assert not any(box.contains(*mark) for box in boxes for mark in marks)


# Perfetto


@pytest.mark.parametrize('name', ['1f1b', 'zb-v'])
def test_perfetto_passes_arrows_and_counters(name: str) -> None:
    timeline, costs = simulated(name)
    schedule = timeline.schedule
    events = json.loads(perfetto({name: timeline}, {name: costs}))['traceEvents']
    by = {phase: [e for e in events if e['ph'] == phase] for phase in 'MXsfC'}

    slices = {e['name']: e for e in by['X']}
    for rank, p in schedule:
        assert slices[str(p)]['pid'] == rank
    assert len(by['X']) == sum(map(len, schedule.passes))
    names = {e['pid']: e['args']['name'] for e in by['M'] if e['name'] == 'process_name'}
    assert names == {rank: f'rank {rank}' for rank in range(schedule.num_ranks)}

    ends = {e['id']: e for e in by['f']}
    arrows = set()
    for start in by['s']:
        maker, taker = start['name'].split(' to ')
        end = ends[start['id']]
        made, took = slices[maker], slices[taker]
        assert start['pid'] == made['pid'] != took['pid'] == end['pid']
        assert made['ts'] <= start['ts'] <= made['ts'] + made['dur'] <= end['ts'] == took['ts']
        arrows.add((maker, taker))
    everything = {p for _, p in schedule}
    ranks = schedule.placement.only_route
    assert arrows == {
        (str(q), str(p))
        for rank, p in schedule
        for q in needs(p, everything)
        if ranks[q.stage] != rank
    }
    counted = [
        max(e['args']['held'] for e in by['C'] if e['pid'] == rank)
        for rank in range(schedule.num_ranks)
    ]
    assert tuple(counted) == peak(schedule, costs)


def test_perfetto_keeps_timelines_apart() -> None:
    timeline, _ = simulated('1f1b', 2, 2)
    events = json.loads(perfetto({'simulated': timeline, 'measured': timeline}))['traceEvents']
    names = {e['pid']: e['args']['name'] for e in events if e['name'] == 'process_name'}
    assert names == {
        0: 'simulated rank 0', 1: 'simulated rank 1', 2: 'measured rank 0', 3: 'measured rank 1',
    }  # fmt: skip
    assert len({e['id'] for e in events if e['ph'] == 's'}) == 8


# Page (its behaviour: test_html_browser.py)


@pytest.mark.parametrize('name', ['1f1b', 'zb-h1', 'zb-v'])
def test_waits_are_what_idle_ranks_waited_for(name: str) -> None:
    timeline, _ = simulated(name)
    for order, spans, causes in zip(
        timeline.schedule.passes, timeline.spans, waits(timeline), strict=True
    ):
        free = 0.0
        for p, (start, end), (rank, i) in zip(order, spans, causes, strict=True):
            if rank < 0:
                assert start == pytest.approx(free), p
            else:
                assert start > free
                assert start == pytest.approx(timeline.spans[rank][i][1] + COMM), p
            free = end


def test_page_needs_no_network_and_escapes() -> None:
    timeline, costs = simulated('zb-v')
    name = '</script><script>alert(1)</script>'
    page = html({name: timeline}, {name: costs}, title='<b>&', heading='F = 1 <')
    assert '; F = 1 &lt;</div>' in page and MEANING in page
    assert page.count('<script') == 2
    assert '<h1>&lt;b&gt;&amp;</h1>' in page
    assert "default-src 'none'" in page
    assert re.findall(r'(?:src|href)="(?!data:|#panel-)', page) == []
    assert 'http' not in page.replace('http-equiv', '')
    data = json.loads(re.search(r'type="application/json">(.*?)</script>', page)[1])
    assert data['panels'][0]['name'] == name


# Copies


def copying(name: str) -> tuple[Timeline, Costs]:
    """A schedule whose copies take time, each way as long as a pass."""
    schedule = build(name, 4, 8)
    ways = (1.0,) * schedule.num_stages
    costs = Costs.uniform(schedule.placement).with_times(**dict.fromkeys('OLEK', ways))
    return simulate(schedule, costs), costs


@pytest.mark.parametrize(('name', 'copied'), [('po-h', 4), ('bpipe', 1)])
def test_copies_have_rows_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, copied: int
) -> None:
    """Below the passes of their rank, in all pictures; in none two bars lie on each other."""
    timeline, costs = copying(name)
    rows = scene.lanes(timeline)
    assert [row.label for row in rows].count('copies') == copied
    assert sum(len(row.bars) for row in rows) == sum(map(len, timeline.schedule.passes))
    for row in rows:
        assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(row.bars))
    text = timeline_text(timeline, width=0).splitlines()
    assert [line.split()[0] for line in text] == [row.label.split()[0] for row in rows]
    picture = svg({name: timeline}, {name: costs})
    assert picture.count('>copies</text>') == copied
    figures, make = [], png.new_figure
    monkeypatch.setattr(png, 'new_figure', lambda *size: figures.append(make(*size)) or figures[-1])
    timeline_png({name: timeline}, tmp_path / 'a.png')
    (axes,) = figures[0].axes
    labels = [each.get_text() for each in axes.get_yticklabels()]
    assert labels == [row.label.removeprefix('rank ') for row in rows]
    drawn: dict[int, list[float]] = defaultdict(list)
    for drawing in axes.collections:
        if isinstance(drawing, PolyCollection) and drawing.get_zorder() > 0:
            for path in drawing.get_paths():
                box = path.get_extents()
                drawn[round(box.y0 + box.height / 2)].append(box.width)
    for place, row in enumerate(rows):
        assert sorted(drawn[place]) == pytest.approx(sorted(b.end - b.start for b in row.bars))
    page = html({name: timeline}, {name: costs})
    (data,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', page)
    (panel,) = json.loads(data)['panels']
    assert [row['rank'] for row in panel['rows']] == [row.rank for row in rows]
    assert ('<th>most on the host</th>' in page) == (name == 'po-h')
    hosted = live(timeline.schedule, costs, HOST)
    for row, lane in zip(panel['rows'], rows, strict=True):
        expected = [hosted[lane.rank][place] for place in lane.places]
        assert row['host'] == (expected if name == 'po-h' else None)
        assert len(row['live']) == len(row['waits']) == len(row['starts'])
        for lane, at in row['waits']:
            assert lane == -1 or at < len(panel['rows'][lane]['starts'])


def test_memory_of_what_is_copied_rises_and_falls_with_the_copies() -> None:
    timeline, costs = copying('po-h')
    for curve, most in zip(held(timeline, costs), peak(timeline.schedule, costs), strict=True):
        assert max(amount for _, amount in curve) == most and curve[-1][1] == 0
        assert [time for time, _ in curve] == sorted(time for time, _ in curve)


def test_copies_without_a_time_have_no_row() -> None:
    schedule = build('po-h', 4, 8)
    timeline = simulate(schedule, Costs.uniform(schedule.placement))
    assert len(scene.lanes(timeline)) == 4
