"""Pictures and traces of a few schedules change on purpose only.

`pictures.json` beside this file holds a hash of each. Where one was changed on purpose, write it
anew and look at the picture:

    python tests/unit/render/test_pictures_stay.py [FOLDER that takes the pictures]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.timeline import Timeline
from megatron_zbpp.render.html import html
from megatron_zbpp.render.perfetto import perfetto
from megatron_zbpp.render.svg import svg
from megatron_zbpp.render.text import timeline_text
from megatron_zbpp.schedules import build

FILE = Path(__file__).with_name('pictures.json')


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
        costs[name] = Costs(forward, backward, weight, comm=0.25, times=copies)
        timelines[name] = simulate(schedule, costs[name])
    return timelines, costs


PICTURES: dict[str, Callable[[], str]] = {
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


def digest(picture: str) -> str:
    """Return a few digits of a hash."""
    return sha256(PICTURES[picture]().encode()).hexdigest()[:12]


@pytest.mark.parametrize('picture', PICTURES)
def test_pictures_stay(picture):
    assert digest(picture) == json.loads(FILE.read_text())[picture]


if __name__ == '__main__':
    FILE.write_text(json.dumps({name: digest(name) for name in PICTURES}, indent=1) + '\n')
    for folder in map(Path, sys.argv[1:]):
        folder.mkdir(parents=True, exist_ok=True)
        for name, draw in PICTURES.items():
            (folder / name).write_text(draw())
