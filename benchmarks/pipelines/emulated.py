"""A model whose passes take the time that they are told to take: they sleep, on any machine.

Around each sleep there is a tiny real matrix product, so that the gradients tell whether a runner
has done the work. A sleep takes no CPU: many ranks on few cores run like as many devices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import torch

from megatron_zbpp.ir import Placement

SHAPE = (4, 1, 16)  # of a message: sequence, micro batch, hidden
LAYERS = 2  # of each rank, in one stage or two: so all models are of the same layers
_SPIN = 2e-4  # seconds before a deadline that are not slept: waking up takes some of them


@dataclass(frozen=True)
class Times:
    """Seconds of one F, B and W of a full rank; a BW takes `backward + weight`."""

    forward: float
    backward: float
    weight: float

    @property
    def total(self) -> float:
        """What one microbatch takes a rank: m of these are an iteration without bubble."""
        return self.forward + self.backward + self.weight

    def share(self, parts: int) -> Times:
        """Of one of so many equal parts of a rank."""
        return Times(self.forward / parts, self.backward / parts, self.weight / parts)


class Store(Protocol):
    """Where a layer may leave its weight gradient: the runtime's store, or torch's `dw_builder`."""

    @property
    def deferring(self) -> bool:
        """Whether the pass that runs now leaves its weight gradients for later."""

    def defer(self, parameters: Sequence[torch.nn.Parameter], compute: Callable) -> None:
        """Take what `compute()` will return: one gradient for each of `parameters`."""


class Start(NamedTuple):
    """When a pass began.

    Attributes:
        clock: seconds of `time.perf_counter`.
        used: CPU seconds of this thread so far.
    """

    clock: float
    used: float


def starting() -> Start:
    """Return now."""
    return Start(time.perf_counter(), time.thread_time())


@dataclass
class Meter:
    """What the layers of one rank note down while a runner runs them.

    Attributes:
        live: layers that are between their F and their W; the input of each is held.
        peak: most of them at once.
        awake: CPU seconds of the emulated passes: where the thread had no core, none pass.
    """

    live: float = 0
    peak: float = 0
    awake: float = 0.0

    def fill(self, start: Start, seconds: float) -> None:
        """Sleep until what began at `start` has taken `seconds`."""
        sleep_until(start.clock + seconds)
        self.awake += time.thread_time() - start.used

    def hold(self, layers: float) -> None:
        """So many layers more (or fewer) are held."""
        self.live += layers
        self.peak = max(self.peak, self.live)


def sleep_until(deadline: float) -> None:
    """Return at `deadline`, in seconds of `time.perf_counter`, to some microseconds."""
    left = deadline - time.perf_counter()
    if left > _SPIN:
        time.sleep(left - _SPIN)
    while time.perf_counter() < deadline:
        pass


class EmulatedLayer(torch.nn.Module):
    """y = x w. Equal `index`, equal weight, whatever stage it is in.

    Args:
        index: in the whole model.
        times: of this layer.
        store: asked in forward whether W is left for later.
        meter: of the rank.
        rows: of a whole sequence.
    """

    def __init__(
        self, index: int, times: Times, store: Store, meter: Meter, rows: int = SHAPE[0]
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(index)
        width = SHAPE[-1]
        self.weight = torch.nn.Parameter(
            torch.randn(width, width, generator=generator) / width**0.5
        )
        self.index, self.times, self.store, self.meter = index, times, store, meter
        self._rows = rows

    def share(self, x: torch.Tensor) -> float:
        """Return which part of a sequence that is: 1, or less of a slice."""
        return x.size(0) / self._rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, deferring = self._parameters['weight'], self.store.deferring
        # autograd must not see the parameter in B: its gradient comes with W
        return _Linear.apply(self, weight.detach() if deferring else weight, x, deferring)

    def weight_gradient(self, x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """W: takes its time, and lets go of the input."""
        start, part = starting(), self.share(x)
        found = x.flatten(0, -2).t() @ gradient.flatten(0, -2)
        self.meter.hold(-part)
        self.meter.fill(start, part * self.times.weight)
        return found


class _Linear(torch.autograd.Function):
    """F and B of a layer; W too, or left to the store."""

    @staticmethod
    def forward(
        ctx: Any, layer: EmulatedLayer, weight: torch.Tensor, x: torch.Tensor, deferring: bool
    ) -> torch.Tensor:
        ctx.layer, ctx.deferring = layer, deferring
        ctx.save_for_backward(x)
        start, part = starting(), layer.share(x)
        layer.meter.hold(+part)
        after = x @ weight
        layer.meter.fill(start, part * layer.times.forward)
        return after

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,), layer = ctx.saved_tensors, ctx.layer
        start = starting()
        weight = layer._parameters['weight']
        before = gradient @ weight.detach().t()
        layer.meter.fill(start, layer.share(x) * layer.times.backward)
        compute = partial(layer.weight_gradient, x, gradient)
        if not ctx.deferring:
            return None, compute(), before, None
        layer.store.defer([weight], lambda: [compute()])
        return None, None, before, None


class EmulatedChunk(torch.nn.Module):
    """The layers of one stage; lean, since what they take beside their times counts as overhead.

    Args:
        layers: in order.
        first, last: whether it is the first or last stage of the model.
        config: what a runner wants a model to have under that name.

    Attributes:
        pre_process, post_process: whether it is first, last: Megatron's names.
        decoder: where Megatron finds layers to tell them which microbatch comes: none asks.
    """

    share_embeddings_and_output_weights = False  # asked when gradients are finalized

    def __init__(
        self, layers: Iterable[EmulatedLayer], first: bool, last: bool, config: Any = None
    ) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)
        self.pre_process, self.post_process = first, last
        self.config = config
        self.decoder = SimpleNamespace(layers=())
        self._order = tuple(self.layers)
        self._received: list[torch.Tensor | None] = [None]

    def set_input_tensor(self, received: list[torch.Tensor | None]) -> None:
        """Take what the stage before has made, as Megatron hands it over."""
        self._received[:] = received

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return what was set, or else the input, through all layers.

        Args:
            input_ids: by that name slices are cut of what the first stage gets, a micro batch of
                one: (1, sequence, hidden) or (sequence, 1, hidden).
        """
        (received,) = self._received
        x = input_ids if received is None else received
        if self.pre_process:
            # as behind an embedding: the first B is a B, too
            x = x.detach().flatten(0, 1).unsqueeze(1).requires_grad_()
        for layer in self._order:
            x = layer.forward(x)
        return x


def stage_layers(
    stage: int, placement: Placement, times: Times, store: Store, meter: Meter
) -> list[EmulatedLayer]:
    """Return the layers of a stage.

    Args:
        stage: in model order.
        placement: of one or two stages a rank.
        times: of a full rank.
        store: of the layers.
        meter: of the rank.
    """
    each = LAYERS * placement.num_ranks // placement.num_stages
    return [
        EmulatedLayer(index, times.share(LAYERS), store, meter)
        for index in range(stage * each, (stage + 1) * each)
    ]


def inputs(num_microbatches: int) -> list[torch.Tensor]:
    """Return what the first stage gets: the same for every runner."""
    generator = torch.Generator().manual_seed(1234)
    return [torch.randn(SHAPE, generator=generator) for _ in range(num_microbatches)]


def loss(output: torch.Tensor) -> torch.Tensor:
    """Of one microbatch; a runner divides by their number."""
    return output.square().sum()
