"""The proof that programs end, whatever the backend makes wait: a replay under its rules.

Each rule is pessimistic: what ends under it ends on a backend that makes less wait. gloo has the
first; NCCL may have all three, and which of them may depend on the pass. A collective holds up its
rank until all others have come there, though the runtime waits for its result only.
"""

from __future__ import annotations

import enum
from collections import Counter, defaultdict, deque
from collections.abc import Sequence, Set
from typing import NamedTuple

from megatron_zbpp.analysis.program import Exchange, Instruction, Receive, Send
from megatron_zbpp.ir import Pass, Schedule, Together
from megatron_zbpp.ir.schedule import ScheduleError


class Rule(enum.Flag):
    """An edge rule: which passes wait for which.

    RENDEZVOUS: a send, and all behind it on its rank, waits until its receive has been posted.
        Messages from one rank to another have a connection (NCCL: a communicator) of their own, and
        what forwards have saved has another.
    SYNCHRONISATION: each pass waits for all receives posted on its rank. On CUDA a receive is a
        kernel that spins until its message comes, and torch.cuda.synchronize, freeing memory,
        page-locking it and loading a kernel wait for all kernels: any pass may do so.
    LAUNCH_ORDER: on a rank everything starts in the order of its program, over all connections
        (CUDA_DEVICE_MAX_CONNECTIONS=1): a receive that waits until the one before it on its
        connection has ended holds up all behind it.
    """

    RENDEZVOUS = enum.auto()
    SYNCHRONISATION = enum.auto()
    LAUNCH_ORDER = enum.auto()

    @property
    def words(self) -> str:
        """The rules by name, for messages to people."""
        return ', '.join(name for rule, name in _NAMES.items() if rule in self)


_NAMES = {
    Rule.RENDEZVOUS: 'rendezvous',
    Rule.SYNCHRONISATION: 'device synchronisation',
    Rule.LAUNCH_ORDER: 'launch order',
}
EVERY_RULE = Rule.RENDEZVOUS | Rule.SYNCHRONISATION | Rule.LAUNCH_ORDER


class Collective(NamedTuple):
    """Wait for the other `ranks` of a tensor- or data-parallel group; its name is used once.

    It is inside a pass, or behind one. In a proof about several pipelines it stands beside its
    pass; collectives of the pipeline itself are `Exchange`.
    """

    name: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f'{self.name} of ranks {", ".join(map(str, self.ranks))}'

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)


_Program = Sequence[Instruction | Collective]
_COLLECTIVES = (Collective, Exchange)
_Connection = tuple[int, bool]  # from which rank, and whether of what forwards have saved


class DeadlockError(ValueError):
    """The programs stop before their end."""

    def __init__(self, rules: Rule, stuck: dict[int, str], cells: list[tuple[int, int]]) -> None:
        self.rules = rules  # the fewest that stop them
        # where each rank that stops stands, and (rank, index of its next pass) of the same
        self.stuck, self.cells = stuck, cells
        where = '; '.join(f'rank {rank} waits at {what}' for rank, what in stuck.items())
        super().__init__(f'deadlock, by the rules of {rules.words}: {where}')


def prove(programs: Sequence[_Program], rules: Rule = EVERY_RULE) -> None:
    """Prove that `programs` end under `rules`, in time linear in their length."""
    if not _Replay(programs, rules).stuck():
        return
    for rule in (Rule.RENDEZVOUS, *(Rule.RENDEZVOUS | rule for rule in Rule), rules):
        replay = _Replay(programs, rule)
        stuck = replay.stuck() if rule in rules else {}
        if stuck:
            raise DeadlockError(rule, stuck, [(rank, replay.passes(rank)) for rank in stuck])


class _Replay:
    """Runs programs as far as they go."""

    def __init__(self, programs: Sequence[_Program], rules: Rule) -> None:
        self._programs = programs
        self._synchronises = Rule.SYNCHRONISATION in rules
        self._in_order = Rule.LAUNCH_ORDER in rules
        self._cursor = [0] * len(programs)
        # by receiver and connection: the receives that are posted, their message not sent yet
        self._open: list[dict[_Connection, deque[Receive]]] = [defaultdict(deque) for _ in programs]
        # by rank: how many messages are still to come for whom; where each pass waits for all that
        # are posted, of those only that are posted behind their pass
        self._missing = [_awaited(program, late=self._synchronises) for program in programs]
        self._spinning = [0] * len(programs)
        self._met: dict[Collective | Exchange, set[int]] = defaultdict(set)
        self._ready = deque(range(len(programs)))
        self._waiting = [True] * len(programs)  # in `_ready`, where each is once
        self._run()

    def stuck(self) -> dict[int, str]:
        return {
            rank: self._words(rank, program[at])
            for rank, (program, at) in enumerate(zip(self._programs, self._cursor, strict=True))
            if at < len(program)
        }

    def passes(self, rank: int) -> int:
        return sum(type(i) is Pass for i in self._programs[rank][: self._cursor[rank]])

    def _words(self, rank: int, instruction: Instruction | Collective) -> str:
        posted = self._programs[rank][: self._cursor[rank]]
        opened = self._open[rank]
        waited = [i for i in posted if type(i) is Receive and i in opened[i.peer, i.saved]]
        if type(instruction) is not Pass or not waited:
            return str(instruction)
        return f'{instruction} for {", ".join(map(str, waited))}'

    def _run(self) -> None:
        ready, waiting, spinning, opened = self._ready, self._waiting, self._spinning, self._open
        synchronises, in_order = self._synchronises, self._in_order
        while ready:
            rank = ready.popleft()
            waiting[rank] = False
            program, missing, at = self._programs[rank], self._missing[rank], self._cursor[rank]
            here, end = opened[rank], len(program)
            while at < end:
                instruction = program[at]
                if type(instruction) is Pass:
                    if (synchronises and spinning[rank]) or (missing and missing.get(instruction)):
                        break
                elif type(instruction) is Send:
                    posted = opened[peer := instruction.peer][rank, instruction.saved]
                    if not posted:
                        break
                    awaited, consumer = posted.popleft(), instruction.consumer
                    if awaited.producer != instruction.producer or awaited.consumer != consumer:
                        raise ValueError(
                            f'rank {rank} sends what {instruction.producer} made for {consumer} '
                            f'where rank {peer} awaits what {awaited.producer} makes for '
                            f'{awaited.consumer}'
                        )
                    spinning[peer] -= 1
                    if not synchronises:
                        self._missing[peer][consumer] -= 1
                    if not waiting[peer]:
                        waiting[peer] = True
                        ready.append(peer)
                elif type(instruction) is Receive:
                    posted = here[peer := instruction.peer, instruction.saved]
                    if in_order and posted:
                        break
                    posted.append(instruction)
                    spinning[rank] += 1
                    if not waiting[peer]:
                        waiting[peer] = True
                        ready.append(peer)
                elif isinstance(instruction, _COLLECTIVES) and not self._meets(rank, instruction):
                    break
                at += 1
            self._cursor[rank] = at

    def _meets(self, rank: int, collective: Collective | Exchange) -> bool:
        met = self._met[collective]
        met.add(rank)
        if len(met) < collective.size:
            return False
        for other in met - {rank}:
            if not self._waiting[other]:
                self._waiting[other] = True
                self._ready.append(other)
        return True


def _awaited(program: _Program, late: bool) -> Counter[Pass]:
    """Count the messages for each pass; `late`: of those posted behind the pass that takes them."""
    ran: set[Pass] = set()
    awaited: list[Pass] = []
    for i in program:
        if type(i) is Pass:
            ran.add(i)
        elif type(i) is Receive and (not late or i.consumer in ran):
            awaited.append(i.consumer)
    return Counter(awaited)


def stuck(schedule: Schedule, cursors: list[int]) -> ScheduleError:
    """Return the error for ranks stuck at the pass at their cursor; a cycle among them first."""
    done = {p for order, at in zip(schedule.passes, cursors, strict=True) for p in order[:at]}
    waits = {
        rank: _wait(schedule, done, rank, at)
        for rank, (order, at) in enumerate(zip(schedule.passes, cursors, strict=True))
        if at < len(order)
    }
    path: list[int] = []
    rank = next(iter(waits))
    while rank in waits and rank not in path:
        path.append(rank)
        rank = waits[rank][0]
    cycle = path[path.index(rank) :] if rank in path else []
    others = [rank for rank in waits if rank not in cycle]
    parts = [
        title + '; '.join(waits[rank][1] for rank in ranks)
        for title, ranks in (('a cycle: ', cycle), ('stuck: ', others))
        if ranks
    ]
    what = f'deadlock, {"; ".join(parts)}: move an awaited pass to before the one that waits'
    return ScheduleError(what, schedule, [(rank, cursors[rank]) for rank in waits])


def _wait(schedule: Schedule, done: Set[Pass], rank: int, at: int) -> tuple[int, str]:
    """Return the rank that must act before `rank` can go on from `at`, and a sentence about it."""
    graph = schedule.graph
    entry = _entry(schedule, rank, at)
    passes = entry.passes if isinstance(entry, Together) else (entry,)
    own = [(task, p.microbatch) for p in passes for task in graph.tasks(p.kind, p.stage, p.slice)]
    needs = [
        (need.task, graph.occurrence(need, microbatch))
        for task, microbatch in own
        for need in graph.needs[task]
        if (need.task, graph.occurrence(need, microbatch)) not in own and microbatch >= need.back
    ]
    for task, microbatch in reversed(needs):  # what comes from another rank, before what is its own
        awaited = schedule.done_by.get((task, microbatch))
        if awaited in done or (awaited is None and graph.kinds[task.kind].optional):
            continue
        holder = schedule.placement.rank_of(task.stage, microbatch)
        if awaited is None:
            named = Pass(task.kind, task.stage, microbatch, task.slice)
            why = f'{named}, which rank {holder} never runs'
        else:
            why = f'{awaited}, still to come on rank {holder}'
        return holder, f'rank {rank} at {entry} waits for {why}'
    raise AssertionError(f'{entry} on rank {rank} waits for nothing, and does not run')


def _entry(schedule: Schedule, rank: int, at: int) -> Pass | Together:
    for entry in schedule.order(rank):
        at -= len(entry.passes) if isinstance(entry, Together) else 1
        if at < 0:
            return entry
    raise IndexError(at)
