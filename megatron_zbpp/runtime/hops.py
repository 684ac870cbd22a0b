"""Hops whose tensors differ from edge to edge: several of them, each with a shape and dtype."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron_zbpp.analysis.program import Hand, Receive, Send
from megatron_zbpp.ir import F
from megatron_zbpp.runtime.actions import Tensors
from megatron_zbpp.runtime.channels import Channels, Message
from megatron_zbpp.runtime.executor import Executor
from megatron_zbpp.runtime.messages import ByName

Hop = tuple[Message, ...]
"""The tensors that one stage sends to the next."""
Edges = Mapping[int, Hop]
"""The hop behind each stage, by the stage that sends it forwards."""


def with_gradients(hop: Hop) -> Hop:
    """Return the tensors of a hop of which gradients go back: those of floating point."""
    return tuple(message for message in hop if message.dtype.is_floating_point)


class ByEdge(ByName):
    """Messages of fixed shapes that each edge has of its own: tuples, of one tensor the tensor."""

    def __init__(self, channels: Channels, edges: Edges) -> None:
        super().__init__(channels, next(iter(edges.values()))[0], {})
        self._edges = edges

    def _of(self, instruction: Send | Hand | Receive) -> Message | Hop:
        forward = instruction.consumer.kind == F
        sender = instruction.producer if forward else instruction.consumer
        hop = self._edges[sender.stage]
        if len(hop) == 1:
            return hop[0]
        return hop if forward else with_gradients(hop)


class HopExecutor(Executor):
    """An executor whose stages take and give what each edge has."""

    def __init__(self, edges: Edges, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._messages = ByEdge(self.channels, edges)

    def _fed(self, received: Tensors | None) -> Any:
        if not isinstance(received, tuple):
            return super()._fed(received)
        return tuple(
            super(HopExecutor, self)._fed(each) if each.is_floating_point() else each
            for each in received
        )

    def _detached(self, output: Any) -> Any:
        if not isinstance(output, tuple):
            return super()._detached(output)
        return tuple(map(torch.Tensor.detach, output))
