"""Training on CUDA's double: nothing of Megatron's or ours waits for the device in a pass."""

from __future__ import annotations

from unittest import mock

import pytest
from example import MODEL, forget_groups

ITERATIONS = 4
NO_CLIPPING = '1e9'


def train(argv, looks):
    """The example's training, on a double: what waited, races, how many steps were early.

    Args:
        argv: of the example.
        looks: whether a layer asks for a value in its backward.
    """
    import pretrain_gpt
    import torch
    from cuda_double import GPU, Cuda
    from megatron.core.transformer.mlp import MLP

    from megatron_zbpp.mcore import enabled
    from megatron_zbpp.mcore.iteration import preparation

    def forward(self, hidden_states, *args, _original=MLP.forward, **kwargs):
        if hidden_states.requires_grad:
            hidden_states.register_hook(lambda gradient: gradient if gradient.sum() > 0 else None)
        return _original(self, hidden_states, *args, **kwargs)

    with (
        Cuda() as cuda,
        mock.patch.object(preparation, 'profiled', cuda.within),
        mock.patch.object(MLP, 'forward', forward if looks else MLP.forward),
        mock.patch.object(pretrain_gpt, 'DEVICE', torch.device('cuda', GPU)),
    ):
        try:
            pretrain_gpt.train(pretrain_gpt.parse_args(argv))
            early = enabled.plugin.post_validation
        finally:
            forget_groups()
    return cuda.waits, cuda.races, early and early.early


def arguments(data, schedule, *more):
    argv = [*MODEL, '--pipeline-model-parallel-size', 2, '--num-layers', 4, '--data-path', data]
    argv += ['--global-batch-size', 4, '--train-iters', ITERATIONS, '--log-interval', 100]
    return [str(a) for a in (*argv, '--pipeline-schedule', schedule, *more)]


@pytest.mark.parametrize('precision', [(), ('--bf16',)], ids=['fp32', 'bf16'])
def test_nothing_waits_in_a_pass(ranks, data, precision):
    """Steps that are validated later included: their forwards run ahead of the device."""
    flags = ['--enable-optimizer-post-validation', '--optimizer-post-validation-clean-steps', 1]
    argv = arguments(data, 'zb-v', *precision, *flags, '--clip-grad', NO_CLIPPING)
    results = ranks(2).run(train, argv, False)
    assert any(early for *_, early in results), 'no step was early'
    for waits, races, _ in results:
        assert [wait for wait in waits if not wait.endswith('in None')] == []
        assert races == []


def test_a_layer_that_waits_is_found(ranks, data):
    results = ranks(2).run(train, arguments(data, 'zb-h1'), True)
    for rank, (waits, *_) in enumerate(results):
        named = {wait for wait in waits if not wait.endswith('in None')}
        asked = 'aten.is_nonzero.default', 'aten._local_scalar_dense.default'
        assert named and all(wait.startswith(asked) and f' in {rank}B' in wait for wait in named)
