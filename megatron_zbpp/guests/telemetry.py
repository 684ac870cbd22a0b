"""Spans that Megatron's telemetry lacks: W and further passes, and messages between stages.

Megatron's main has spans of forwards and backwards, which our schedules call, too. These are added
inside its span of the iteration, in its groups and by its scheme of names:

- `microbatch`: `megatron.microbatch.weight_gradient`, and so on for every other kind of pass;
- `communication`: `megatron.p2p.send_forward` and `send_backward`, where the pass that makes the
  message ends; `recv_forward` and `recv_backward`, as long as the rank waited for it.

A receive is linked to the sender's span of the iteration, whose context the sender has left in the
job's store: no rank waits for another.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch.distributed as dist
from nemo.lens.state import is_span_group_enabled  # pyright: ignore[reportMissingImports]
from opentelemetry import propagate, trace

from megatron_zbpp.guests.base import Guest, Run
from megatron_zbpp.ir import B, F, Pass, Schedule
from megatron_zbpp.runtime import compat
from megatron_zbpp.runtime.measure import Iteration
from megatron_zbpp.runtime.tables import done_by

PASSES, MESSAGES = 'microbatch', 'communication'  # groups of Megatron's
_DIRECTIONS = {'activation': 'forward', 'gradient': 'backward'}  # of messages, by Megatron's words
_KEPT = 4  # iterations whose contexts are in the store

Messages = Mapping[Pass, Sequence[tuple[str, int]]]
"""Messages of passes: the end of a span's name, and the rank of the pipeline at the other end."""


class Spans(Guest):
    """Makes the spans of an iteration once it has ended; waits for the device of its own rank."""

    def __init__(self) -> None:
        self._iteration = 0
        self._run = 0  # its number in the job: others have left contexts, too
        self._schedule: Schedule | None = None
        self._messages: tuple[Messages, Messages] = {}, {}

    def before(self, step: int | None) -> None:
        """Leave the context of the iteration for ranks that receive from this rank."""
        store, rank = compat.default_store(), dist.get_rank()
        self._run = self._run or store.add(f'megatron_zbpp/spans/{rank}', 1)
        self._iteration += 1
        context: dict[str, str] = {}
        propagate.inject(context)  # nothing where no span is open, as on ranks that do not export
        if context:
            store.set(self._key(rank, self._iteration), json.dumps(context))
            store.delete_key(self._key(rank, self._iteration - _KEPT))

    def after(self, iteration: Iteration, run: Run) -> None:
        """Make the spans of the groups that are on."""
        passes, messages = map(is_span_group_enabled, (PASSES, MESSAGES))
        if not (passes or messages):
            return
        rank, timed = dist.get_rank(iteration.pp_group), iteration.spans()
        ran, kinds = iteration.record.passes, iteration.schedule.graph.kinds
        tracer, ahead = trace.get_tracer('nemo.lens'), time.time_ns() - time.perf_counter_ns()

        def export(
            name: str,
            p: Pass,  # the pass that it is of, or that makes or takes the message
            start: float,  # in seconds of this host's monotonic clock
            end: float,  # likewise
            peer: int | None = None,  # rank of the pipeline at the other end of a message
            links: Sequence[trace.Link] = (),
        ) -> None:
            attributes = {
                'dl.pipeline_parallel.rank': rank,
                'megatron.microbatch_id': p.microbatch,
                'megatron.pp.stage': p.stage,
                'megatron.pp.slice': p.slice,
                **({} if peer is None else {'megatron.pp.peer': peer}),
            }
            start, end = (ahead + round(at * 1e9) for at in (start, end))
            tracer.start_span(name, attributes=attributes, links=links, start_time=start).end(end)

        for p, span in zip(ran, timed, strict=True):
            if passes and not {F, B} & set(done_by(p)):  # neither of Megatron's own
                export(f'megatron.microbatch.{kinds[p.kind].words.replace(" ", "_")}', p, *span)
        if messages:
            if self._schedule is not iteration.schedule:
                self._schedule = iteration.schedule
                self._messages = _messages(iteration.schedule, rank)
            taken, made = self._messages
            free = timed[0][0] if timed else 0.0
            for p, (start, end) in zip(ran, timed, strict=True):
                for name, peer in taken.get(p, ()):
                    links = self._links(iteration.pp_group, peer)
                    export(f'megatron.p2p.recv_{name}', p, free, start, peer, links)
                for name, peer in made.get(p, ()):
                    export(f'megatron.p2p.send_{name}', p, end, end, peer)
                free = end

    def _links(self, pp_group: dist.ProcessGroup, peer: int) -> list[trace.Link]:
        """Return a link to the iteration of a rank of the pipeline; none where it exports none."""
        key = self._key(dist.get_global_rank(pp_group, peer), self._iteration)
        store = compat.default_store()
        if not store.check([key]):
            return []
        context = propagate.extract(json.loads(store.get(key)))
        return [trace.Link(trace.get_current_span(context).get_span_context())]

    def _key(self, rank: int, iteration: int) -> str:
        return f'megatron_zbpp/spans/{rank}/{self._run}/{iteration}'


def _messages(schedule: Schedule, rank: int) -> tuple[Messages, Messages]:
    taken: dict[Pass, list[tuple[str, int]]] = defaultdict(list)
    made: dict[Pass, list[tuple[str, int]]] = defaultdict(list)
    for there, p in schedule:
        for need, producer in schedule.needs(p):
            source = schedule.placement.rank_of(producer.stage, producer.microbatch)
            if need.message is None or source == there or rank not in (source, there):
                continue
            name = _DIRECTIONS.get(need.message, need.message)
            if rank == there:
                taken[p].append((name, source))
            else:
                made[producer].append((name, there))
    return taken, made
