"""Named schedules that keep their bubble with the output layer on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product

from megatron_zbpp.ir import Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.schedules import build, find
from megatron_zbpp.techniques.composition import EMBEDDING, techniques_of
from megatron_zbpp.techniques.vocabulary.embedding import in_embedding_shards
from megatron_zbpp.techniques.vocabulary.place import in_shards

HOSTS = '1f1b', 'zb-h1', 'zb-v', 'v-half', 'v-min', 'interleaved', 'zb-interleaved'


def hosts_of(chunks: Iterable[int]) -> Iterator[tuple[str, int]]:
    """Yield hosts with each of these numbers of chunks per rank that they can have."""
    return ((name, k) for name, k in product(HOSTS, chunks) if k in find(name).chunks)


def hosts_like(
    schedule: Schedule, costs: Costs, memory_limit: float | None = None
) -> Iterator[Schedule]:
    """Yield what hosts on the placement of `schedule` come to with the shards that it has.

    Left out is what cannot be built for so many microbatches, or holds more.

    Args:
        schedule: with S and T, of whole sequences.
        costs: of its stages and shards.
        memory_limit: most that a rank may hold.
    """
    placement, m = schedule.placement, schedule.num_microbatches
    both = EMBEDDING in techniques_of(schedule)
    for name, chunks in hosts_of([placement.num_chunks]):
        try:
            host = build(name, placement.num_ranks, m, num_chunks=chunks)
            if host.placement != placement:
                continue
            made = in_shards(host, costs, memory_limit)
        except ValueError:  # another host may do
            continue
        yield in_embedding_shards(made, costs) if both else made
