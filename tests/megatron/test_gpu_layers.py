"""A layer's W pass on a GPU: Megatron's fused kernel, Transformer Engine's modules."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from example import forget_groups
from gpu import marks, needs_te

pytestmark = marks
needs_apex = pytest.mark.skipif(
    importlib.util.find_spec('fused_weight_gradient_mlp_cuda') is None,
    reason='needs apex, built with --cuda_ext',
)


def layer_gradients(kind, split, setting):
    """Gradients of three microbatches through one layer in DistributedDataParallel, on CUDA.

    Args:
        kind: a key of LAYERS.
        split: whether W is a pass of its own.
        setting: of SETTINGS.
    """
    import contextlib

    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    import megatron_zbpp
    from megatron_zbpp.mcore import te

    parallel_state.initialize_model_parallel()
    torch.manual_seed(1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    try:
        config = layer_config(setting)
        plugin = megatron_zbpp.enable('zb-h1')
        if split and kind.startswith('TE'):
            te.delay_weight_gradients(config)
        layer = LAYERS[kind](config, setting == 'bias').cuda()
        model = DistributedDataParallel(
            config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), layer
        )
        modules, store = te.delaying_modules(model), plugin.store
        assert bool(modules) == (split and kind.startswith('TE'))
        torch.manual_seed(2)
        inputs = [torch.randn(32, 2, 64, device='cuda', dtype=config.params_dtype) for _ in '123']
        received = []
        with model.no_sync():
            for k, x in enumerate(inputs):
                x.requires_grad_()
                store.open((0, k))
                with store.scope((0, k) if split else None), precision(setting):
                    output = call(kind, model, x)
                    with te.queueing(modules, store) if split else contextlib.nullcontext():
                        output.float().square().mean().backward()
                received.append(x.grad.cpu())
            before = grads(layer)
            for k in range(3):
                store.run((0, k))
        assert not store.pending
        return received, before, grads(layer)
    finally:
        forget_groups()


def layer_config(setting):
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=1,
        hidden_size=64,
        ffn_hidden_size=128,
        num_attention_heads=4,
        bf16=True,
        params_dtype=torch.bfloat16,
        gradient_accumulation_fusion=setting == 'fused',
    )


def precision(setting):
    import contextlib

    if setting != 'fp8':
        return contextlib.nullcontext()
    from transformer_engine.pytorch import fp8_autocast

    return fp8_autocast(enabled=True)


def call(kind, model, x):
    output = model(x, [32, 32]) if kind == 'TE GroupedLinear' else model(x)
    output, bias = output if isinstance(output, tuple) else (output, None)
    return output if bias is None else output + bias


def grads(layer):
    """By name; those of weights in fp32, where the optimizer reads them."""
    return {name: p.main_grad.cpu().clone() for name, p in layer.named_parameters()}


def linear_options(config, bias):
    return {'config': config, 'init_method': config.init_method, 'bias': bias}


def megatron_linear(config, bias):
    from megatron.core.tensor_parallel import ColumnParallelLinear

    return ColumnParallelLinear(64, 128, **linear_options(config, bias))


def te_column(config, bias):
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

    options = linear_options(config, bias) | {'gather_output': False, 'skip_bias_add': False}
    return TEColumnParallelLinear(64, 128, is_expert=False, **options)


def te_layer_norm_linear(config, bias):
    from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear

    options = linear_options(config, bias) | {'gather_output': False, 'skip_bias_add': False}
    return TELayerNormColumnParallelLinear(64, 128, is_expert=False, **options)


def te_options(config, bias):
    """Of TE's own modules, where Megatron's specs have none around them."""
    return {
        'bias': bias,
        'params_dtype': config.params_dtype,
        'fuse_wgrad_accumulation': config.gradient_accumulation_fusion,
        'delay_wgrad_compute': config.delay_wgrad_compute,
    }


def te_layer_norm_mlp(config, bias):
    """Not a layer of Megatron's specs; TE's own, as users build it."""
    from transformer_engine.pytorch import LayerNormMLP

    return LayerNormMLP(64, 128, **te_options(config, bias))


def te_grouped(config, bias):
    """Two experts' products in one; `tokens` says how many rows each gets."""
    from transformer_engine.pytorch import GroupedLinear

    return GroupedLinear(2, 64, 128, **te_options(config, bias))


LAYERS = {
    'Megatron': megatron_linear,
    'TE Linear': te_column,
    'TE LayerNormLinear': te_layer_norm_linear,
    'TE LayerNormMLP': te_layer_norm_mlp,
    'TE GroupedLinear': te_grouped,
}
TE_LAYERS = [kind for kind in LAYERS if kind.startswith('TE')]


def check_layer(ranks, kind, setting):
    fused = ranks(1).run(layer_gradients, kind, False, setting)[0]
    split = ranks(1).run(layer_gradients, kind, True, setting)[0]
    for whole, own in zip(fused[0], split[0], strict=True):
        assert torch.equal(whole, own), 'gradient of the input'
    assert fused[2].keys() == split[2].keys()
    for name, gradient in fused[2].items():
        assert gradient.any(), name
        assert torch.equal(gradient, split[2][name]), name
    waiting = [name for name, gradient in split[1].items() if not gradient.any()]
    assert waiting, 'weight gradients waited for W'


@pytest.mark.parametrize('setting', ['plain', 'bias'])
def test_local_layer(ranks, setting):
    check_layer(ranks, 'Megatron', setting)


@needs_apex
def test_local_layer_with_the_fused_kernel(ranks):
    check_layer(ranks, 'Megatron', 'fused')


@needs_te
@pytest.mark.parametrize('setting', ['plain', 'bias', 'fused', 'fp8'])
@pytest.mark.parametrize('kind', TE_LAYERS)
def test_te_layer(ranks, kind, setting):
    if setting == 'fp8' and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip('this GPU has no FP8')
    check_layer(ranks, kind, setting)
