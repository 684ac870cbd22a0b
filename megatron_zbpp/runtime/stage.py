"""Protocols of what an executor runs: stages and their wrappers, overlapped F and B, actions.

What a forward leaves for the passes behind it is kept under its key: stage, microbatch, slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from megatron_zbpp.ir import Pass

MaybeTensor = torch.Tensor | None
"""What a stage receives or returns; None at an end of the model."""

Tensors = torch.Tensor | tuple[torch.Tensor, ...]
Inputs = Mapping[str, Sequence[Tensors]]
"""Messages that came, by name, in the order of the stages that made them.

A gathered message is one tuple, in the order of the ranks."""

Outputs = Mapping[str, Tensors]
"""Messages that are sent, by name, whichever pass takes them."""

Action = Callable[[Pass, Inputs], Outputs]
"""Runs the passes of a technique's own kind on its rank; keeps by itself what it needs later."""

Key = tuple[int, int, int]  # (stage, microbatch, slice)


def key_of(p: Pass) -> Key:
    """Return the key of what `p` leaves, or takes."""
    return p.stage, p.microbatch, p.slice


class Stage(Protocol):
    """The protocol of one stage of the model; it keeps no state between passes."""

    def forward(self, p: Pass, received: MaybeTensor) -> torch.Tensor:
        """Return the output of the stage; `received` is None on the first one.

        The last returns its loss: where no backward follows, that may be anything.
        """
        ...

    def forward_without_graph(self, p: Pass, received: MaybeTensor) -> torch.Tensor:
        """Return the output of the stage, of which nothing is kept: `recompute` makes it again."""
        ...

    def recompute(self, p: Pass, received: MaybeTensor) -> torch.Tensor:
        """Make the same output again, to the bit, with its graph; leave nothing else behind."""
        ...

    def backward(
        self, p: Pass, received: MaybeTensor, output: torch.Tensor, gradient: MaybeTensor
    ) -> MaybeTensor:
        """Return the gradient with respect to `received`; `gradient` is None on the last stage."""
        ...

    def release(self, output: torch.Tensor) -> None:
        """Release the data of `output`, which has been passed on; its graph is still needed."""

    def grad_sync(self, last: bool) -> AbstractContextManager[None]:
        """Enter what accumulates gradients; `last`: these parameters get no more after it."""
        ...


class Forward(NamedTuple):
    """A forward that is to run: arguments of `Stage.forward`, and whose it is."""

    stage: Stage
    p: Pass
    received: MaybeTensor


class Backward(NamedTuple):
    """A backward that is to run: arguments of `Stage.backward`, and whose it is."""

    stage: Stage
    p: Pass
    received: MaybeTensor
    output: torch.Tensor
    gradient: MaybeTensor


RunTogether = Callable[[Forward, Backward], tuple[torch.Tensor, MaybeTensor]]
"""Runs both as one; returns what each would."""


class ForwardStep(NamedTuple):
    """Arguments of one forward of a model: of F, or of R, which runs it again."""

    p: Pass
    received: Any
    data: Iterator | None  # read by the program's forward_step
    results: list[Any]  # gets the results of the loss function
    saved: bool = True  # False: the forward's graph is left out, and R runs it again


class ProgramOutput(NamedTuple):
    """Results of one call of the program's forward_step."""

    output: Any
    loss: Any  # the loss function that this pass applies
    whole: Any  # the program's loss function, of the whole microbatch


StepOutput = tuple[Any, Any]
"""Output of a forward, and the tokens that its loss function has counted."""


class Wrapper:
    """Work of a technique in the passes of one stage.

    Each method runs around the same method of the next wrapper within, at last of the stage itself.
    """

    shared: Set[int] = frozenset()  # addresses of the memory that several passes save
    asks_gradients = False  # within forwards, of the loss function

    def __init__(self, stage: Any) -> None:
        self.stage = stage

    def reads(self, p: Pass, data: Iterator | None) -> Iterator | None:
        """Return the iterator that F reads; R gets the items that its F has read."""
        return data

    def step(self, forward: ForwardStep, inner: Callable[[ForwardStep], StepOutput]) -> StepOutput:
        """Run one forward, of F or of R."""
        return inner(forward)

    def call(
        self, p: Pass, data: Iterator | None, model: Any, inner: Callable[..., ProgramOutput]
    ) -> ProgramOutput:
        """Call the program's forward_step, within Megatron's."""
        return inner(p, data, model)

    def backward(self, backward: Backward, inner: Callable[[Backward], Any]) -> Any:
        """Run B."""
        return inner(backward)

    def release(self, output: Any, inner: Callable[[Any], None]) -> None:
        """Release the data of an output."""
        inner(output)


def overridden(wrappers: Iterable[Wrapper], name: str) -> list[Callable]:
    """Return a method of the wrappers that have one of their own: others cost no call."""
    plain = getattr(Wrapper, name)
    return [getattr(each, name) for each in wrappers if getattr(type(each), name) is not plain]


def folded(wrappers: Iterable[Wrapper], name: str, innermost: Callable) -> Callable:
    """Return a method of all wrappers around `innermost`, the first of them next to it."""
    for method in overridden(wrappers, name):
        innermost = partial(method, inner=innermost)
    return innermost
