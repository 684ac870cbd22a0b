"""Texts of pictures: none lies on another one, none leaves the canvas."""

import functools
import re
from collections.abc import Callable, Iterator
from itertools import islice, takewhile
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.text import Text
from matplotlib.textpath import TextToPath

from megatron_zbpp import Costs, build, simulate
from megatron_zbpp.render.png import bars_png, frontier_png, loss_png, timeline_png
from megatron_zbpp.render.scene import legend
from megatron_zbpp.render.svg import svg
from megatron_zbpp.schedules import own_families
from scripts import readme_picture

WORDS = 'Eight stages of a model of 70 billion parameters, '
TITLES = {'none': '', 'short': 'Ours', 'long': 6 * WORDS, 'money': 'Costs $1_a and $2_b'}
HEADINGS = {'none': '', 'usual': 'p = 4, m = 8, F = B = W = 1, time in ms', 'long': 6 * WORDS}


class Box(NamedTuple):
    """Where a text lies, in pixels; `top` is above `bottom` or below it, as the picture counts."""

    text: str
    left: float
    right: float
    low: float
    high: float


def require_apart(boxes: list[Box], width: float, height: float) -> None:
    """Raise AssertionError if a text leaves the canvas, or lies on another one by over a pixel."""
    assert boxes
    for box in boxes:
        assert box.left >= -1 and box.right <= width + 1, (box, width)
        assert box.low >= -1 and box.high <= height + 1, (box, height)
    boxes = sorted(boxes, key=lambda box: box.low)
    for at, one in enumerate(boxes, 1):
        for other in takewhile(
            lambda each, one=one: each.low < one.high - 1, islice(boxes, at, None)
        ):
            apart = one.right - 1 <= other.left or other.right - 1 <= one.left
            assert apart, (one, other)


def drawn(draw: Callable[[Path], None], path: Path) -> list[str]:
    """Draw a picture of matplotlib's, hold its texts apart, and return them."""
    boxes: dict[int, Box] = {}
    canvas: list[tuple[float, float]] = []
    draw_text, save = Text.draw, Figure.savefig

    def recorded(self: Text, renderer) -> None:
        draw_text(self, renderer)
        if self.get_visible() and self.get_text().strip():
            (left, low), (right, high) = self.get_window_extent(renderer).get_points()
            boxes[id(self)] = Box(self.get_text(), left, right, low, high)
            canvas.append((renderer.width, renderer.height))

    def saved(self: Figure, *args, **how) -> None:
        boxes.clear()
        save(self, *args, **how)

    with patch.object(Text, 'draw', recorded), patch.object(Figure, 'savefig', saved):
        draw(path)
    require_apart(list(boxes.values()), *canvas[-1])
    return [box.text for box in boxes.values()]


@functools.cache
def shown(case: str):
    """Simulate the schedules of a case, with copies that take time."""
    timelines, costs = {}, {}
    names, p, m = CASES[case]
    for name in names:
        made = build(name, p, m)
        one = dict.fromkeys('OLEK', (0.5,) * made.num_stages)
        costs[name] = Costs.of(*((1.0,) * made.num_stages,) * 3, times=one)
        timelines[name] = simulate(made, costs[name])
    return timelines, costs


EVERY = tuple(family.name for family in own_families(every=True))
CASES = {
    'one': (('zb-v',), 2, 2),
    'usual': (('1f1b', 'zb-h1', 'zb-v'), 4, 8),
    'copies': (('po-h', 'bpipe'), 4, 8),
    'routes': (('dualpipe', 'hanayo', 'interleaved'), 4, 8),
    'asynchronous': (('pipedream-2bw', 'slimpipe'), 4, 8),
    'high': (('zb-v',), 64, 8),
    'long': (('zb-v',), 2, 200),
    'every': (EVERY, 8, 8),
}
HEADS = [('none', 'usual'), ('short', 'usual'), ('long', 'long'), ('money', 'none')]


@pytest.mark.parametrize(('title', 'heading'), HEADS)
@pytest.mark.parametrize('case', CASES)
def test_png(case, title, heading, tmp_path):
    if case in ('every', 'high') and title != 'money':
        pytest.skip('drawn once: it takes seconds')
    timelines, _ = shown(case)
    head = {'heading': HEADINGS[heading], 'title': TITLES[title]}
    said = drawn(lambda path: timeline_png(timelines, path, 'ms', **head), tmp_path / 'a.png')
    if title != 'none':  # as it is typed, in lines
        assert TITLES[title].split() in [text.split() for text in said]


@pytest.mark.parametrize('width', [9.0, 20.0])
def test_png_of_other_widths(width, tmp_path):
    """And the picture of README, with a baseline."""
    drawn(lambda path: readme_picture.draw(str(path)), tmp_path / 'b.png')
    timelines, _ = shown('routes')
    head = {'heading': HEADINGS['usual'], 'title': TITLES['long'], 'width': width}
    drawn(lambda path: timeline_png(timelines, path, 'ms', **head), tmp_path / 'a.png')


@pytest.mark.parametrize('title', TITLES)
def test_bars(title, tmp_path):
    """And losses."""
    runs = {name: [1000.0 + k, 1200.5 + k] for k, name in enumerate(['as it is', *EVERY[:5]])}
    head, gains = TITLES[title] or 'x', ['gain 30.0%?'] * 6
    drawn(lambda path: bars_png(runs, gains, path, head), tmp_path / 'a.png')
    curves = {name: [3.0, 2.0, 1.5] for name in EVERY[:3]}
    drawn(lambda path: loss_png(curves, path), tmp_path / 'b.png')


@pytest.mark.parametrize('title', TITLES)
def test_frontier(title, tmp_path):
    named = {
        name: (made.makespan % 7 + 1, made.idle_all_ranks)
        for name, made in shown('every')[0].items()
    }
    plans = {(float(k), 0.6 / k): '' for k in range(1, 8)}
    head = '\n'.join(filter(None, [TITLES[title], HEADINGS['usual']]))
    drawn(lambda path: frontier_png(plans, named, path, head, 'bubble'), tmp_path / 'a.png')


GLYPHS = TextToPath()


@functools.cache
def width_of(text: str, size: float, bold: bool) -> float:
    """Return the width of a text in DejaVu Sans, in units of `size`."""
    font = FontProperties('DejaVu Sans', size=size, weight='bold' if bold else 'normal')
    return GLYPHS.get_text_width_height_descent(text, font, ismath=False)[0]


def texts(element: ElementTree.Element, down: float = 0.0) -> Iterator[Box]:
    """Yield where the texts of an SVG lie."""
    for child in element:
        shift = re.match(r'translate\(0 ([\d.]+)\)', child.get('transform', ''))
        if child.tag.endswith('}text'):
            classes = child.get('class', '').split()
            size = 15 if 'name' in classes else 11 if 'label' in classes else 12
            text = child.text or ''
            width = width_of(text, size, 'name' in classes)
            x, y = float(child.get('x')), float(child.get('y')) + down
            before = 1.0 if 'right' in classes else 0.5 if 'label' in classes else 0.0
            left = x - before * width
            yield Box(text, left, left + width, y - 0.76 * size, y + 0.2 * size)
        else:
            yield from texts(child, down + (float(shift[1]) if shift else 0.0))


@pytest.mark.parametrize('case', CASES)
def test_svg(case):
    timelines, costs = shown(case)
    entries = {text for text, _ in legend(each.schedule for each in timelines.values())}
    for title, heading in HEADS:
        for own, unit, width in ((None, '', 1400), (costs, 'ms', 1400), (costs, 'ms', 1100)):
            head = {'heading': HEADINGS[heading], 'title': TITLES[title], 'width': width}
            said = held_apart(ElementTree.fromstring(svg(timelines, own, unit, **head)))
            assert entries <= {*said}
    if case == 'copies':  # the legend in as many lines as it takes
        held_apart(ElementTree.fromstring(svg(timelines, costs, width=600)))


def held_apart(tree: ElementTree.Element) -> list[str]:
    """Hold the texts of an SVG apart, and return them."""
    boxes = [box for box in texts(tree) if box.text]
    require_apart(boxes, *(float(tree.get(name, '')) for name in ('width', 'height')))
    return [box.text for box in boxes]


def test_svg_of_bytes():
    """Memory in bytes is told in GiB, and the words stay within the margin."""
    made = build('zb-v', 4, 8)
    costs = Costs.of(*((12.345,) * 8,) * 3, activation=(1.9e10,) * 8, retained=(1.1e10,) * 8)
    tree = ElementTree.fromstring(svg({'a': simulate(made, costs)}, {'a': costs}, 'ms', width=900))
    assert any(text.endswith('GiB') for text in held_apart(tree))
