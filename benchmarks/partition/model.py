"""What is trained: emulated layers of unequal times, or a GPT that is alike however it is divided.

Importing this imports Megatron.
"""

from __future__ import annotations

import itertools
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection

from benchmarks.partition.measured import HEAD
from benchmarks.partition.measured import Gpt as Sizes
from benchmarks.pipelines.emulated import (
    SHAPE,
    EmulatedChunk,
    EmulatedLayer,
    Meter,
    Start,
    Times,
    starting,
)
from benchmarks.pipelines.runners import EmulatedModel
from benchmarks.training.model import Gpt
from megatron_zbpp.ir import Placement
from megatron_zbpp.mcore.techniques import vocabulary_shards as vocabulary
from megatron_zbpp.mcore.techniques.vocabulary_shards import InputShard, OutputShard
from megatron_zbpp.partitioning.layers import Layers
from megatron_zbpp.runtime.weight_grads import WeightGradStore

_WORDS = 4  # of a rank's shard, where passes are emulated


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
                EmulatedLayer(index, self._times_of(index), store, self.meter, self.sequence)
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


class ShardedModel(UnevenModel):
    """The same with a small output layer on all ranks, whose S and T take their times.

    Args:
        shard: seconds of S and of T.
        given: of `UnevenModel`.
    """

    def __init__(self, shard: tuple[float, float], *given: Any) -> None:
        super().__init__(*given)
        self._shard = shard

    def chunks(self, placement: Placement, store: WeightGradStore) -> list[EmulatedChunk]:
        chunks = super().chunks(placement, store)
        last = chunks[-1]
        last.pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        last.vocab_size = placement.num_ranks * _WORDS
        generator = torch.Generator().manual_seed(dist.get_rank())
        rows = torch.randn(_WORDS, SHAPE[-1], generator=generator)
        shard = last.output_layer = OutputShard(last, rows)
        shard.forward = self._slept(shard.forward, self._shard[0])
        return chunks

    def forward_step(self, data: Iterator[torch.Tensor], model: EmulatedChunk) -> tuple:
        output = model(next(data))
        if not model.post_process:
            return output, None
        labels = torch.zeros(output.shape[1::-1], dtype=torch.long)
        return model.output_layer.loss(labels, model.output_layer(output)[0]), _sum

    @contextmanager
    def ready(self) -> Iterator[None]:
        slept = self._slept(vocabulary.weight_gradient, self._shard[1])
        with super().ready(), mock.patch.object(vocabulary, 'weight_gradient', slept):
            yield

    def _slept(self, function: Callable, seconds: float) -> Callable:
        """Return a function that takes so long; the model's own call of the layer does not."""

        def run(*given: Any, **named: Any) -> Any:
            start = starting()
            found = function(*given, **named)
            if named or len(given) > 1:
                self.meter.fill(start, seconds)
            return found

        return run


def _sum(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = losses.sum()
    return loss, {'loss': loss.detach().clone()}


class LaidOutGpt(Gpt):
    """The GPT of the training benchmark, divided as a layout says.

    Args:
        sizes: of the model.
        layout: of its layers, in Megatron's language.
    """

    def __init__(self, sizes: Sizes, layout: str) -> None:
        shape = sizes.layers, sizes.hidden, HEAD, sizes.sequence, sizes.words
        super().__init__(*shape, layout=layout, tied=sizes.tied)

    def chunks(self, placement: Placement, store: WeightGradStore) -> list[GPTModel]:
        with _tied_on(placement.only_route[0], placement.only_route[-1]):
            found = super().chunks(placement, store)
        for chunk in found:
            _draw(chunk)
        return found

    def data(self, num_microbatches: int) -> Iterator[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(1234)
        shape = num_microbatches, 1, self.sequence + 1
        drawn = torch.randint(self._words, shape, generator=generator)
        positions = torch.arange(self.sequence).unsqueeze(0)
        return itertools.cycle(
            {'tokens': words[:, :-1], 'labels': words[:, 1:], 'positions': positions}
            for words in drawn
        )


@contextmanager
def _tied_on(*ranks: int) -> Iterator[None]:
    """Inside, these ranks have the embedding and its copy; groups were made for those of a loop."""
    made = dist.new_group(sorted({*ranks}))  # by all ranks
    group = made if dist.get_rank() in ranks else None
    with mock.patch.object(parallel_state, '_EMBEDDING_GROUP', group):
        yield


def _draw(model: GPTModel) -> None:
    """Draw each matrix by the name that it has in the whole model, whichever rank it is on."""
    layers = model.decoder.layers
    for name, parameter in model.named_parameters():
        layer = model.get_submodule(name.rpartition('.')[0])
        start, _, rest = name.partition('decoder.layers.')
        if rest and not start:
            index, _, rest = rest.partition('.')
            name = f'layer {layers[int(index)].layer_number} {rest}'
        if parameter.dim() == 1:
            continue
        whole = own = parameter.data
        if isinstance(layer, (OutputShard, InputShard)):  # of these rows of the whole layer
            whole = torch.empty(model.vocab_size, own.size(1))
        if model.share_embeddings_and_output_weights and name.startswith('output_layer'):
            name = 'embedding.word_embeddings.weight'
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        whole.normal_(0.0, 0.02, generator=generator)
        if whole is not own:
            own.copy_(whole.chunk(len(whole) // len(own))[layer.place])
