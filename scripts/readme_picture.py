"""Draws the README's picture: 1F1B, ZB-H1 and ZB-V with passes of equal length, and what they save.

python scripts/readme_picture.py docs/pictures/saving.png
"""

from __future__ import annotations

import sys

from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.render.png import timeline_png
from megatron_zbpp.schedules import build

RANKS, MICROBATCHES = 4, 8
SCHEDULES = {'1f1b': "Megatron's 1F1B", 'zb-h1': 'zb-h1', 'zb-v': 'zb-v'}


def draw(path: str) -> None:
    """Write the picture to `path`: simulated, time in units of one F, B or W of a full rank."""
    timelines = {}
    for name, title in SCHEDULES.items():
        schedule = build(name, RANKS, MICROBATCHES)
        timelines[title] = simulate(schedule, Costs.uniform(schedule.placement))
    timeline_png(
        timelines,
        path,
        unit='passes',
        heading=f'simulated: {RANKS} ranks, {MICROBATCHES} microbatches, F = B = W = 1',
        baseline=SCHEDULES['1f1b'],
    )


if __name__ == '__main__':
    draw(sys.argv[1])
