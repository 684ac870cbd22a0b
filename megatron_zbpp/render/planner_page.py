"""A page of one file on which schedules are compared: sliders, timelines, figures; no network.

Its orders are those of the library, made here for a grid of sizes and packed; its script simulates
them (simulate.js), as `analysis.simulator` does.
"""

from __future__ import annotations

import base64
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

from megatron_zbpp.ir import BW, B, F, Schedule, W, chain
from megatron_zbpp.ir.formats import MANY
from megatron_zbpp.ir.timeline import MEANING
from megatron_zbpp.render.html import embedded, filled
from megatron_zbpp.render.scene import HUES, STRIPES, between, colour, ink
from megatron_zbpp.schedules import Family, build, own_families
from megatron_zbpp.version import __version__

KINDS = (F, B, W, BW)  # in the order of their letters
_FIRST_LETTER, _TOGETHER = 48, '+'  # as in simulate.js
_MEANINGS = {kind: chain(1).kinds[kind].words for kind in KINDS}
_SHADES = 8  # of colours in the page; of more chunks, neighbours share one
MOST_PASSES = 12_000_000  # of all orders of a page


class Sizes(NamedTuple):
    """Sizes of which a page has schedules."""

    ranks: Sequence[int] = (2, 4, 6, 8, 12, 16)
    microbatches: Sequence[int] = (4, 8, 16, 24, 32, 64)
    chunks: Sequence[int] = (2, 3, 4)  # of schedules that take any number; others have their own

    @property
    def passes(self) -> int:
        """Estimate the passes of all orders."""
        p, m, v = map(sum, self)
        several = sum(len(family.chunks) > 1 for family in families())
        return 3 * p * m * (v * several + len(families()) - several)


def planner_page(
    sizes: Sizes | None = None, done: Callable[[float], None] = lambda share: None
) -> str:
    """Return the page.

    `done` is told the share of orders that are made, from 0 to 1.
    """
    sizes = Sizes(*(sorted(set(each)) for each in sizes or Sizes()))
    if sizes.passes > MOST_PASSES:
        raise ValueError(
            f'about {sizes.passes} passes are too many for a page: give fewer or smaller sizes, up '
            f'to {MOST_PASSES} passes'
        )
    lines = list(_orders(sizes, done))
    if not lines:
        raise ValueError('no schedule has any of these sizes: give 2 ranks or more')
    data = {
        'orders': packed('\n'.join(lines)),
        'sizes': sizes._asdict(),
        'families': [
            {
                'name': family.name,
                'summary': family.summary,
                'fitted': 'costs' in family.options,
                'copies': family.num_routes,
            }
            for family in families()
        ],
        'palette': {kind: _shades(kind) for kind in KINDS},
        'stripes': STRIPES,
        'meanings': _MEANINGS,
        'many': MANY,
        'meaning': MEANING,
        'version': __version__,
    }
    return filled(
        'planner.html', {'data': embedded(data), 'legend': ''.join(_legend(sizes.chunks))}
    )


def families() -> tuple[Family, ...]:
    """Return the families of the page: those without a technique but a second route."""
    every = own_families(every=True)
    return tuple(family for family in every if len(family.techniques) < family.num_routes)


def _orders(sizes: Sizes, done: Callable[[float], None]) -> Iterator[str]:
    cases = list(product(sizes.ranks, families()))
    whole, past = sum(p for p, _ in cases), 0
    for p, family in cases:
        several = [v for v in sizes.chunks if v in family.chunks] if len(family.chunks) > 1 else []
        for v, m in product(several or [family.default_chunks], sizes.microbatches):
            try:
                made = build(family.name, p, m, num_chunks=v)
            except ValueError:  # this family takes no such sizes: the page says so
                continue
            yield encoded(made, family.name)
        past += p
        done(past / whole)


def encoded(schedule: Schedule, name: str) -> str:
    """Return a schedule as one line: a letter a pass, as microbatches come in their order."""
    placement = schedule.placement
    if schedule.graph.techniques:
        raise ValueError(f'{name} has passes other than F, B and W: a page has no letters for them')
    orders = (_letters(schedule, rank) for rank in range(schedule.num_ranks))
    parts = (
        name,
        placement.num_chunks // len(placement.routes),
        schedule.num_ranks,
        schedule.num_microbatches,
        ';'.join(','.join(map(str, route)) for route in placement.routes),
        ','.join(map(str, placement.route)),
        ' '.join(orders),
    )
    return '\t'.join(map(str, parts))


def _letters(schedule: Schedule, rank: int) -> str:
    """Return the order of a rank: a letter tells kind, route and stage of a pass."""
    placement = schedule.placement
    slots = [
        (route, stage)
        for route, ranks in enumerate(placement.routes)
        for stage, own in enumerate(ranks)
        if own == rank
    ]
    microbatches = range(schedule.num_microbatches)
    taken = {slot: [i for i in microbatches if placement.route_of(i) == slot[0]] for slot in slots}
    forwards, backwards = ({slot: iter(taken[slot]) for slot in slots} for _ in range(2))
    split: dict[tuple[int, int], deque[int]] = {slot: deque() for slot in slots}
    text: list[str] = []
    for at, ran in enumerate(schedule.passes[rank]):
        slot = placement.route_of(ran.microbatch), ran.stage
        if ran.kind == W:
            expected = split[slot].popleft() if split[slot] else None
        else:
            expected = next((forwards if ran.kind == F else backwards)[slot], None)
        if expected != ran.microbatch:
            raise ValueError(f'{schedule.name}: {ran} of rank {rank} is not in microbatch order')
        if ran.kind == B:
            split[slot].append(ran.microbatch)
        text.append(chr(_FIRST_LETTER + 4 * slots.index(slot) + KINDS.index(ran.kind)))
        if (rank, at) in schedule.together:
            text.append(_TOGETHER)
    return ''.join(text)


def packed(text: str) -> str:
    """Return `text` deflated, in base64: browsers unpack both without a library."""
    deflate = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    return base64.b64encode(deflate.compress(text.encode()) + deflate.flush()).decode()


def _shades(kind: str) -> list[tuple[str, str]]:
    fills = (colour(kind, shade, _SHADES) for shade in range(_SHADES))
    return [(fill, ink(fill)) for fill in fills]


def _legend(chunks: Sequence[int]) -> Iterator[str]:
    for kind in KINDS:
        feet, shades = '<s></s>' * STRIPES[kind], [fill for fill, _ in _shades(kind)]
        entries = {
            'all': (f'{kind}: {_MEANINGS[kind]}', HUES[kind]),
            **{
                said: (f'{kind} of {said}', shades[int(k * (_SHADES - 1) / (v - 1) + 0.5)])
                for said, k, v in between(chunks)
            },
            'chunks': (f'{kind} of the last chunk', colour(kind, 1, 2)),
            'routes': (f'{kind}, up', colour(kind, 1, 2)),
        }
        for when, (text, fill) in entries.items():
            style = f'background:{fill};color:{ink(fill)}'
            where = f'data-kind="{kind}" data-when="{when}"'
            yield f'<li {where}><i style="{style}">{feet}</i>{text}</li>'
    yield '<li><i style="background:var(--idle)"></i>idle</li>'
    yield '<li><i style="background:var(--memory);opacity:.5"></i>activations held</li>'
