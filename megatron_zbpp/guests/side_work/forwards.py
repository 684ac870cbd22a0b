"""Forwards of another model as steps of side work, such as those of a teacher (TSPipe)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch


def forwards(
    layers: Sequence[Callable[[Any], Any]], inputs: Iterable[Any], take: Callable[[Any], None]
) -> Callable[[], bool]:
    """Return a step that runs one layer of a model that does not train.

    Args:
        layers: of the model, in order: each takes what the one before returned.
        inputs: of the first layer; the next one is asked for once the last one has come out.
        take: is called with what comes out, in the order of the inputs.

    Returns:
        For `plugin.side_task`: it returns False once there are no more inputs.

    >>> found = []
    >>> step = forwards([lambda x: x + 1, lambda x: 2 * x], [1, 2], found.append)
    >>> [step() for _ in range(5)], found
    ([True, True, True, True, False], [4, 6])
    """

    def steps() -> Iterator[bool]:
        for made in inputs:
            for number, layer in enumerate(layers, 1):
                with torch.no_grad():
                    made = layer(made)
                if number == len(layers):
                    take(made)
                yield True

    run = steps()
    return lambda: next(run, False)
