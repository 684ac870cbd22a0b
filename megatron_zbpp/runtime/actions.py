"""Actions: what a pass of some kind does on its rank, given its inputs.

F, B, W, R and the passes that move activations are built in; a technique brings actions of its own
kinds. What an action keeps between passes, it keeps under (stage, slice, microbatch) itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch

from megatron_zbpp.analysis.program import Exchange, Hand, Instruction, Receive
from megatron_zbpp.ir import BW, B, F, Pass, chain
from megatron_zbpp.ir.graph import R
from megatron_zbpp.runtime.activations import moves

Tensors = torch.Tensor | tuple[torch.Tensor, ...]
Inputs = Mapping[str, Sequence[Tensors]]
"""By the name of a message, all that came of it, in the order of the stages that made it.

What was gathered comes as one tuple, in the order of the ranks."""

Outputs = Mapping[str, Tensors]
"""By the name of a message, what is sent of it, to whoever takes it."""

Action = Callable[[Pass, Inputs], Outputs]

_PLAIN = chain(1)  # what each kind of pass does, whatever its stage
RUN = (*_PLAIN.kinds, R)
_TAKEN = {F: 'activation', B: 'gradient', BW: 'gradient'}  # what the built-in actions understand


def done_by(p: Pass) -> tuple[str, ...]:
    """Return kinds of the tasks that `p` does."""
    if p.kind not in _PLAIN.kinds:
        return (p.kind,)
    return tuple(task.kind for task in _PLAIN.tasks(p.kind, 0))


def reject_unsupported(
    program: Iterable[Instruction], moves_activations: bool, own: Collection[str]
) -> None:
    """Raise unless each pass has an action, and each built-in action understands its messages.

    Raises:
        NotImplementedError: names the pass.
    """
    run = (*RUN, *(moves.KINDS if moves_activations else ()), *own)
    for i in program:
        if isinstance(i, Pass) and i.kind not in run:
            raise NotImplementedError(
                f'{i} cannot run yet: of techniques, {i.words}; schedules that run have '
                f'{", ".join((*RUN, *moves.KINDS))}'
            )
        if isinstance(i, Receive | Hand) and i.message and i.consumer.kind not in own:
            taken = _TAKEN.get(i.consumer.kind)
            if i.message != taken:
                raise NotImplementedError(
                    f'{i.consumer} takes the message {i.message!r} of {i.producer}, but '
                    f'{i.consumer.kind} understands {taken or "none"}: give the executor an action '
                    'for it'
                )


def reject_collectives(program: Iterable[Instruction]) -> None:
    """Refuse a program with collectives: an executor without their group cannot run them.

    Raises:
        NotImplementedError: names the first.
    """
    for i in program:
        if isinstance(i, Exchange):
            raise NotImplementedError(
                f'{i} is a collective of all ranks: give the executor collectives'
            )


def reject_second_inputs(several: Iterable[Receive | Hand], own: Collection[str]) -> None:
    """Raise for a message to a built-in action that takes another one, too.

    Raises:
        NotImplementedError: names the pass.
    """
    for i in several:
        if i.consumer.kind not in own:
            raise NotImplementedError(
                f'{i.consumer} takes the message {i.message!r} of {i.producer} beside another one, '
                'but its action takes one: give the executor an action for it'
            )
