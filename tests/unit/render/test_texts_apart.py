"""Texts of pictures: none lies on another one, none leaves the canvas."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.text import Text
from matplotlib.textpath import TextToPath

from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.render.frontier import frontier_png
from megatron_zbpp.render.png import bars_png, loss_png, timeline_png
from megatron_zbpp.render.svg import svg
from megatron_zbpp.schedules import build, own_families
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
    for one, other in combinations(boxes, 2):
        if other.low >= one.high - 1:
            continue
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


def shown(*names: str, p: int = 4, m: int = 8):
    """Simulate schedules, with copies that take time."""
    timelines, costs = {}, {}
    for name in names:
        made = build(name, p, m)
        one = dict.fromkeys('OLEK', (0.5,) * made.num_stages)
        costs[name] = Costs.of(*((1.0,) * made.num_stages,) * 3, times=one)
        timelines[name] = simulate(made, costs[name])
    return timelines, costs


EVERY = tuple(family.name for family in own_families(every=True))
CASES = {
    'one': functools.partial(shown, 'zb-v', p=2, m=2),
    'usual': functools.partial(shown, '1f1b', 'zb-h1', 'zb-v'),
    'copies': functools.partial(shown, 'po-h', 'bpipe'),
    'routes': functools.partial(shown, 'dualpipe', 'hanayo', 'interleaved'),
    'asynchronous': functools.partial(shown, 'pipedream-2bw', 'slimpipe'),
    'high': functools.partial(shown, 'zb-v', p=64, m=8),
    'long': functools.partial(shown, 'zb-v', p=2, m=200),
    'every': functools.partial(shown, *EVERY, p=8, m=8),
}
CASES = {name: functools.cache(case) for name, case in CASES.items()}
HEADS = [('none', 'usual'), ('short', 'usual'), ('long', 'long'), ('money', 'none')]


@pytest.mark.parametrize(('title', 'heading'), HEADS)
@pytest.mark.parametrize('case', CASES)
def test_png(case, title, heading, tmp_path):
    if case in ('every', 'high') and title != 'money':
        pytest.skip('drawn once: it takes seconds')
    timelines, _ = CASES[case]()
    head = {'heading': HEADINGS[heading], 'title': TITLES[title]}
    said = drawn(lambda path: timeline_png(timelines, path, 'ms', **head), tmp_path / 'a.png')
    if title != 'none':  # as it is typed, in lines
        assert TITLES[title].split() in [text.split() for text in said]


@pytest.mark.parametrize('width', [9.0, 20.0])
def test_png_of_other_widths(width, tmp_path):
    timelines, _ = CASES['routes']()
    head = {'heading': HEADINGS['usual'], 'title': TITLES['long'], 'width': width}
    drawn(lambda path: timeline_png(timelines, path, 'ms', **head), tmp_path / 'a.png')


def test_png_with_a_baseline(tmp_path):
    drawn(lambda path: readme_picture.draw(str(path)), tmp_path / 'a.png')


@pytest.mark.parametrize('title', TITLES)
def test_bars(title, tmp_path):
    runs = {name: [1000.0 + k, 1200.5 + k] for k, name in enumerate(['as it is', *EVERY[:5]])}
    drawn(
        lambda path: bars_png(runs, ['gain 30.0%?'] * 6, path, TITLES[title] or 'x'),
        tmp_path / 'a.png',
    )


def test_losses(tmp_path):
    curves = {name: [3.0, 2.0, 1.5] for name in EVERY[:3]}
    drawn(lambda path: loss_png(curves, path), tmp_path / 'a.png')


@pytest.mark.parametrize('title', TITLES)
def test_frontier(title, tmp_path):
    named = {
        name: (made.makespan % 7 + 1, made.idle_all_ranks)
        for name, made in CASES['every']()[0].items()
    }
    plans = {(float(k), 0.6 / k): '' for k in range(1, 8)}
    head = '\n'.join(filter(None, [TITLES[title], HEADINGS['usual']]))
    drawn(lambda path: frontier_png(plans, named, path, head, 'bubble'), tmp_path / 'a.png')


@functools.cache
def glyphs() -> TextToPath:
    return TextToPath()


@functools.cache
def width_of(text: str, size: float, bold: bool) -> float:
    """Return the width of a text in DejaVu Sans, in units of `size`."""
    font = FontProperties('DejaVu Sans', size=size, weight='bold' if bold else 'normal')
    return glyphs().get_text_width_height_descent(text, font, ismath=False)[0]


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
    timelines, costs = CASES[case]()
    for title, heading in HEADS:
        for own, unit, width in ((None, '', 1400), (costs, 'ms', 1400), (costs, 'ms', 1100)):
            head = {'heading': HEADINGS[heading], 'title': TITLES[title], 'width': width}
            tree = ElementTree.fromstring(svg(timelines, own, unit, **head))
            require_apart([box for box in texts(tree) if box.text], *map(float, size_of(tree)))


def size_of(tree: ElementTree.Element) -> tuple[str, str]:
    return tree.get('width', ''), tree.get('height', '')


def test_svg_of_bytes():
    """Memory in bytes is told in GiB, and the words stay within the margin."""
    made = build('zb-v', 4, 8)
    costs = Costs.of(*((12.345,) * 8,) * 3, activation=(1.9e10,) * 8, retained=(1.1e10,) * 8)
    tree = ElementTree.fromstring(svg({'a': simulate(made, costs)}, {'a': costs}, 'ms', width=900))
    found = [box for box in texts(tree) if box.text]
    assert any(box.text.endswith('GiB') for box in found)
    require_apart(found, *map(float, size_of(tree)))
