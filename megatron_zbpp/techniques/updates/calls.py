"""An endless order cut into calls: the programs that the first and each later call runs.

A call of Megatron's schedule function is one period: all backwards of a batch, and forwards, the
last of which belong to the batches behind it. Each message is received in the call in which it is
sent: none crosses a cut, and ranks may meet there (for the norm of all gradients).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from megatron_zbpp.analysis.deadlock import Collective, prove
from megatron_zbpp.analysis.lowering import lower
from megatron_zbpp.analysis.program import Instruction, Program, Receive, Send
from megatron_zbpp.ir import F, Pass, Schedule
from megatron_zbpp.techniques.updates.versions import UPDATE, updates_of, whole_calls

_PROVEN = 4  # calls, of which the last three are equal


@dataclass(frozen=True)
class Calls:
    """The program of each rank in each call of an endless schedule.

    Steps are no passes of them: they come behind.
    """

    num_microbatches: int  # of a call
    first: tuple[Program, ...]  # the program of each rank in call 0, which fills the pipeline
    second: tuple[Program, ...]  # in call 1; those behind it are the same, with later microbatches

    def program(self, rank: int, call: int) -> Program:
        """Return the passes of `rank` in `call`; microbatches count from the first call on."""
        if call == 0:
            return self.first[rank]
        return _shifted(self.second[rank], (call - 1) * self.num_microbatches)

    def ahead(self, rank: int) -> int:
        """Return how many forwards of later batches `rank` runs in a call."""
        passes = (i for i in self.first[rank] if isinstance(i, Pass))
        return sum(p.kind == F and p.microbatch >= self.num_microbatches for p in passes)


def calls_of(schedule: Schedule) -> Calls:
    """Return the programs of an endless schedule by calls, proven to end under every rule.

    The proof holds with a meeting of all ranks at each step, and without. It has several calls, and
    its ranks step all of their stages at once.
    """
    updates = updates_of(schedule.graph)
    apart = False  # whether a rank steps not all of its stages at once
    for order in schedule.passes:
        stages = {p.stage for p in order}
        steps = (group for is_step, group in groupby(order, _is_step) if is_step)
        apart |= any({p.stage for p in group} != stages for group in steps)
    if updates is None or apart:
        raise ValueError(
            f'{schedule.name} cannot be cut into calls because it has not one update a rank and '
            'batch: take pipedream, pipedream-2bw, paci, pipemare or wpipe-joint'
        )
    parts = [list(_parts(program)) for program in lower(schedule)]
    _receive_in_call_of_send(parts)
    m, last = updates.every, whole_calls(schedule) - 1
    for call in range(2, last + 1):
        if any(_passes(own[call]) != _passes(_shifted(own[1], (call - 1) * m)) for own in parts):
            raise ValueError(f'{schedule.name}: call {call} is not call 1, later: give such orders')
    first = tuple(tuple(own[0]) for own in parts)
    second = tuple(_shifted(own[last], (1 - last) * m) for own in parts)
    for call, programs in enumerate((first, second)):
        _require_closed(schedule, call, programs)
    calls = Calls(m, first, second)
    meetings = [
        Collective(f'step of call {call}', tuple(range(schedule.num_ranks)))
        for call in range(_PROVEN)
    ]
    prove(
        [
            [i for call, met in enumerate(meetings) for i in (*calls.program(rank, call), met)]
            for rank in range(schedule.num_ranks)
        ]
    )
    return calls


def _is_step(each: object) -> bool:
    return isinstance(each, Pass) and each.kind == UPDATE


def _parts(program: Program) -> Iterator[list[Instruction]]:
    """Yield the program of each call: up to its steps."""
    part: list[Instruction] = []
    for is_step, group in groupby(program, _is_step):
        if is_step:
            yield part
        part = [] if is_step else list(group)


def _passes(program: Iterable[Instruction]) -> list[Pass]:
    return [each for each in program if isinstance(each, Pass)]


def _receive_in_call_of_send(parts: Sequence[Sequence[list[Instruction]]]) -> None:
    """Move receives into the call in which their message is sent: to its end, or its beginning."""
    each = [(call, i) for own in parts for call, part in enumerate(own) for i in part]
    sent = {(i.producer, i.consumer): call for call, i in each if isinstance(i, Send)}
    for own in parts:
        # to the beginning, and to the end
        moved = defaultdict[int, tuple[list[Receive], list[Receive]]](lambda: ([], []))
        for call, part in enumerate(own):
            for i in [i for i in part if isinstance(i, Receive)]:
                if (target := sent.get((i.producer, i.consumer), call)) != call:
                    part.remove(i)
                    moved[target][target < call].append(i)
        for call, (begin, end) in moved.items():
            own[call][:] = [*begin, *own[call], *end]


def _require_closed(schedule: Schedule, call: int, programs: Iterable[Program]) -> None:
    """Require that each message of a call is sent and received in it."""
    each = [i for program in programs for i in program]
    sent = Counter((i.producer, i.consumer) for i in each if isinstance(i, Send))
    received = Counter((i.producer, i.consumer) for i in each if isinstance(i, Receive))
    if sent != received:
        crossing, *_ = (sent - received) + (received - sent)
        raise ValueError(
            f'{schedule.name}: what {crossing[0]} makes for {crossing[1]} crosses the border of '
            f'call {call}: move the forward of {crossing[0]} to before the step'
        )


def _shifted(program: Iterable[Instruction], microbatches: int) -> Program:

    def later(p: Pass) -> Pass:
        return p._replace(microbatch=p.microbatch + microbatches)

    def moved(i: Instruction) -> Instruction:
        if isinstance(i, Pass):
            return later(i)
        own = {key: later(each) for key, each in i._asdict().items() if isinstance(each, Pass)}
        return i._replace(**own)

    return tuple(map(moved, program))
