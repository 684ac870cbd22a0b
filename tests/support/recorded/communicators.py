"""Checks what communicators were given: the same on all of their ranks, messages by one thread."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_THREADS = 2  # DDP's reductions are started by autograd's thread, and by the main one
# each rank sends as much as it has: what one sends another expects it
_UNEVEN = ('alltoall', 'alltoall_base', 'all_to_all_single')


@dataclass(frozen=True)
class Operation:
    # the name of its group, which all ranks count alike, the group's ranks in the world, and for
    # messages, which two of the group talk
    communicator: tuple[str, tuple[int, ...], tuple[int, ...]]
    name: str  # of the operation; of a message, as both of its ends call it
    nbytes: int  # of its tensors
    stream: int  # that was current
    thread: int  # that launched it, by its identity
    sent: tuple[int, ...] = ()  # of an all-to-all, bytes to each rank of the group, and from each
    received: tuple[int, ...] = ()


def faults(operations: Sequence[Sequence[Operation]]) -> Iterator[str]:
    """Say what NCCL would not end, or end wrong, of each rank's operations in order of launch."""
    found: dict[tuple, dict[int, list[Operation]]] = defaultdict(dict)
    for rank, own in enumerate(operations):
        for each in own:
            found[each.communicator].setdefault(rank, []).append(each)
    for communicator, of_rank in found.items():
        _, ranks, pair = communicator
        members = {ranks[member] for member in pair or range(len(ranks))}
        for rank in sorted(members - of_rank.keys()):
            yield f'{communicator}: rank {rank} launches nothing'
        first = min(of_rank)
        expected = [*map(_comparable, of_rank[first])]
        for rank, own in of_rank.items():
            if [*map(_comparable, own)] != expected:
                yield f'{communicator}: rank {rank} launches other operations than rank {first}'
        yield from _unexpected(communicator, [of_rank.get(rank, []) for rank in ranks])
        for rank, own in of_rank.items():
            threads = len({each.thread for each in own})
            if threads > (1 if pair else _THREADS):
                yield f'{communicator}: rank {rank} launches from {threads} threads'


def _unexpected(communicator: tuple, by_member: list[list[Operation]]) -> Iterator[str]:
    """Compare what ranks send in all-to-alls with what its receivers expect."""
    ranks = communicator[1]
    for number, operations in enumerate(zip(*by_member, strict=False)):
        if {each.name for each in operations} & {*_UNEVEN} == set():
            continue
        for i, sender in enumerate(operations):
            for j, receiver in enumerate(operations):
                sent, expected = sender.sent[j : j + 1], receiver.received[i : i + 1]
                if sent != expected:
                    yield (
                        f'{communicator}: operation {number}: rank {ranks[i]} sends {sent} bytes '
                        f'to rank {ranks[j]}, which expects {expected}'
                    )


def _comparable(operation: Operation) -> tuple[str, int | None]:
    name = operation.name
    return name, None if name in _UNEVEN else operation.nbytes
