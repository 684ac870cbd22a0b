"""Orders that users train with change on purpose only.

`orders.json` beside this file holds a short hash of each order. Where a generator was changed on
purpose, write it anew, look at what differs, and say why in the commit:

    PYTHONPATH=tests/support python tests/unit/schedules/test_orders_stay.py
"""

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

from stays import golden

from megatron_zbpp import Costs, Family, Placement, Schedule, build
from megatron_zbpp.schedules import FAMILIES

SIZES = (1, 3), (2, 5), (3, 2), (4, 8), (5, 7)  # ranks and microbatches
LIMITS = 1.5, 2.0, 3.0  # in activations of one microbatch on a full rank
TIMES = ((5.0, 6.0, 4.0), (1.0, 2.5, 1.0), (3.0, 3.0, 1.0))


def uneven(placement: Placement) -> Costs:
    """Stages of three kinds in turn, the last one heavy; copies; links, slower on the way back."""
    num_stages, ranks = placement.num_stages, range(1, placement.num_ranks)
    edges = tuple((rank, rank - 1, 0.6 + rank) for rank in ranks)
    of = [TIMES[stage % 3] for stage in range(num_stages)]
    of[-1] = (6.0, 9.0, 5.0)
    forward, backward, weight = (tuple(kind) for kind in zip(*of, strict=True))
    copies = {'L': (4.0,) * num_stages}
    return Costs.of(forward, backward, weight, comm=0.6, edges=edges, times=copies)


def text(schedule: Schedule) -> str:
    """Passes by rank, which belong together, and what their phases are called."""
    return f'{schedule.passes}{sorted(schedule.together)}{schedule.phases}'


def of_family(family: Family) -> Iterator[str]:
    """Every size, by equal and by uneven costs, with the default and with other chunks."""
    for p, m in SIZES:
        for chunks in {family.default_chunks: None, family.chunks[:3][-1]: None}:
            if p < family.min_ranks:
                continue
            plain = build(family.name, p, m, num_chunks=chunks)
            yield text(plain)
            costs = uneven(plain.placement)
            yield text(build(family.name, p, m, num_chunks=chunks, costs=costs))
            if 'together' in family.options:
                yield text(build(family.name, p, m, num_chunks=chunks, together=True))
            for limit in LIMITS if 'memory_limit' in family.options else ():
                yield text(build(family.name, p, m, num_chunks=chunks, memory_limit=limit))


def hashes(family: Family) -> str:
    """Return a few digits for each order."""
    return ' '.join(sha256(each.encode()).hexdigest()[:6] for each in of_family(family))


QUESTIONS = {family.name: family for family in sorted(FAMILIES, key=lambda family: family.name)}
FILE = Path(__file__).with_name('orders.json')
test_orders_stay = golden(__name__, FILE, QUESTIONS, hashes)
