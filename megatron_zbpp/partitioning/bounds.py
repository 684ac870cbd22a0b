"""Lower bounds of partitions: of one, in microseconds, and of all that there are.

Of one partition, for each rank: the forwards that must run before its first, m times its work, and
what must follow its last backward. max_Q of this is below every fused schedule (DAPPLE, arXiv
2007.01045, has the sum; of its pivot only the maximum is a bound), and with the heads of F and B
alone below every split one.

Of all partitions of one chunk a rank: the least bound T for which stages that each take as many
layers as T lets them reach the end of the model. A stage's bound grows with its last layer and
falls with its first, so taking most is best; devices of several kinds are a table over how many of
each kind are used. Links count with the fastest there is, memory not at all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from functools import cached_property
from math import prod

from megatron_zbpp.partitioning.space import Partition, Space, cuts_near

_ROUNDS = 60  # halvings of an interval of times
_MOST_STATES = 20_000

Factors = tuple[float, float, float]


class Bounds:
    """Bounds of one space's partitions."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self._sums = [space.layers.sums(name) for name in ('forward', 'backward', 'weight')]
        used = [device.factors for device in space.devices.devices]
        self._fastest: Factors = tuple(map(min, zip(*used, strict=True)))  # type: ignore[assignment]
        ranks = range(len(used))
        output = min(layer.output for layer in space.layers)
        pairs = [space.devices.edge(a, b, output) for a in ranks for b in ranks if a != b]
        self._edge = min(pairs, default=0.0)

    def of(self, partition: Partition) -> float:
        """Return a lower bound of all schedules on this partition, by its heads and its work."""
        space, m, placement = self.space, self.space.num_microbatches, partition.placement
        heads, backs = self._ways(partition)
        ranks = placement.only_route
        work = [0.0] * placement.num_ranks
        found, at = 0.0, 0
        for stage, cut in enumerate(partition.cuts):
            rank, before, at = ranks[stage], at, at + cut
            f, b, w = self._own(partition, stage, before, at)
            work[rank] += f + b + w
            if placement.num_chunks == 1 and space.objective == 'makespan':
                last = self._own(partition, 0, 0, partition.cuts[0])[2] if stage else 0.0
                found = max(found, heads[stage] + m * (f + b) + backs[stage] + last)
        starts = [0.0] * placement.num_ranks
        if space.objective == 'makespan':
            starts = [heads[placement.stages(rank)[0]] for rank in range(placement.num_ranks)]
        return max(found, *(start + m * own for start, own in zip(starts, work, strict=True)))

    def _own(self, partition: Partition, stage: int, start: int, end: int) -> Factors:
        rank = partition.placement.only_route[stage]
        device = self.space.devices.devices[partition.order[rank]]
        return self._times(device.factors, start, end)

    def _times(self, factors: Factors, start: int, end: int) -> Factors:
        """Return times of F, B and W of these layers; W within B where both are one pass."""
        f, b, w = (x * (own[end] - own[start]) for x, own in zip(factors, self._sums, strict=True))
        return (f, b + w, 0.0) if self.space.fused else (f, b, w)

    def _ways(self, partition: Partition) -> tuple[list[float], list[float]]:
        """Return, by stage, the time before its first F, and after its last B."""
        ranks, order, devices = partition.placement.only_route, partition.order, self.space.devices
        heads, backs = [0.0], [0.0]
        at = 0
        for stage, cut in enumerate(partition.cuts[:-1]):
            forward, backward, _ = self._own(partition, stage, at, at + cut)
            at += cut
            here, there = order[ranks[stage]], order[ranks[stage + 1]]
            output = self.space.layers.layers[at - 1].output
            heads.append(heads[-1] + forward + devices.edge(here, there, output))
            backs.append(backs[-1] + backward + devices.edge(there, here, output))
        return heads, backs

    @cached_property
    def overall(self) -> float:
        """The bound that no schedule on any allowed partition is below."""
        m, each = self.space.num_microbatches, range(len(self.space.layers))
        speeds = [1 / min(device.factors) for device in self.space.devices.devices]
        divided = m * sum(sums[-1] for sums in self._sums) / sum(speeds)  # as if layers could be
        heaviest = max(m * sum(self._times(self._fastest, at, at + 1)) for at in each)
        chunks = (placement.num_chunks for placement in self.space.placements)
        return max(divided, min(self.chain()[0] if v == 1 else heaviest for v in chunks))

    def chain(self) -> tuple[float, tuple[int, ...], list[Factors]]:
        """Return the least bound of one chunk a rank, its cuts, and the factors of each rank.

        The order of the devices is the given one if it is kept, and free if not.
        """
        used = [device.factors for device in self.space.devices.devices]
        first, second, third = map(max, zip(*used, strict=True))
        whole = self._stage(0, len(self.space.layers), (first, second, third))
        high = 2 * whole + 2 * self._edge * len(self.space.devices)
        low = 0.0
        best = self._reached(high)
        for _ in range(_ROUNDS):
            if high - low <= 1e-13 * high:
                break
            middle = (low + high) / 2
            found = self._reached(middle)
            if found is None:
                low = middle
            else:
                high, best = middle, found
        assert best is not None  # one stage could have it all
        ends, kinds = best
        return low, cuts_near(self.space.layers, ends[:-1], float), kinds

    def _stage(self, start: int, end: int, factors: Factors, stage: int = 0) -> float:
        """Return the bound of a stage of these layers; heads with the fastest factors."""
        m = self.space.num_microbatches
        f, b, w = self._times(factors, start, end)
        if self.space.objective != 'makespan':
            return m * (f + b + w)
        before = self._times(self._fastest, 0, start)
        last = self._times(self._fastest, 0, 1)[2] if start else 0.0
        head, back = before[0] + stage * self._edge, before[1] + stage * self._edge
        return head + max(m * (f + b + w), m * (f + b) + back + last)

    def _reached(self, most: float) -> tuple[list[int], list[Factors]] | None:
        kinds = [device.factors for device in self.space.devices.devices]
        if self.space.keep_order:
            ends = [0]
            for stage, factors in enumerate(kinds):
                ends.append(self._furthest(ends[-1], factors, most, stage))
            return (ends[1:], kinds) if ends[-1] == len(self.space.layers) else None
        counts = Counter(kinds)
        if prod(count + 1 for count in counts.values()) > _MOST_STATES:
            counts = Counter([self._fastest] * len(kinds))
        return self._table(counts, most)

    def _table(
        self, counts: Counter[Factors], most: float
    ) -> tuple[list[int], list[Factors]] | None:
        """Return as `_reached`: for each number of used devices of each kind, the furthest end."""
        kinds = list(counts)
        rows: list[dict[tuple[int, ...], tuple[int, int]]] = [{(0,) * len(kinds): (0, -1)}]
        for stage in range(sum(counts.values())):
            row: dict[tuple[int, ...], tuple[int, int]] = {}
            for used, (end, _) in rows[-1].items():
                for at, kind in enumerate(kinds):
                    if used[at] < counts[kind]:
                        then = (*used[:at], used[at] + 1, *used[at + 1 :])
                        reached = self._furthest(end, kind, most, stage)
                        if reached > row.get(then, (-1, -1))[0]:
                            row[then] = reached, at
            rows.append(row)
        used = tuple(counts.values())
        if rows[-1][used][0] < len(self.space.layers):
            return None
        ends: list[int] = []
        chosen: list[Factors] = []
        for row in rows[:0:-1]:
            end, at = row[used]
            ends.append(end)
            chosen.append(kinds[at])
            used = (*used[:at], used[at] - 1, *used[at + 1 :])
        return ends[::-1], chosen[::-1]

    def _furthest(self, start: int, factors: Factors, most: float, stage: int) -> int:
        """Return the last end of a stage from `start` on whose bound is at most `most`."""
        ends = range(start + 1, len(self.space.layers) + 1)
        limit = most * (1 + 1e-12)
        return start + bisect_right(
            ends, limit, key=lambda end: self._stage(start, end, factors, stage)
        )
