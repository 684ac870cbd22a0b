"""Collectives among the ranks of a pipeline: begun in the order of the program, never waited for.

Who takes the result waits. What is contributed may need the result of the collective before (the
statistics of all ranks scale each rank's part of a gradient): that is computed beside the passes,
on a stream of its own, or on gloo in a thread of its own. All of a pipeline go through one group,
one after the other, so their one order in all programs is the order in which they run.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_zbpp.analysis.program import Exchange
from megatron_zbpp.ir.graph import BROADCAST, GATHER, REDUCE
from megatron_zbpp.runtime.channels import Message
from megatron_zbpp.runtime.groups import backend_for
from megatron_zbpp.runtime.messages import Awaited
from megatron_zbpp.runtime.stage import Tensors

Found = Sequence[Tensors]
Contribution = torch.Tensor | Callable[[Sequence[torch.Tensor]], torch.Tensor]
"""What a rank contributes, or makes of the result of the collective that comes before."""

Pending = Callable[[], Found]
"""Returns the result of a collective that has begun, once it is there (on CUDA: for what computes
from now on)."""

_Job = Callable[[], Pending]


def _pending(
    tensors: Sequence[torch.Tensor],  # that it fills; of a gather by pipeline rank
    work: dist.Work,  # of the backend
    finish: Callable[[Sequence[torch.Tensor]], Found],  # makes the result of them
) -> Pending:
    @cache
    def result() -> Found:
        work.wait()
        return finish(tensors)

    return result


class Result(NamedTuple):
    """The result of a collective, for one pass."""

    found: Pending
    several: bool  # whether there is one of each rank

    def wait(self) -> Tensors:
        """Return the one tensor, or those of all ranks, once they are there."""
        found = self.found()
        return tuple(found) if self.several else found[0]  # pyright: ignore[reportReturnType]


class Collectives:
    """Runs the collectives of this rank's program on `group`; made by all of its ranks together."""

    def __init__(
        self,
        group: dist.ProcessGroup,  # of the pipeline's ranks; for nothing else
        ranks: Sequence[int],  # the global rank of each pipeline rank
        device: torch.device,  # where what is exchanged lives
        # of each name that is broadcast or reduced, one a slice of the sequence; of what is reduced
        # the dtype counts
        messages: Mapping[str, Sequence[Message]],
    ) -> None:
        self._group, self._ranks, self._messages = group, ranks, messages
        self._places = [dist.get_group_rank(group, rank) for rank in ranks]
        self._begin: dict[str, Callable[..., Pending]] = {
            BROADCAST: self._broadcast,
            GATHER: self._gather,
            REDUCE: self._reduce,
        }
        self._start: Callable[[_Job], Pending]
        if device.type == 'cuda':
            self._start = partial(_start_on_stream, torch.cuda.Stream(device))
        elif backend_for(group, device) == 'gloo':
            self._start = _Thread().start
        else:  # the host waits only where a contribution needs a result
            self._start = lambda job: job()
        self._latest: dict[tuple[Any, ...], Pending] = {}
        self._open: deque[Pending] = deque()  # with all that they use
        # NCCL connects ranks at the first use, which holds up hosts
        dist.all_reduce(torch.zeros(1, device=device), group=group)

    def begin(self, exchange: Exchange, own: Contribution | None) -> Awaited:
        """Begin a collective, for which this rank has made `own`; None: nothing."""
        before = None
        if exchange.after:
            before = self._latest.pop((exchange.after, exchange.producers))
        job = partial(self._begin[exchange.operation], exchange, own, before)
        found = self._start(job)
        if exchange.operation == GATHER:
            self._latest[exchange.message, exchange.producers] = found
        self._open.append(found)
        if exchange.operation == BROADCAST and isinstance(own, torch.Tensor):  # who sends it has it
            return Result(partial(tuple, [own.detach().contiguous()]), several=False)
        return Result(partial(self._take, found), exchange.operation == GATHER)

    def finish(self) -> None:
        """Wait for all that have begun: a rank need not have taken the result of a reduction."""
        self._latest.clear()
        if self._open:
            self._take(self._open[-1])

    def _take(self, found: Pending) -> Found:
        result = found()
        while found in self._open:
            self._open.popleft()
        return result

    def _broadcast(self, exchange: Exchange, own: torch.Tensor | None, _: object) -> Pending:
        assert exchange.root is not None
        tensor = own
        if tensor is None:
            message = self._of_slice(exchange)
            assert message.shape is not None, 'collectives have fixed shapes'
            tensor = torch.empty(message.shape, dtype=message.dtype, device=message.device)
        tensor = tensor.detach().contiguous()
        root = self._ranks[exchange.root]
        work = dist.broadcast(tensor, root, group=self._group, async_op=True)
        return _pending([tensor], work, tuple)  # pyright: ignore[reportArgumentType]

    def _of_slice(self, exchange: Exchange) -> Message:
        return self._messages[exchange.message][exchange.producers[0].slice]

    def _gather(self, exchange: Exchange, own: torch.Tensor, _: object) -> Pending:
        tensors = [torch.empty_like(own) for _ in self._ranks]
        work = dist.all_gather(tensors, own.contiguous(), group=self._group, async_op=True)

        def by_rank(found: Sequence[torch.Tensor]) -> Found:
            return [found[place] for place in self._places]

        return _pending(tensors, work, by_rank)  # pyright: ignore[reportArgumentType]

    def _reduce(self, exchange: Exchange, own: Contribution, before: Pending | None) -> Pending:
        assert exchange.root is not None
        if callable(own):
            assert before is not None, 'a function of what has been gathered'
            own = own(before())  # pyright: ignore[reportArgumentType]
        own = own.contiguous()
        target = self._ranks[exchange.root]
        work = dist.reduce(own, target, group=self._group, async_op=True)
        message = self._of_slice(exchange)
        return _pending([own], work, lambda found: [each.to(message.dtype) for each in found])  # pyright: ignore[reportArgumentType]


class _Thread:
    """Runs collectives one after the other beside the main thread."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[_Job, Future[Found]]] = queue.SimpleQueue()
        self._error: BaseException | None = None
        threading.Thread(target=self._work, name='collectives', daemon=True).start()

    def start(self, job: _Job) -> Pending:
        if self._error is not None:  # of a result that this rank does not take
            raise self._error
        outcome: Future[Found] = Future()
        self._jobs.put((job, outcome))
        return outcome.result

    def _work(self) -> None:
        while True:
            job, outcome = self._jobs.get()
            try:
                with torch.no_grad():
                    wait = job()
                    outcome.set_result(wait())
            except BaseException as error:
                self._error = error
                outcome.set_exception(error)


def _start_on_stream(side: Any, job: _Job) -> Pending:
    side.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(side):
        wait = job()
        found = wait()
        event = side.record_event()
    # its function is kept until then, and with it what has been contributed
    return partial(_arrived, found, event, job)


def _arrived(found: Found, event: Any, _: _Job) -> Found:
    stream = torch.cuda.current_stream()
    stream.wait_event(event)
    for tensor in found:
        assert isinstance(tensor, torch.Tensor)
        tensor.record_stream(stream)
    return found
