"""Pictures and traces of a few schedules change on purpose only.

`pictures.json` beside this file holds a hash of each. Where one was changed on purpose, write it
anew and look at the picture:

    PYTHONPATH=tests/support python tests/unit/render/test_pictures_stay.py [FOLDER for pictures]
"""

import sys
from collections.abc import Callable, Iterable
from hashlib import sha256
from pathlib import Path
from unittest.mock import patch

import matplotlib
import pytest
from matplotlib.figure import Figure
from stays import golden

from megatron_zbpp import Costs, build, simulate
from megatron_zbpp.ir.timeline import Timeline
from megatron_zbpp.render.drawing import timeline_text
from megatron_zbpp.render.html import html
from megatron_zbpp.render.perfetto import perfetto
from megatron_zbpp.render.png import frontier_png, loss_png, timeline_png
from megatron_zbpp.render.svg import svg


def shown(*names: str) -> tuple[dict[str, Timeline], dict[str, Costs]]:
    """Simulate schedules of 3 ranks and 4 microbatches, with messages and copies."""
    timelines: dict[str, Timeline] = {}
    costs: dict[str, Costs] = {}
    for name in names:
        schedule = build(name, 3, 4)
        stages = schedule.num_stages
        copies = dict.fromkeys('OLEK', (0.5,) * stages)
        of = [(float(2 + s % 2), float(3 + s % 3), 2.0) for s in range(stages)]
        forward, backward, weight = (tuple(kind) for kind in zip(*of, strict=True))
        costs[name] = Costs.of(forward, backward, weight, comm=0.25, times=copies)
        timelines[name] = simulate(schedule, costs[name])
    return timelines, costs


def described(draw: Callable[[Path], None]) -> str:
    """Return what is on a figure of matplotlib's: pixels differ between its releases."""
    if not matplotlib.__version__.startswith('3.11.'):
        pytest.skip('what is on a figure was written down with matplotlib 3.11')
    saved: list[tuple[Figure, dict[str, object]]] = []
    with patch.object(Figure, 'savefig', lambda self, *_, **how: saved.append((self, how))):
        draw(Path('anywhere'))
    ((figure, how),) = saved
    said: list[object] = [*figure.get_size_inches(), how]
    for artist in figure.findobj():
        said.append(type(artist).__name__)
        for name in (
            *('label', 'color', 'alpha', 'visible', 'zorder', 'text', 'fontsize', 'position'),
            *('xdata', 'ydata', 'linewidth', 'linestyle', 'marker', 'facecolor', 'edgecolor'),
            *('hatch', 'offsets', 'xlim', 'ylim', 'ha', 'va', 'rotation'),
        ):
            if (get := getattr(artist, f'get_{name}', None)) is not None:
                said.append(f'{name} {plain(get())}')
    return '\n'.join(map(str, said))


def plain(value: object) -> object:
    """Return it with numbers of four digits."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        return f'{value:.4g}' if isinstance(value, float) else value
    return [plain(each) for each in (value.tolist() if hasattr(value, 'tolist') else value)]


def timelines_on(path: Path) -> None:
    timeline_png(shown('zb-v', 'po-h')[0], path, 'ms', 11.0, 'F, B, W')


def losses_on(path: Path) -> None:
    loss_png({'one': [3.0, 2.0, 1.5], 'two': [3.0, 2.5]}, path)


def frontier_on(path: Path) -> None:
    """Draw plans, one as good as a schedule, and schedules of which two share a place."""
    planned = {(1.0, 0.4): '', (2.0, 0.25): 'v-half', (4.0, 0.125): 'zb-v'}
    named = {'1f1b': (4.0, 0.3), 'v-half': (2.0, 0.25), 'gpipe': (8.0, 0.3), 'other': (4.0, 0.3)}
    frontier_png(planned, named, path, 'p = 4', 'bubble')


PICTURES: dict[str, Callable[[], str]] = {
    'timelines.png': lambda: described(timelines_on),
    'losses.png': lambda: described(losses_on),
    'frontier.png': lambda: described(frontier_on),
    'one.svg': lambda: svg(*shown('zb-v')),
    'two.svg': lambda: svg(*shown('1f1b', 'po-h')),
    'one.html': lambda: html(*shown('zb-v'), title='one', heading='F, B, W'),
    'two.html': lambda: html(*shown('1f1b', 'po-h'), title='two'),
    'plain.html': lambda: html(shown('interleaved')[0], {}, title='plain'),
    'one.json': lambda: perfetto(*shown('zb-v')),
    'two.json': lambda: perfetto(*shown('1f1b', 'po-h')),
    'narrow.txt': lambda: timeline_text(shown('zb-v')[0]['zb-v'], width=60),
    'wide.txt': lambda: timeline_text(shown('bpipe')[0]['bpipe'], width=0),
}


def digest(draw: Callable[[], str]) -> str:
    """Return a few digits of a hash."""
    return sha256(draw().encode()).hexdigest()[:12]


FILE = Path(__file__).with_name('pictures.json')
test_pictures_stay = golden(__name__, FILE, PICTURES, digest)
if __name__ == '__main__':
    for folder in map(Path, sys.argv[1:]):
        folder.mkdir(parents=True, exist_ok=True)
        for name, draw in PICTURES.items():
            (folder / name.replace('.png', '.txt')).write_text(draw())
