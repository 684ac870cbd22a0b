"""The package's own cost of a forward and a backward on one stage of a model.

    python -m benchmarks.common.stage

Megatron's steps are stubs, so what is left is `ModelStage`: CPU time, the median of five rounds.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any
from unittest import mock

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_zbpp.ir import Pass
from megatron_zbpp.mcore.iteration.stages import Arguments, Call, ModelStage
from megatron_zbpp.runtime.weight_grads import WeightGradStore

_PAIRS, _ROUNDS = 20_000, 5


def stage() -> ModelStage:
    """Return a stage of a model that computes nothing."""
    model: Any = torch.nn.Linear(2, 2)
    model.config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=1)
    output = torch.zeros(4, 1, 16)
    arguments = Arguments(
        forward_step_func=lambda data, model: (output, None),
        data_iterator=None,
        model=[model],
        num_microbatches=8,
        seq_length=4,
        micro_batch_size=1,
    )
    call = Call(arguments, WeightGradStore(), 1, torch.device('cpu'))
    return ModelStage(call, model, None, None, is_last=False)


def seconds() -> float:
    """Return the CPU time of a forward and its backward."""
    output, tokens = torch.zeros(4, 1, 16), torch.zeros([], dtype=torch.int)

    def forward_step(step: Any, data: Any, model: Any, *_: Any, **__: Any) -> Any:
        step(data, model)
        return output, tokens

    stubs = {'forward_step': forward_step, 'backward_step': lambda *_: output}
    with mock.patch.multiple(schedules, deallocate_output_tensor=lambda *_, **__: None, **stubs):
        made, forward, backward = stage(), Pass('F', 0, 0), Pass('B', 0, 0)
        taken = []
        for _ in range(1 + _ROUNDS):
            start = time.thread_time()
            for _ in range(_PAIRS):
                made.release(made.forward(forward, None))
                made.backward(backward, None, output, output)
            taken.append((time.thread_time() - start) / _PAIRS)
    return median(taken[1:])


if __name__ == '__main__':
    print(f'{1e6 * seconds():.2f} µs for a forward and a backward of a stage')
