"""Tables that the executor looks up in a program: made once, for all iterations that run it."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from megatron_zbpp.analysis.program import Exchange, Hand, Join, Program, Receive
from megatron_zbpp.ir import B, Pass, Together, W
from megatron_zbpp.ir.graph import R
from megatron_zbpp.runtime.actions import done_by
from megatron_zbpp.runtime.activations.moves import Moving
from megatron_zbpp.runtime.key import Key, key_of


def last(passes: Sequence[Pass], kind: str) -> set[Pass]:
    """Return the last pass of each stage that does a task of `kind`."""
    return set({p.stage: p for p in passes if kind in done_by(p)}.values())


def whole(passes: Sequence[Pass], split: Collection[Pass] = ()) -> set[Key]:
    """Return keys of the backwards that autograd may run whole.

    A pass that does both B and W saves what a split costs: with it, communication in B hides behind
    weight gradients, and nothing is gathered twice. Not so where gradients of its stage that come
    with B are complete after another pass than those that come with W: hooks of
    DistributedDataParallel would hear of the one or the other too early.

    Args:
        passes: of a rank.
        split: passes whose microbatches are not to be run whole.
    """
    last_backwards, last_weights = last(passes, B), last(passes, W)
    kept = set(map(key_of, split))
    return {
        key_of(p)
        for p in passes
        if {B, W} <= set(done_by(p)) and (p in last_backwards) == (p in last_weights)
    } - kept


@dataclass(frozen=True, eq=False)
class Tables:
    """The tables of one rank's program; each is made when it is first asked for."""

    program: Program  # of the rank
    completes: bool = True  # whether gradients are complete behind the last passes

    @functools.cached_property
    def passes(self) -> tuple[Pass, ...]:
        return tuple(i for i in self.program if isinstance(i, Pass))

    @functools.cached_property
    def own(self) -> frozenset[Pass]:
        """The passes, to look one up."""
        return frozenset(self.passes)

    @functools.cached_property
    def contributes(self) -> dict[Pass, tuple[str, ...]]:
        """The messages of collectives that passes make."""
        found: dict[Pass, tuple[str, ...]] = {}
        for exchange in [i for i in self.program if isinstance(i, Exchange)]:
            for p in exchange.producers:
                if p in self.own:
                    found[p] = (*found.get(p, ()), exchange.message)
        return found

    @functools.cached_property
    def of_each_kind(self) -> tuple[Pass, ...]:
        """One pass of each kind."""
        return tuple({p.kind: p for p in self.passes}.values())

    @functools.cached_property
    def named(self) -> tuple[Receive | Hand, ...]:
        """One message of each name, for each kind of pass that takes it."""
        taken = (i for i in self.program if isinstance(i, Receive | Hand))
        return tuple({(i.consumer.kind, i.message): i for i in taken}.values())

    @functools.cached_property
    def second_inputs(self) -> tuple[Receive | Hand, ...]:
        """Messages for passes that take another one, too."""
        seen: set[Pass] = set()
        found: list[Receive | Hand] = []
        for i in self.program:
            if isinstance(i, Hand) or (isinstance(i, Receive) and not i.saved):
                if i.consumer in seen:
                    found.append(i)
                seen.add(i.consumer)
        return tuple(found)

    @functools.cached_property
    def handed_to(self) -> frozenset[Pass]:
        """Passes whose input its maker on this rank may still use."""
        return frozenset(i.consumer for i in self.program if isinstance(i, Hand))

    @functools.cached_property
    def splits(self) -> bool:
        """True if there are W passes."""
        return any(p.kind == W for p in self.passes)

    @functools.cached_property
    def trains(self) -> bool:
        """True if there are backwards."""
        return any(B in done_by(p) for p in self.passes)

    @functools.cached_property
    def last_backwards(self) -> set[Pass]:
        """Passes after which what B accumulates by itself (norms, embeddings) is complete."""
        return last(self.passes, B) if self.completes else set()

    @functools.cached_property
    def last_weights(self) -> set[Pass]:
        """Passes after which what waits for W is complete."""
        return last(self.passes, W) if self.completes else set()

    @functools.cached_property
    def recomputed(self) -> frozenset[Key]:
        """Stages whose F keeps the input only."""
        return frozenset(key_of(p) for p in self.passes if p.kind == R)

    @functools.cached_property
    def moving(self) -> Moving:
        """Saved activations that leave the device."""
        return Moving.of(self.program)

    def split(self, together: bool, left_out: bool) -> frozenset[Key]:
        """Return those that leave their weight gradients to a W.

        Args:
            together: whether passes that the program joins run as one. Of such the one asks the
                store whether to defer and the other does, so they all do.
            left_out: whether W passes leave weight gradients out.
        """
        if not self.splits:
            return frozenset()
        if left_out:
            return self._every
        return self._split_beside_cells if together else self._split

    @functools.cached_property
    def _every(self) -> frozenset[Key]:
        return frozenset(map(key_of, self.passes))

    @functools.cached_property
    def _split(self) -> frozenset[Key]:
        return self._every - whole(self.passes)

    @functools.cached_property
    def _split_beside_cells(self) -> frozenset[Key]:
        joins = (i.passes for i in self.program if isinstance(i, Join))
        cells = [passes for passes in joins if Together(passes).is_cell]
        return self._every - whole(self.passes, [p for cell in cells for p in cell])
