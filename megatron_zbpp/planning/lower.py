"""Lowering: from an order of passes to each rank's program of passes, sends and receives.

One walk over all ranks in lock step fixes one global order of the messages. Every rank's sends and
receives are that order's projection, so they cannot deadlock, even if each send waited for its
receive to be posted; and messages from one rank to another are received in the order in which they
were sent. Posting a receive earlier than in the walk keeps both properties. `prove` replays the
programs that the runtime will really issue under exactly that pessimistic rule.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from typing import NamedTuple

from megatron_zbpp.ir import BW, B, F, Pass, Schedule, W


class Send(NamedTuple):
    """Send what `producer`, which has just ended on this rank, made for `consumer` on `peer`."""

    producer: Pass
    consumer: Pass
    peer: int

    def __str__(self) -> str:
        return f'send({self.producer} to rank {self.peer} for {self.consumer})'


class Receive(NamedTuple):
    """Post the receive of what `consumer`, a later pass of this rank, needs from rank `peer`."""

    consumer: Pass
    peer: int

    def __str__(self) -> str:
        return f'receive(for {self.consumer} from rank {self.peer})'


class Hand(NamedTuple):
    """Keep what the pass before has made for `consumer`, a later pass of this same rank."""

    consumer: Pass

    def __str__(self) -> str:
        return f'hand(to {self.consumer})'


Instruction = Pass | Send | Receive | Hand
Program = tuple[Instruction, ...]


class DeadlockError(ValueError):
    """The programs stop before their end; `stuck` says of each such rank where it stands."""

    def __init__(self, stuck: dict[int, str]) -> None:
        self.stuck = stuck
        super().__init__(
            'deadlock: ' + '; '.join(f'rank {rank} waits at {what}' for rank, what in stuck.items())
        )


def lower(schedule: Schedule, lead: int = 1) -> tuple[Program, ...]:
    """The program of each rank, proven free of deadlock under sends that rendezvous.

    Args:
        schedule: a complete schedule (`check` tells).
        lead: how many passes before its place in the global order a receive is posted, so that a
            message travels while the rank computes. Each costs one message buffer.

    Raises:
        DeadlockError: passes wait for each other across ranks.
    """
    programs: list[list[Instruction]] = [[] for _ in schedule.passes]
    for rank, instruction in _walk(schedule):
        programs[rank].append(instruction)
    lowered = tuple(tuple(_post_earlier(program, lead)) for program in programs)
    prove(lowered)
    return lowered


def consumers(schedule: Schedule) -> dict[Pass, Pass]:
    """For each pass that makes an activation or an input gradient: the pass that takes it."""
    backward = {(p.stage, p.microbatch): p for _, p in schedule if p.kind in (B, BW)}
    taken = {}
    for _, p in schedule:
        if p.kind == F and p.stage + 1 < schedule.num_stages:
            taken[p] = Pass(F, p.stage + 1, p.microbatch)
        elif p.kind in (B, BW) and p.stage:
            taken[p] = backward[p.stage - 1, p.microbatch]
    return taken


def _walk(schedule: Schedule) -> Iterator[tuple[int, Instruction]]:
    """All instructions in one global order: in each round, every rank that can runs one pass."""
    taken = consumers(schedule)
    needs = defaultdict(list)
    for producer, consumer in taken.items():
        needs[consumer].append(producer)
    for _, p in schedule:
        if p.kind in (B, BW):
            needs[p].append(Pass(F, p.stage, p.microbatch))
        elif p.kind == W:
            needs[p].append(Pass(B, p.stage, p.microbatch))
    rank_of = schedule.placement.ranks
    done: set[Pass] = set()
    cursor = [0] * schedule.num_ranks
    while True:
        ready = [
            (rank, order[at])
            for rank, (order, at) in enumerate(zip(schedule.passes, cursor, strict=True))
            if at < len(order) and done.issuperset(needs[order[at]])
        ]
        if not ready:
            break
        for rank, p in ready:
            yield rank, p
            cursor[rank] += 1
        for rank, p in ready:
            done.add(p)
            consumer = taken.get(p)
            if consumer is None:
                continue
            peer = rank_of[consumer.stage]
            if peer == rank:
                yield rank, Hand(consumer)
            else:
                yield rank, Send(p, consumer, peer)
                yield peer, Receive(consumer, rank)
    stuck = {
        rank: f'{order[at]}, which needs ' + ', '.join(map(str, set(needs[order[at]]) - done))
        for rank, (order, at) in enumerate(zip(schedule.passes, cursor, strict=True))
        if at < len(order)
    }
    if stuck:
        raise DeadlockError(stuck)


def _post_earlier(program: list[Instruction], lead: int) -> Iterator[Instruction]:
    """The same program with each receive moved before the `lead` passes that precede it."""
    waiting: deque[Instruction] = deque()  # the last `lead` passes and the sends between them
    passes = 0
    for instruction in program:
        if isinstance(instruction, Receive):
            yield instruction
            continue
        waiting.append(instruction)
        passes += isinstance(instruction, Pass)
        while passes > lead:
            passes -= isinstance(waiting[0], Pass)
            yield waiting.popleft()
    yield from waiting


def prove(programs: tuple[Program, ...]) -> None:
    """Replays `programs` with every send blocking its rank until its receive has been posted.

    A backend whose sends return sooner can only be further ahead, so what ends here ends there.

    Raises:
        DeadlockError: some rank never reaches its end.
        ValueError: two ranks disagree about the order of the messages between them.
    """
    posted: dict[tuple[int, int], list[Pass]] = defaultdict(list)
    sent: dict[tuple[int, int], int] = defaultdict(int)
    arrived: set[Pass] = set()
    expected = [{i.consumer for i in program if isinstance(i, Receive)} for program in programs]
    cursor = [0] * len(programs)

    def can_run(rank: int, instruction: Instruction) -> bool:
        if isinstance(instruction, Send):
            channel = (rank, instruction.peer)
            return sent[channel] < len(posted[channel])
        if isinstance(instruction, Pass):
            return instruction not in expected[rank] or instruction in arrived
        return True

    def run(rank: int, instruction: Instruction) -> None:
        if isinstance(instruction, Receive):
            posted[instruction.peer, rank].append(instruction.consumer)
        elif isinstance(instruction, Send):
            channel = (rank, instruction.peer)
            awaited = posted[channel][sent[channel]]
            if awaited != instruction.consumer:
                raise ValueError(
                    f'rank {rank} sends for {instruction.consumer} where rank {instruction.peer} '
                    f'awaits the message for {awaited}'
                )
            sent[channel] += 1
            arrived.add(instruction.consumer)

    progress = True
    while progress:
        progress = False
        for rank, program in enumerate(programs):
            while cursor[rank] < len(program) and can_run(rank, program[cursor[rank]]):
                run(rank, program[cursor[rank]])
                cursor[rank] += 1
                progress = True
    stuck = {
        rank: str(program[at])
        for rank, (program, at) in enumerate(zip(programs, cursor, strict=True))
        if at < len(program)
    }
    if stuck:
        raise DeadlockError(stuck)
