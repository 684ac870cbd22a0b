"""Layers whose passes take the times that a file of layers says, each its own, on unequal ranks.

Importing this imports Megatron.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core.enums import ModelType

from benchmarks.pipelines.emulated import SHAPE, EmulatedChunk, EmulatedLayer, Meter, Start, Times
from benchmarks.pipelines.runners import EmulatedModel
from megatron_zbpp.ir import Placement
from megatron_zbpp.partitioning.layers import Layers
from megatron_zbpp.runtime.weight_grads import WeightGradStore


class BusyMeter(Meter):
    """One whose passes work all the time."""

    def fill(self, start: Start, seconds: float) -> None:
        until = start.clock + seconds
        while time.perf_counter() < until:
            pass
        self.awake += time.thread_time() - start.used


class UnevenModel(EmulatedModel):
    """See `pipelines.emulated`; a pass of no time still computes.

    Args:
        layers: of the model, in seconds.
        cuts: layers of each stage.
        factor: by which this rank's passes take longer.
        rows: of a message, of 64 bytes each.
        busy: whether its passes keep a processor busy, instead of sleeping.
    """

    def __init__(
        self,
        layers: Layers,
        cuts: tuple[int, ...],
        factor: float,
        rows: int,
        busy: bool = False,
    ) -> None:
        super().__init__(Times(0.0, 0.0, 0.0))
        if busy:
            self.meter = BusyMeter()
        self.sequence = rows
        self._layers, self._cuts, self._factor = layers, cuts, factor

    def chunks(self, placement: Placement, store: WeightGradStore) -> list[EmulatedChunk]:
        chunks = []
        stages = placement.stages(dist.get_rank())
        for stage in stages:
            start = sum(self._cuts[:stage])
            own = [
                EmulatedLayer(index, self._times_of(index), store, self.meter)
                for index in range(start, start + self._cuts[stage])
            ]
            last = stage == placement.num_stages - 1
            config = self.config(placement.num_ranks, len(stages))
            chunk = EmulatedChunk(own, stage == 0, last, config)
            chunk.model_type = ModelType.encoder_or_decoder
            chunks.append(chunk)
        return chunks

    def _times_of(self, index: int) -> Times:
        layer, factor = self._layers.layers[index], self._factor
        return Times(layer.forward * factor, layer.backward * factor, layer.weight * factor)

    def data(self, num_microbatches: int) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(1234)
        shape = self.sequence, *SHAPE[1:]
        found = [torch.randn(shape, generator=generator) for _ in range(num_microbatches)]
        return itertools.cycle(found)
