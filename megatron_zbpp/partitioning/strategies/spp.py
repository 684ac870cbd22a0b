"""SPP (arXiv 2204.10562): devices in the order of a recursive minimum cut.

Strongly linked devices stay together: the devices are cut in two where the links between the parts
are weakest in sum (Stoer and Wagner, J. ACM 44(4)), each part again, and the parts stand side by
side. The partition for this order is that of the bound's table.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_zbpp.partitioning.devices import Devices


def min_cut_order(devices: Devices, output: float) -> tuple[int, ...]:
    """Return the devices in the order of a recursive minimum cut."""
    ranks = range(len(devices))
    times = [
        [devices.edge(a, b, output) + devices.edge(b, a, output) for b in ranks] for a in ranks
    ]
    positive = [t for row in times for t in row if t > 0]
    least = min(positive, default=1.0) / 1e3  # stands for links that take no time
    weights = [[1 / max(t, least) for t in row] for row in times]
    return tuple(_ordered(list(ranks), weights))


def _ordered(part: list[int], weights: Sequence[Sequence[float]]) -> list[int]:
    """Return the part in order: cut, and each side again; as it is where all links are alike."""
    links = {weights[a][b] for a in part for b in part if a != b}
    if len(part) < 3 or len(links) == 1:
        return part
    side = minimum_cut(part, weights)
    left = _ordered([d for d in part if (d in side) == (part[0] in side)], weights)
    right = _ordered([d for d in part if (d in side) != (part[0] in side)], weights)
    if weights[left[0]][right[0]] > weights[left[-1]][right[0]]:
        left.reverse()
    return left + right


def minimum_cut(part: Sequence[int], weights: Sequence[Sequence[float]]) -> set[int]:
    """Return one side of the cut of least weight (Stoer and Wagner); of equal ones the largest.

    >>> strong, weak = 5.0, 1.0
    >>> links = [[0, strong, weak, weak], [strong, 0, weak, weak],
    ...          [weak, weak, 0, strong], [weak, weak, strong, 0]]
    >>> sorted(minimum_cut(range(4), links))
    [2, 3]
    """
    merged = {d: {d} for d in part}
    own = {a: {b: weights[a][b] for b in part if b != a} for a in part}
    best: tuple[float, int, set[int]] | None = None
    while len(own) > 1:
        chosen: list[int] = []
        pull, cut = dict.fromkeys(own, 0.0), 0.0
        while pull:
            nearest = max(pull, key=lambda d: pull[d])
            cut = pull.pop(nearest)
            chosen.append(nearest)
            for other in pull:
                pull[other] += own[nearest][other]
        last, before = chosen[-1], chosen[-2]
        key = cut, -min(len(merged[last]), len(part) - len(merged[last]))
        if best is None or key < best[:2]:
            best = (*key, set(merged[last]))
        merged[before] |= merged.pop(last)
        for other, weight in own.pop(last).items():
            del own[other][last]
            if other != before:
                own[before][other] += weight
                own[other][before] += weight
    assert best is not None
    return best[2]
