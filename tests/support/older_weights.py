"""Trains the example by the formulas of asynchronous methods, without a pipeline.

    torchrun --nproc-per-node 1 older_weights.py pipedream-2bw 4 [flags of the example]

One process has the whole model. Each microbatch runs forward and backward by itself, on the weights
that its method has for each part of the model on so many ranks; then the next does. Losses and
hashes in --metrics-file are those of the asynchronous schedule where clipping is off and embeddings
are untied: else sums run in another order.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pretrain_gpt as script
import report
import torch


class OlderWeights:
    """Puts older weights into the whole model, by formula, of p parts (2p of wpipe).

    Those of pipedream-2bw are one step old; of pipedream part s of p has seen the microbatch p-1-s
    later; of wpipe those of the first half are one step old.
    """

    def __init__(self, method: str, parts: int) -> None:
        self.method, self.parts = method, parts
        self.history: list[list[torch.Tensor]] = []  # weights after so many steps
        self.places: list[tuple[torch.nn.Parameter, int]] = []  # parameters and their parts
        self.begun = 0  # microbatches
        self.every = 0

    def version(self, part: int) -> int:
        late = self.every if self.method == 'pipedream-2bw' else self.parts - 1 - part
        if self.method == 'wpipe':
            late = self.every if part < self.parts // 2 else 0
        return max(0, (self.begun - late) // self.every)

    def run_batch(self, original: Callable, args: Any, models: list, data: Any) -> float:
        """A batch, from whose gradients the step makes the next weights of the newest."""
        self.every = args.num_microbatches
        layers = args.num_layers // self.parts
        self.places = [
            (parameter, self.part(layer, layers)) for layer, _, parameter in report.by_layer(models)
        ]
        newest = [parameter.data.clone() for parameter, _ in self.places]
        self.history.append(newest)
        loss = original(args, models, data)
        for (parameter, _), weights in zip(self.places, newest, strict=True):
            parameter.data.copy_(weights)
        return loss

    def part(self, layer: str, layers: int) -> int:
        if layer.isdigit():
            return (int(layer) - 1) // layers
        return 0 if layer == 'embedding' else self.parts - 1

    def forward_step(self, original: Callable, *args: Any) -> Any:
        for index, (parameter, part) in enumerate(self.places):
            parameter.data.copy_(self.history[self.version(part)][index])
        self.begun += 1
        return original(*args)


def train(method: str, parts: int, argv: list[str]) -> None:
    """The example's training, whose batches and forwards have the weights of so many parts."""
    weights = OlderWeights(method, 2 * parts if method == 'wpipe' else parts)
    args = script.parse_args([*argv, '--pipeline-schedule', 'megatron'])
    run_batch = partial(weights.run_batch, script.run_batch)
    forward_step = partial(weights.forward_step, script.forward_step)
    with (
        mock.patch.object(script, 'run_batch', run_batch),
        mock.patch.object(script, 'forward_step', forward_step),
    ):
        script.train(args)


if __name__ == '__main__':
    train(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
