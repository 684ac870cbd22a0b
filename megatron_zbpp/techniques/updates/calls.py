"""An endless order cut into calls: the programs that the first and each later call runs.

A call of Megatron's schedule function is one period: all backwards of a batch, and forwards, the
last of which belong to the batches behind it. The order is lowered with a meeting of all ranks at
each step; so no message crosses a cut, and ranks may meet there (for the norm of all gradients).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_zbpp.analysis.deadlock import Collective, prove
from megatron_zbpp.analysis.lowering import lower
from megatron_zbpp.analysis.program import Hand, Instruction, Program, Receive, Send
from megatron_zbpp.ir import F, Graph, Pass, Schedule
from megatron_zbpp.ir.techniques import applied
from megatron_zbpp.techniques.updates.graph import NORM, UPDATE, updating
from megatron_zbpp.techniques.updates.steady_state import whole_calls
from megatron_zbpp.techniques.updates.versions import updates_of


@dataclass(frozen=True)
class Calls:
    """The program of each rank in each call of an endless schedule.

    Attributes:
        num_microbatches: of a call.
        first: the program of each rank in call 0, which fills the pipeline.
        second: in call 1; those behind it are the same, with later microbatches.

    Steps are no passes of them: they come behind.
    """

    num_microbatches: int
    first: tuple[Program, ...]
    second: tuple[Program, ...]

    def program(self, rank: int, call: int) -> Program:
        """Return what `rank` runs in `call`; microbatches count from the first call on."""
        if call == 0:
            return self.first[rank]
        return _shifted(self.second[rank], (call - 1) * self.num_microbatches)

    def ahead(self, rank: int) -> int:
        """Return how many forwards of later batches `rank` runs in a call."""
        passes = (i for i in self.first[rank] if isinstance(i, Pass))
        return sum(p.kind == F and p.microbatch >= self.num_microbatches for p in passes)


def calls_of(schedule: Schedule) -> Calls:
    """Return the programs of an endless schedule by calls, proven to end under every rule.

    The proof holds with a meeting of all ranks at each step, and without.

    Args:
        schedule: one that `check` accepts, with a stage a rank, and with several calls.

    Raises:
        DeadlockError: the programs do not end.
        ValueError: calls differ, or a message crosses the border of two.
    """
    updates = updates_of(schedule.graph)
    if updates is None or schedule.num_ranks != schedule.num_stages:
        raise ValueError(
            f'{schedule.name} cannot be cut into calls because it has not one update a rank and '
            'batch: take pipedream, pipedream-2bw, paci or pipemare'
        )
    programs = lower(replace(schedule, graph=_meeting(schedule.graph)))
    plain = tuple(tuple(i for i in program if not _of_norm(i)) for program in programs)
    everyone = tuple(range(schedule.num_ranks))
    prove([_with_meetings(program, everyone) for program in plain])
    parts = [list(_parts(program)) for program in plain]
    m = updates.every
    for call in range(len(parts[0])):
        _require_closed(schedule, call, [own[call] for own in parts])
    for call in range(2, whole_calls(schedule)):
        if any(own[call] != _shifted(own[1], (call - 1) * m) for own in parts):
            raise ValueError(f'{schedule.name}: call {call} is not call 1, later: give such orders')
    first, second = (tuple(own[call] for own in parts) for call in range(2))
    return Calls(m, first, second)


def _meeting(graph: Graph) -> Graph:
    """Return the graph where each step waits for the gradients of all stages."""
    techniques = [
        (name, (arguments[0], True, *arguments[2:]) if name == updating.__name__ else arguments)
        for name, arguments in graph.techniques
    ]
    return applied(graph.num_stages, techniques)


def _of_norm(instruction: Instruction) -> bool:
    return isinstance(instruction, Send | Receive | Hand) and instruction.message == NORM


def _with_meetings(program: Program, ranks: tuple[int, ...]) -> list[Instruction | Collective]:
    """Return the program with a collective of `ranks` before each step."""
    found: list[Instruction | Collective] = []
    for each in program:
        if isinstance(each, Pass) and each.kind == UPDATE:
            found.append(Collective(f'step of microbatch {each.microbatch}', ranks))
        found.append(each)
    return found


def _parts(program: Program) -> Iterator[Program]:
    """Yield the program of each call: up to a step."""
    part: list[Instruction] = []
    for each in program:
        if isinstance(each, Pass) and each.kind == UPDATE:
            yield tuple(part)
            part = []
        else:
            part.append(each)


def _require_closed(schedule: Schedule, call: int, parts: Sequence[Program]) -> None:
    """Require that each message of a call is sent and received in it."""
    each = [i for part in parts for i in part]
    sent = Counter((i.producer, i.consumer) for i in each if isinstance(i, Send))
    received = Counter((i.producer, i.consumer) for i in each if isinstance(i, Receive))
    if sent != received:
        crossing, *_ = (sent - received) + (received - sent)
        raise ValueError(
            f'{schedule.name}: what {crossing[0]} makes for {crossing[1]} crosses the border of '
            f'call {call}: move the forward of {crossing[0]} to before the step'
        )


def _shifted(program: Program, microbatches: int) -> Program:
    """Return the program for microbatches that come later."""

    def later(p: Pass) -> Pass:
        return p._replace(microbatch=p.microbatch + microbatches)

    def moved(i: Instruction) -> Instruction:
        if isinstance(i, Pass):
            return later(i)
        own = {key: later(each) for key, each in i._asdict().items() if isinstance(each, Pass)}
        return i._replace(**own)

    return tuple(map(moved, program))
