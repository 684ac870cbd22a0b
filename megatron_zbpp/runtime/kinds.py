"""Built-in kinds of passes: the tasks of each, and the last pass of each stage."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megatron_zbpp.ir import B, Pass, W, chain
from megatron_zbpp.ir.graph import R
from megatron_zbpp.runtime.key import Key, key_of

_PLAIN = chain(1)  # what each kind of pass does, whatever its stage
RUN = (*_PLAIN.kinds, R)


def done_by(p: Pass) -> tuple[str, ...]:
    """Return kinds of the tasks that `p` does."""
    if p.kind not in _PLAIN.kinds:
        return (p.kind,)
    return tuple(task.kind for task in _PLAIN.tasks(p.kind, 0))


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
