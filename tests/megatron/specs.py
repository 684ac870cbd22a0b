"""Layer specs for `--spec`: what Megatron has for GPUs only, in plain torch."""

from __future__ import annotations

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec


class SequenceParallelNorm(torch.nn.LayerNorm):
    """A norm whose gradients Megatron sums over the tensor-parallel ranks, as TE's."""

    def __init__(self, config, hidden_size, eps=1e-5, **_):
        super().__init__(hidden_size, eps=eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel


def _with_norm() -> ModuleSpec:
    spec = get_gpt_layer_local_spec()
    spec.submodules.input_layernorm = SequenceParallelNorm
    spec.submodules.pre_mlp_layernorm = SequenceParallelNorm
    return spec


sequence_parallel = _with_norm()
