"""The program of a rank as its executor looks it up: tables, checks, and one microbatch of it.

Tables are made once, for all iterations that run the program.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence

from megatron_zbpp.analysis.program import Exchange, Hand, Instruction, Join, Program, Receive, Send
from megatron_zbpp.ir import BW, B, F, Pass, Together, W, chain
from megatron_zbpp.ir.graph import HOST, PARTNER, TRANSFERS, R
from megatron_zbpp.runtime.stage import Key, key_of

_PLAIN = chain(1)
# kinds of the tasks that each kind of pass does, whatever its stage
_TASKS = {kind: tuple(task.kind for task in _PLAIN.tasks(kind, 0)) for kind in _PLAIN.kinds}
_BUILT_IN = (*_TASKS, R)
_TAKEN = {F: 'activation', B: 'gradient', BW: 'gradient'}  # messages to built-in passes
OUT, BACK = TRANSFERS[HOST]
SENT, FETCHED = TRANSFERS[PARTNER]
_MOVES = (OUT, BACK, SENT, FETCHED)


def done_by(p: Pass) -> tuple[str, ...]:
    """Return kinds of the tasks that `p` does."""
    return _TASKS.get(p.kind) or (p.kind,)


def last(passes: Sequence[Pass], kind: str) -> set[Pass]:
    """Return the last pass of each stage that does a task of `kind`."""
    return set({p.stage: p for p in passes if kind in done_by(p)}.values())


def whole(passes: Sequence[Pass], split: Collection[Pass] = ()) -> set[Key]:
    """Return keys of the backwards that autograd may run whole.

    A pass that does both B and W saves what a split costs: with it, communication in B hides behind
    weight gradients, and nothing is gathered twice. Not so where gradients of its stage that come
    with B are complete after another pass than those that come with W: hooks of
    DistributedDataParallel would hear of the one or the other too early. Microbatches of the passes
    of `split` are not to be run whole.
    """
    last_backwards, last_weights = last(passes, B), last(passes, W)
    kept = set(map(key_of, split))
    return {
        key_of(p)
        for p in passes
        if {B, W} <= set(done_by(p)) and (p in last_backwards) == (p in last_weights)
    } - kept


class Tables:
    """The tables of one rank's program."""

    def __init__(self, program: Program, completes: bool = True) -> None:
        """Make them; `completes`: gradients are complete behind the last passes."""
        self.program = program
        self.passes = tuple(i for i in program if isinstance(i, Pass))
        self.own = frozenset(self.passes)  # the passes, to look one up
        # by pass, the messages of collectives that it makes
        self.contributes: dict[Pass, tuple[str, ...]] = {}
        for exchange in [i for i in program if isinstance(i, Exchange)]:
            for p in self.own.intersection(exchange.producers):
                self.contributes[p] = (*self.contributes.get(p, ()), exchange.message)
        # passes whose input its maker on this rank may still use
        self.handed_to = frozenset(i.consumer for i in program if isinstance(i, Hand))
        self.splits = any(p.kind == W for p in self.passes)  # whether there are W passes
        self.trains = any(B in done_by(p) for p in self.passes)  # whether there are backwards
        # passes after which what B accumulates by itself (norms, embeddings) is complete, and after
        # which what waits for W is
        self.last_backwards, self.last_weights = (
            last(self.passes, kind) if completes else set[Pass]() for kind in (B, W)
        )
        # stages whose forwards keep the input only, and run again before B
        self.run_again = frozenset(p.stage for p in self.passes if p.kind == R)
        # by its key, the send to a partner of what a forward of this rank has saved, and the
        # receive with which it comes back
        self.sent, self.fetched = (
            {
                key_of(i.consumer): i
                for i in program
                if isinstance(i, instruction) and i.saved and i.consumer.kind == kind
            }
            for instruction, kind in ((Send, SENT), (Receive, FETCHED))
        )
        # keys of forwards whose saved activations leave the device, to the host or a partner
        self.leaving = frozenset({*self.sent, *(key_of(p) for p in self.passes if p.kind == OUT)})
        self._splits: dict[tuple[bool, bool], frozenset[Key]] = {}

    def split(self, together: bool, left_out: bool) -> frozenset[Key]:
        """Return the backwards that leave their weight gradients to a W.

        Where passes that the program joins run as one (`together`), the one asks the store whether
        to defer and the other does, so they all do. `left_out`: Ws leave weight gradients out.
        """
        if not self.splits:
            return frozenset()
        if (together, left_out) not in self._splits:
            joins = (i.passes for i in self.program if together and isinstance(i, Join))
            cells = [p for passes in joins if Together(passes).is_cell for p in passes]
            unsplit = set() if left_out else whole(self.passes, cells)
            self._splits[together, left_out] = frozenset(map(key_of, self.passes)) - unsplit
        return self._splits[together, left_out]

    def reject_unsupported(self, moves: bool, collectives: bool, own: Collection[str]) -> None:
        """Raise NotImplementedError unless each pass has an action that understands its messages.

        The executor `moves` activations or not, and has a group for `collectives` or none; `own`
        are kinds of passes that have actions of a technique's.
        """
        run = (*_BUILT_IN, *(_MOVES if moves else ()), *own)
        for p in {p.kind: p for p in self.passes}.values():
            if p.kind not in run:
                raise NotImplementedError(
                    f'{p} cannot run yet: of techniques, {p.words}; schedules that run have '
                    f'{", ".join((*_BUILT_IN, *_MOVES))}'
                )
        for i, second in self._inputs:
            understood = _TAKEN.get(i.consumer.kind)
            if i.consumer.kind in own or (i.message == understood and not second):
                continue
            why = (
                ' beside another one, but its action takes one'
                if second
                else f', but {i.consumer.kind} understands {understood or "none"}'
            )
            raise NotImplementedError(
                f'{i.consumer} takes the message {i.message!r} of {i.producer}{why}: give the '
                'executor an action for it'
            )
        if not collectives:
            for i in self.program:
                if isinstance(i, Exchange):
                    raise NotImplementedError(
                        f'{i} is a collective of all ranks: give the executor collectives'
                    )

    @functools.cached_property
    def _inputs(self) -> tuple[tuple[Receive | Hand, bool], ...]:
        """One message of each name and kind of pass that takes it; all that are second inputs."""
        seen: set[Pass] = set()
        found: dict[tuple, tuple[Receive | Hand, bool]] = {}
        for i in self.program:
            if isinstance(i, Hand) or (isinstance(i, Receive) and not i.saved):
                found.setdefault((i.consumer.kind, i.message), (i, False))
                if i.consumer in seen:
                    found[i.consumer,] = i, True
                seen.add(i.consumer)
        return tuple(found.values())


def one_microbatch(program: Program) -> Program:
    """Return the program of the first microbatch of each stage of a rank, in the same order.

    Activations stay where they are, and passes that the program joins run one after the other.
    Collectives of the pipeline stay: every rank comes to them without a message of another.
    """
    first: dict[int, int] = {}
    for p in program:
        if isinstance(p, Pass):
            first.setdefault(p.stage, p.microbatch)
    kept = {
        p
        for p in program
        if isinstance(p, Pass) and p.kind not in _MOVES and first[p.stage] == p.microbatch
    }
    found: list[Instruction] = []
    for i in program:
        match i:
            case Pass():
                passes: Collection[Pass] = (i,)
            case Hand() | Receive(saved=False):
                passes = (i.consumer,)
            case Send(saved=False):
                passes = (i.producer,)
            case Exchange():
                passes = (*i.producers, *i.consumers)
            case _:
                passes = ()
        if isinstance(i, Hand) and i.consumer in kept and i.producer not in kept:
            found.append(Receive(i.producer, i.consumer, 0, False, i.message))
        elif any(p in kept for p in passes):
            found.append(i)
    return tuple(found)
