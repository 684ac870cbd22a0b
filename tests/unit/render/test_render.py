"""Pictures: what they must show, read back from what was written."""

import itertools
import json
import re
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from figures import timeline
from matplotlib.collections import PolyCollection
from matplotlib.text import Text
from oracle import needs
from orders import by_hand

from megatron_zbpp import Costs, build, draw, simulate
from megatron_zbpp.analysis.fit_costs import collective_spans
from megatron_zbpp.analysis.memory import live, peak
from megatron_zbpp.ir import KINDS
from megatron_zbpp.ir.graph import HOST
from megatron_zbpp.ir.timeline import MEANING, Timeline
from megatron_zbpp.render import png, scene
from megatron_zbpp.render.drawing import time_shown, timeline_text
from megatron_zbpp.render.html import html, waits
from megatron_zbpp.render.perfetto import perfetto
from megatron_zbpp.render.png import loss_png, timeline_png
from megatron_zbpp.render.scene import HUES, bars, colour, held, ink, legend, number, stripes, ticks
from megatron_zbpp.render.svg import svg
from megatron_zbpp.techniques.vocabulary.place import (
    in_embedding_shards,
    in_shards,
    with_shard_times,
)

COMM = 0.25


def simulated(name: str, ranks: int = 4, microbatches: int = 8) -> tuple[Timeline, Costs]:
    schedule = build(name, ranks, microbatches)
    costs = Costs.uniform(schedule.placement, 1.0, 1.2, 0.8, comm=COMM)
    return simulate(schedule, costs), costs


def later(timeline: Timeline, by: float) -> Timeline:
    """The same timeline on a clock that started earlier."""
    spans = tuple(tuple((a + by, b + by) for a, b in row) for row in timeline.spans)
    return Timeline(timeline.schedule, spans)


# by colour vision: Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB
VISIONS = json.loads(Path(__file__).with_name('visions.json').read_text())
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
def test_kinds_differ_for_every_colour_vision(vision):
    seen = {kind: lab(hue, vision) for kind, hue in HUES.items()}
    for one, other in itertools.combinations(KINDS, 2):
        distance = sum((a - b) ** 2 for a, b in zip(seen[one], seen[other], strict=True)) ** 0.5
        assert distance > 20, (one, other)


def test_chunks_are_shades_and_their_ink_is_legible():
    assert colour('F', 0, 4) == HUES['F']
    assert len({colour('F', chunk, 4) for chunk in range(4)}) == 4
    assert ink('#000000') == '#ffffff' and ink('#ffffff') == '#000000'
    fused, split = build('1f1b', 2, 2), build('zb-v', 2, 2)
    assert [text for text, _ in legend([fused])] == ['F: forward', 'BW: whole backward', 'idle']
    assert 'W of the last chunk' in dict(legend([fused, split]))


@pytest.mark.parametrize(('v', 'named'), [(2, 2), (3, 3), (4, 4), (6, 3)])
def test_legend_names_each_shade(v, named):
    """Of up to four chunks; of more the ends, and one for all between them."""
    looped = build('interleaved', 2, 4, num_chunks=v)
    entries = [each for each in legend([looped]) if each[0].startswith('F')]
    shades = [colour('F', chunk, v) for chunk in range(v)]
    assert len(entries) == named and {fill for _, fill in entries} <= {*shades}
    assert [entries[0][1], entries[-1][1]] == [shades[0], shades[-1]]
    assert v > 4 or [fill for _, fill in entries] == shades


def test_bars_count_from_the_first_start():
    timeline, _ = simulated('zb-v')
    for row, other in zip(bars(timeline), bars(later(timeline, 100.0)), strict=True):
        for bar, moved in zip(row, other, strict=True):
            assert bar.start == pytest.approx(moved.start)


@pytest.mark.parametrize('name', ['1f1b', 'zb-h2', 'zb-v', 'po-h'])
def test_memory_curve_peaks_and_ends_empty(name):
    """With copies, too; where they take no time they have no rows."""
    line, costs = copying(name) if name == 'po-h' else simulated(name)
    curves = held(line, costs)
    most = tuple(max(amount for _, amount in curve) for curve in curves)
    assert most == peak(line.schedule, costs)
    for curve in curves:
        assert [time for time, _ in curve] == sorted({time for time, _ in curve})
        assert curve[-1][1] == pytest.approx(0)
    assert len(scene.lanes(timeline(build('po-h', 4, 8)))) == 4


def test_memory_curve_rises_with_b_and_within_bw():
    """Where more waits for W than F left."""
    schedule = by_hand(1, 2, '0F0 0BW0 0F1 0B1 0W1')
    costs = Costs.of((1,), (1,), (2,), activation=(2,), retained=(5,))
    assert held(simulate(schedule, costs), costs) == [[(0, 2), (2, 5), (4, 2), (6, 5), (8, 0)]]


@pytest.mark.parametrize('span', [1e-6, 0.07, 1.0, 33.5, 9e8])
def test_ticks_are_few_round_and_inside(span):
    marks = ticks(span, 10)
    assert marks[0] == 0 and 3 <= len(marks) <= 12
    assert marks[-1] <= span * (1 + 1e-9) < marks[-1] + 1.01 * marks[1]
    assert ticks(0.0, 10) == [0.0]


def test_number_is_short():
    shown = [number(x) for x in (4.0, 26.750000001, 0.1 + 0.2, 1234567.0, 1e-9)]
    assert shown == ['4', '26.75', '0.3', '1234600', '1e-09']


@pytest.mark.parametrize('width', [20, 80, 120])
@pytest.mark.parametrize('name', ['1f1b', 'zb-v'])
def test_text_keeps_its_width(name, width):
    timeline, _ = simulated(name, 12, 40)
    lines = timeline_text(timeline, width).splitlines()
    assert len(lines) == 12 and max(map(len, lines)) <= width
    assert lines[0].endswith('…')
    assert 0 < time_shown(timeline, width) < timeline.makespan
    assert time_shown(timeline, 0) == timeline.makespan


def test_text_in_colour_says_the_same():
    timeline, _ = simulated('zb-v')
    painted = timeline_text(timeline, colours=True)
    assert '\x1b[48;2;31;79;216' in painted
    plain = re.sub(r'\x1b\[[\d;]*m', '', painted)
    assert [x.rstrip() for x in plain.splitlines()] == timeline_text(timeline).splitlines()
    schedule = build('1f1b', 2, 2)
    free = simulate(schedule, Costs.uniform(schedule.placement, 0, 0, 0))
    assert timeline_text(free).splitlines() == ['rank 0', 'rank 1']


SVG = '{http://www.w3.org/2000/svg}'


@pytest.mark.parametrize('with_memory', [False, True])
def test_svg_has_every_pass_and_curve(with_memory):
    lines, costs = {}, {}
    for title, name in (('1f1b', '1f1b'), ('<a & "b">', 'zb-v')):
        lines[title], costs[title] = simulated(name)
    heading = 'F, B, W = 1, 1.2, 0.8'
    root = ET.fromstring(svg(lines, costs if with_memory else None, unit='ms', heading=heading))
    groups = [g for g in root.iter(f'{SVG}g') if g.get('class') == 'passes']
    for group, line in zip(groups, lines.values(), strict=True):
        drawn = [path.get('d').count('M') for path in group.iter(f'{SVG}path')]
        assert sum(drawn) == sum(map(len, line.schedule.passes))
    curves = [p for p in root.iter(f'{SVG}path') if p.get('class') == 'memory']
    assert [curve.get('d').count('M') for curve in curves] == ([4, 4] if with_memory else [])
    texts = [text.text for text in root.iter(f'{SVG}text')]
    line = lines['<a & "b">']
    figures = f'idle GPU time {line.idle_all_ranks:.1%}, bubble {line.bubble:.1%}'
    assert f'<a & "b">: makespan {number(line.makespan)}, {figures}' in texts and MEANING in texts
    assert 'F, B, W = 1, 1.2, 0.8' in texts
    assert 'ms' in texts
    assert ('max 4' in texts) == with_memory


def test_idle_time_ends_where_a_schedule_ends():
    """The shorter of two does not look idle at the end."""
    lines = {name: simulated(name)[0] for name in ('zb-v', '1f1b')}
    root = ET.fromstring(svg(lines))
    idle = [path.get('d') for path in root.iter(f'{SVG}path') if path.get('class') == 'idle']
    for d, line in zip(idle, lines.values(), strict=True):
        ends = {float(end) for end in re.findall(r'h(\d[\d.]*)', d)}
        assert ends == {float(f'{line.makespan:.7g}')}
    # by the stripes at the foot of their bars, in every shade, in the legend, too
    assert len({len(stripes(kind, 0, 1)) for kind in KINDS}) == len(KINDS)
    drawn = [p.get('d') for p in root.iter(f'{SVG}path') if p.get('class') == 'stripes']
    wanted = {'F': 0, 'B': 1, 'W': 2, 'BW': 3}
    schedules = [line.schedule for line in lines.values()]
    passes = [p.kind for schedule in schedules for _, p in schedule]
    named = [text.split()[0].strip(':') for text, _ in legend(schedules)]
    assert sum(d.count('M') for d in drawn) == sum(wanted.get(k, 0) for k in (*passes, *named))


def test_png_says_what_is_drawn(figures, tmp_path):
    """Times, units, ends, both shares of idle time and what they mean; equal curves as such."""
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
def test_png_labels_no_more_than_can_be_read(figures, monkeypatch, tmp_path, most, labelled):
    """Of 2 ranks with 4 microbatches of F, B and W."""
    monkeypatch.setattr(png, '_MOST_LABELS', most)
    timeline_png({'few': simulate(build('zb-h1', 2, 4))}, tmp_path / 'a.png')
    assert bool(figures[0].axes[0].texts) == labelled


@pytest.mark.parametrize('baseline', [None, 'slow'])
def test_png_marks_what_is_saved(figures, tmp_path, baseline):
    """Against the baseline, on each timeline that is shorter; nothing without one."""
    lines = {
        title: simulate(build(name, 4, 8)) for title, name in (('slow', '1f1b'), ('fast', 'zb-h1'))
    }
    timeline_png(lines, tmp_path / 'a.png', baseline=baseline)
    slow, fast = figures[0].axes
    said = [text.get_text() for text in fast.texts if 'saves' in text.get_text()]
    assert said == (['saves 18%'] if baseline else []), '27 of 33'
    assert not any('saves' in text.get_text() for text in slow.texts)


def test_png_without_matplotlib_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)
    with pytest.raises(ImportError, match='pip install matplotlib'):
        loss_png({'a': [1.0]}, tmp_path / 'loss.png')


def test_labels_do_not_collide(figures, tmp_path):
    """Of twelve schedules, eleven in one corner."""
    named = {f'schedule {k}': (8.0 + k / 9, 0.05 + k / 900) for k in range(11)}
    planned = {(4.0, 0.3): '', (8.0, 0.05): 'schedule 0', (12.0, 0.04): 'schedule 1'}
    png.frontier_png(planned, named | {'1f1b': (8.0, 0.3)}, tmp_path / 'f.png', 'p = 2', 'bubble')
    (axes,) = figures[0].axes
    labels = [note for note in axes.texts if note.get_text()]
    said = {note.get_text() for note in labels}
    assert {'1f1b', 'schedule 0 = planned', 'schedule 1, too'} <= said and len(labels) == 13
    boxes = [Text.get_window_extent(note) for note in labels]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    marks = axes.transData.transform([*planned, *named.values()])
    assert not any(box.contains(*mark) for box in boxes for mark in marks)


@pytest.mark.parametrize('name', ['1f1b', 'zb-v'])
def test_perfetto_passes_arrows_and_counters(name):
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


# Page (its behaviour: test_html_browser.py)


@pytest.mark.parametrize('name', ['1f1b', 'zb-h1', 'zb-v'])
def test_waits_are_what_idle_ranks_waited_for(name):
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


def test_page_needs_no_network_and_escapes():
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


def copying(name: str) -> tuple[Timeline, Costs]:
    """A schedule whose copies take time, each way as long as a pass."""
    schedule = build(name, 4, 8)
    ways = (1.0,) * schedule.num_stages
    costs = Costs.uniform(schedule.placement).with_times(**dict.fromkeys('OLEK', ways))
    return simulate(schedule, costs), costs


@pytest.mark.parametrize(('name', 'copied'), [('po-h', 4), ('bpipe', 1)])
def test_copies_have_rows_of_their_own(figures, tmp_path, name, copied):
    """Below the passes of their rank, in all pictures; in none two bars lie on each other."""
    timeline, costs = copying(name)
    rows = scene.lanes(timeline)
    assert [row.label for row in rows].count('copies') == copied
    assert sum(len(row.bars) for row in rows) == sum(map(len, timeline.schedule.passes))
    for row in rows:
        assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(row.bars))
    text = timeline_text(timeline, width=0).splitlines()
    assert [line.split()[0] for line in text] == [row.label.split()[0] for row in rows]
    assert svg({name: timeline}, {name: costs}).count('>copies</text>') == copied
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


# ---- Drawings in Python: in letters, in a notebook, and as files.


SCHEDULE = build('zb-v', 2, 4)


def test_in_letters(tmp_path):
    assert str(draw(SCHEDULE)).splitlines()[0].startswith('rank 0  F0 F1')
    drawn = draw(SCHEDULE)
    assert ET.fromstring(drawn._repr_svg_()).tag.endswith('svg')
    [inside] = re.findall('<iframe srcdoc="([^"]*)" ', drawn._repr_html_())
    page = tmp_path / 'page.html'
    drawn.save(page)
    assert unescape(inside) == page.read_text()


def test_drawings_as_files_and_words(tmp_path):
    begin = {'a.svg': b'<svg', 'b.html': b'<!', 'c.png': b'\x89PNG', 'd.pdf': b'%PDF'}
    for name, begins in begin.items():
        draw(SCHEDULE).save(tmp_path / name)
        assert (tmp_path / name).read_bytes()[:50].lstrip().startswith(begins)
    slow = Costs.uniform(SCHEDULE.placement, 2, 2, 2)
    once = draw(SCHEDULE).timeline.makespan
    assert draw(SCHEDULE, slow).timeline.makespan == 2 * once
    assert draw(replace(SCHEDULE, costs=slow)).timeline.makespan == 2 * once
    assert repr(SCHEDULE) == '<Schedule zb-v: 2 ranks, 4 stages (v), 4 microbatches, 48 passes>'


# ---- Collectives of the pipeline: when they can have run, and no arrows beside them.


TIMES = {'hidden': 0.3, 'statistics': 0.1, 'vocabulary': 0.2, 'embedding': 0.4, 'tokens': 0.05}
RANKS, MICROBATCHES, ORIGIN = 2, 4, 5.0


@pytest.fixture(scope='module')
def shards():
    """ZB-V with both layers on all ranks, which begins at another second than 0."""
    host = build('zb-v', RANKS, MICROBATCHES)
    costs = with_shard_times(Costs.uniform(host.placement), host.placement, 0.2)
    costs = replace(costs, comm=0.25, collectives=TIMES)
    made = simulate(in_embedding_shards(in_shards(host, costs), costs), costs)
    spans = tuple(tuple((a + ORIGIN, b + ORIGIN) for a, b in row) for row in made.spans)
    return replace(made, spans=spans), costs


def exchanged(timeline):
    """Each need that a collective fills, of which pass, and by which."""
    schedule = timeline.schedule
    return [
        (need.message, p, q)
        for _, p in schedule
        for need, q in schedule.needs(p)
        if need.message in schedule.graph.collectives
    ]


@pytest.mark.parametrize('known', [True, False])
def test_spans_lie_between_those_who_make_and_those_who_take(shards, known):
    """They are as long as costs say; where these say nothing, until a pass takes the result."""
    timeline, costs = shards
    found = collective_spans(timeline, costs if known else None)
    by = {(each.message, each.microbatch): each for each in found}
    of, rank_of = timeline.schedule.graph.collectives, timeline.schedule.rank_of
    assert len(found) == len(by) == len(of) * MICROBATCHES and len(of) == 6
    first, last = {}, {}
    for message, p, q in exchanged(timeline):
        span, (start, _), (_, end) = by[message, q.microbatch], *map(timeline.by_pass.get, (p, q))
        assert span.operation == of[message].operation and end <= span.start + 1e-9
        last[span] = max(end, last.get(span, end))
        if span.operation != 'broadcast' or rank_of(p) != rank_of(q):
            assert span.end <= start + 1e-9
            first[span] = min(start, first.get(span, start))
    assert len(first) == len(last) == len(found)
    for span in found:
        before = by.get((of[span.message].after, span.microbatch))
        assert span.start == (before.end if before else last[span])
        if known and span.message in TIMES:
            assert span.end - span.start == pytest.approx(TIMES[span.message])
        elif span.message != 'statistics':
            assert span.end == first[span]


def test_traces_show_them_on_all_ranks(shards):
    timeline, costs = shards
    events = json.loads(perfetto({'zb-v': timeline}, {'zb-v': costs}))['traceEvents']
    begun, ended = ({(e['name'], e['pid']): e for e in events if e['ph'] == p} for p in 'be')
    for span in collective_spans(timeline, costs):
        for rank in range(RANKS):
            name = f'{span.operation} {span.message} {span.microbatch}', rank
            start, end = begun.pop(name), ended.pop(name)
            assert start['id'] == end['id'] and start['cat'] == 'collective'
            assert start['ts'] == pytest.approx((span.start - ORIGIN) * 1e6)
            assert end['ts'] == pytest.approx((span.end - ORIGIN) * 1e6)
    assert not begun and not ended
    assert len({e['id'] for e in events if 'id' in e}) == sum(e['ph'] in 'sb' for e in events)
    told = {(str(q), str(p)) for _, p, q in exchanged(timeline)}
    arrows = {tuple(e['name'].split(' to ')) for e in events if e['ph'] == 's'}
    assert arrows and not arrows & told, 'messages between two ranks alone'


def test_of_slices_each_has_its_own():
    """Without shards there is none."""
    assert collective_spans(simulate(build('zb-v', RANKS, MICROBATCHES))) == []
    host = build('seq1f1b', RANKS, MICROBATCHES, num_slices=2)
    costs = with_shard_times(Costs.uniform(host.placement), host.placement, 0.2)
    timeline = simulate(in_shards(host, costs), costs)
    events = json.loads(perfetto({'': timeline}))['traceEvents']
    names = {e['name'] for e in events if e['ph'] == 'b'}
    assert len(names) == 3 * MICROBATCHES * 2 and 'broadcast hidden 3.1' in names
