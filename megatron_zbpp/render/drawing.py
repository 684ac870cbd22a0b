"""Drawings of schedules for Python: notebooks show them, `print` too, and they can be saved."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.timeline import Timeline
from megatron_zbpp.render.html import html
from megatron_zbpp.render.png import timeline_png
from megatron_zbpp.render.svg import svg
from megatron_zbpp.render.text import timeline_text


@dataclass(frozen=True)
class Drawing:
    """A schedule as simulated by its costs."""

    timeline: Timeline  # simulated
    costs: Costs  # by which it was

    def __str__(self) -> str:
        """Draw it in letters, as `zbpp show` does."""
        return timeline_text(self.timeline)

    def _repr_svg_(self) -> str:
        """Draw it for a notebook."""
        return svg(self._timelines, self._costs)

    def _repr_html_(self) -> str:
        """Draw it for a notebook as a page of its own, whose passes explain themselves."""
        page = escape(html(self._timelines, self._costs, self.timeline.schedule.name))
        height = 240 + 70 * self.timeline.schedule.num_ranks
        return f'<iframe srcdoc="{page}" width="100%" height="{height}" frameborder="0"></iframe>'

    def save(self, path: str | Path) -> None:
        """Write it as .html, .svg, .png or .pdf.

        Raises:
            ValueError: another suffix.
            ImportError: matplotlib, which makes .png and .pdf, is not installed.
        """
        suffix = Path(path).suffix.lower()
        if suffix in ('.png', '.pdf'):
            timeline_png(self._timelines, path)
        elif suffix == '.svg':
            Path(path).write_text(self._repr_svg_(), encoding='utf-8')
        elif suffix == '.html':
            page = html(self._timelines, self._costs, self.timeline.schedule.name)
            Path(path).write_text(page, encoding='utf-8')
        else:
            raise ValueError(f'{str(path)!r} names no format: end it in .html, .svg, .png or .pdf')

    @property
    def _timelines(self) -> dict[str, Timeline]:
        return {self.timeline.schedule.name: self.timeline}

    @property
    def _costs(self) -> dict[str, Costs]:
        return {self.timeline.schedule.name: self.costs}


def draw(schedule: Schedule, costs: Costs | None = None) -> Drawing:
    """Return a drawing of a schedule: notebooks show it, `print` writes it in letters.

    Args:
        schedule: that `check` accepts.
        costs: of its stages. None: those that it was planned for; else F, B and W of a full rank
            take 1 each.

    >>> from megatron_zbpp import build, draw
    >>> print(draw(build('zb-h1', 2, 2)))
    rank 0  0F0 0F1 ····0B0 0W0 0B1 0W1
    rank 1  ····1F0 1B0 1F1 1B1 1W0 1W1
    """
    costs = costs or Costs.known(schedule)
    return Drawing(simulate(schedule, costs), costs)
