"""A timeline, the start and end of each pass: simulated or measured, the same type."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import fsum

from megatron_zbpp.ir import Pass, Schedule
from megatron_zbpp.ir.graph import compiled

# What stands under every table and picture that shows the two.
MEANING = 'idle: share of all GPU time; bubble: share of the window the busiest rank idles'


@dataclass(frozen=True)
class Timeline:
    """A schedule with the start and end of each of its passes."""

    schedule: Schedule  # what ran
    # per rank, (start, end) of each pass, parallel to `schedule.passes`; one clock
    spans: tuple[tuple[tuple[float, float], ...], ...]

    @cached_property
    def by_pass(self) -> dict[Pass, tuple[float, float]]:
        """Start and end of each pass."""
        pairs = zip(self.schedule.passes, self.spans, strict=True)
        return {p: span for own in pairs for p, span in zip(*own, strict=True)}

    def lags(self) -> dict[tuple[int, int], float]:
        """Return the shortest time from the end of a pass to the start of what needs it.

        By (rank of the pass, other rank), but for collectives, which wait for all ranks. Below 0
        only where their clocks differ.
        """
        rank_of, together = self.schedule.rank_of, self.schedule.graph.collectives
        shortest: dict[tuple[int, int], float] = {}
        for p, (start, _) in self.by_pass.items():
            for need, q in self.schedule.needs(p):
                pair = rank_of(q), rank_of(p)
                if pair[0] != pair[1] and need.message not in together:
                    lag = start - self.by_pass[q][1]
                    shortest[pair] = min(lag, shortest.get(pair, lag))
        return shortest

    @cached_property
    def makespan(self) -> float:
        """First start to last end, over all ranks."""
        ran = [spans for spans in self.spans if spans]
        if not ran:
            return 0.0
        return max(spans[-1][1] for spans in ran) - min(spans[0][0] for spans in ran)

    def window(self, rank: int) -> float:
        """Return the time from the first start to the last end of `rank`."""
        spans = self.spans[rank]
        return spans[-1][1] - spans[0][0] if spans else 0.0

    @cached_property
    def windows(self) -> tuple[float, ...]:
        return tuple(map(self.window, range(len(self.spans))))

    def value(self, objective: str) -> float:
        """Return the makespan, or by 'window' the longest span of one rank."""
        return max(self.windows) if objective == 'window' else self.makespan

    def busy(self, rank: int) -> float:
        """Return the time that `rank` spent in passes that compute."""
        beside = compiled(self.schedule.graph).on_copy_engines
        if not beside:
            return fsum(end - start for start, end in self.spans[rank])
        passes = zip(self.schedule.passes[rank], self.spans[rank], strict=True)
        return fsum(end - start for p, (start, end) in passes if p.kind not in beside)

    @cached_property
    def _work(self) -> float:
        """Work of the busiest rank: m*S of the papers."""
        return max(map(self.busy, range(len(self.spans))))

    @property
    def bubble(self) -> float:
        """(W - m*S) / W of the longest window W: "bubble rate" (arXiv 2401.10241, section 5)."""
        return idle(max(self.windows), self._work)

    @property
    def idle_busiest_rank(self) -> float:
        """Share of the makespan in which even the busiest rank idles."""
        return idle(self.makespan, self._work)

    bubble_window, bubble_makespan = bubble, idle_busiest_rank  # their earlier names

    @property
    def idle_all_ranks(self) -> float:
        """Share of all ranks' time, first start to last end, that no pass takes: what is lost."""
        ranks = range(len(self.spans))
        return idle(self.makespan * len(ranks), fsum(map(self.busy, ranks)))


def idle(span: float, work: float) -> float:
    """Return the share of `span` that is not `work`."""
    return (span - work) / span if span else 0.0
