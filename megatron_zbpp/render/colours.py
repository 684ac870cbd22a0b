"""Colours of passes: told apart by every kind of colour vision, the chunk by its shade.

Blue, orange, green and purple, also unlike in lightness: any two of them are more than 20 apart in
CIE Lab for people who lack the red, the green or the blue cones (tests/unit/test_render.py).
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron_zbpp.ir import BW, KINDS, B, F, Schedule, W

HUES = {F: '#1f4fd8', B: '#f28e1c', W: '#35b48f', BW: '#70166f'}
MEANINGS = {
    F: 'forward',
    B: 'gradient of the input',
    W: 'gradient of the weights',
    BW: 'whole backward',
}
IDLE = '#eeeeee'
_PALEST = 0.6  # share of white in the last chunk of many


def colour(kind: str, chunk: int = 0, num_chunks: int = 1) -> str:
    """`#rrggbb` of a pass: the kind's hue, paler for later chunks of a rank."""
    white = _PALEST * chunk / (num_chunks - 1) if num_chunks > 1 else 0.0
    channels = (int(HUES[kind][i : i + 2], 16) for i in (1, 3, 5))
    return '#' + ''.join(f'{round(c + (255 - c) * white):02x}' for c in channels)


def legend(schedules: Iterable[Schedule]) -> list[tuple[str, str]]:
    """(text, colour) of each kind of pass in `schedules`, and of its first and last chunk."""
    schedules = tuple(schedules)
    entries = []
    for kind in KINDS:
        chunks = max((s.placement.num_chunks for s in schedules if _has(s, kind)), default=0)
        if chunks:
            entries.append((f'{kind}: {MEANINGS[kind]}', colour(kind)))
        if chunks > 1:
            entries.append((f'{kind} of the last chunk', colour(kind, 1, 2)))
    return [*entries, ('idle', IDLE)]


def ink(background: str) -> str:
    """Black or white, whichever reads better on `background` (WCAG's relative luminance)."""
    red, green, blue = (_linear(int(background[i : i + 2], 16) / 255) for i in (1, 3, 5))
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return '#000000' if luminance > 0.18 else '#ffffff'


def _has(schedule: Schedule, kind: str) -> bool:
    return any(p.kind == kind for _, p in schedule)


def _linear(channel: float) -> float:
    return channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4
