"""Colours of passes: told apart by every kind of colour vision, the chunk by its shade.

Without colours, stripes at the foot of a bar tell F (none), B (one), W (two) and BW (three).

Blue, orange, green and purple, also unlike in lightness: any two of them are more than 20 apart in
CIE Lab for people who lack the red, the green or the blue cones (tests/unit/render/test_render.py).
"""

from __future__ import annotations

import colorsys
from collections.abc import Iterable

from megatron_zbpp.ir import BW, B, F, Kind, Schedule, W
from megatron_zbpp.techniques.updates.versions import updates_of

HUES = {F: '#1f4fd8', B: '#f28e1c', W: '#35b48f', BW: '#70166f'}
STRIPES = {F: 0, B: 1, W: 2, BW: 3}
_GOLDEN = 0.61803398875  # of the circle of hues, from one kind without a hue of its own to the next
IDLE = '#eeeeee'
_PALEST = 0.6  # share of white in the last chunk of many
_NAMED = 4  # chunks whose shades a legend names one by one


def colour(kind: str, chunk: int = 0, num_chunks: int = 1) -> str:
    """Return `#rrggbb` of a pass: the kind's hue, paler for later chunks, and upwards."""
    white = _PALEST * chunk / (num_chunks - 1) if num_chunks > 1 else 0.0
    hue = HUES.get(kind) or _another(kind)
    channels = (int(hue[i : i + 2], 16) for i in (1, 3, 5))
    return '#' + ''.join(f'{round(c + (255 - c) * white):02x}' for c in channels)


def _another(kind: str) -> str:
    """Return a hue for a kind that has none, by its name."""
    place = int.from_bytes(kind.encode(), 'big') * _GOLDEN % 1
    channels = colorsys.hls_to_rgb(place, 0.45, 0.55)
    return '#' + ''.join(f'{round(255 * c):02x}' for c in channels)


def kinds(schedules: Iterable[Schedule]) -> dict[str, Kind]:
    """Return the kinds of pass that occur in `schedules`."""
    found: dict[str, Kind] = {}
    for schedule in schedules:
        ran = {p.kind for _, p in schedule}
        found |= {name: kind for name, kind in schedule.graph.kinds.items() if name in ran}
    return found


def legend(schedules: Iterable[Schedule]) -> list[tuple[str, str]]:
    """Return (text, colour) of each kind of pass, and of its chunks or of those upwards."""
    schedules = tuple(schedules)
    entries: list[tuple[str, str]] = []
    for name, kind in kinds(schedules).items():
        having = [s.placement for s in schedules if any(p.kind == name for _, p in s)]
        both = [placement for placement in having if not placement.is_one_way]
        down = ', down' if len(both) == len(having) else ''
        entries.append((f'{name}: {kind.words}{down}', colour(name)))
        chunks = {placement.num_chunks for placement in having if placement not in both}
        entries += [(f'{name} of {said}', colour(name, k, v)) for said, k, v in between(chunks)]
        if chunks - {1}:
            entries.append((f'{name} of the last chunk', colour(name, 1, 2)))
        if any(by_version(s) for s in schedules) and not kind.of_weights:
            entries.append((f'{name} of every other version of the weights', colour(name, 1, 2)))
        if both:
            entries.append((f'{name}, up', colour(name, 1, 2)))
    return [*entries, ('idle', IDLE)]


def between(chunks: Iterable[int]) -> list[tuple[str, int, int]]:
    """Return (text, chunk, number of chunks) for shades between those of the end chunks.

    Args:
        chunks: numbers of them that schedules have; of more than four one shade stands for all.
    """
    found: list[tuple[str, int, int]] = []
    for v in sorted({*chunks}):
        if v > _NAMED:
            found.append((f'chunks between, of {v}', v // 2, v))
        else:
            found += [(f'chunk {k + 1} of {v}', k, v) for k in range(1, v - 1)]
    return found


def by_version(schedule: Schedule) -> bool:
    """Return whether shades tell versions of the weights, and not chunks."""
    return updates_of(schedule.graph) is not None and schedule.placement.num_chunks == 1


def stripes(kind: str, top: float, height: float) -> list[float]:
    """Return where the stripes of a bar are that begins at `top`, from its foot upwards."""
    return [top + height * (1 - 0.1 * (k + 1)) for k in range(STRIPES.get(kind, 0))]


def ink(background: str) -> str:
    """Return black or white, whichever reads better on `background` (WCAG's luminance)."""
    red, green, blue = (_linear(int(background[i : i + 2], 16) / 255) for i in (1, 3, 5))
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return '#000000' if luminance > 0.18 else '#ffffff'


def _linear(channel: float) -> float:
    return channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4
