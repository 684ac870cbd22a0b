"""Layers of Transformer Engine, split into B and W: gradients as from TE's own backward, to the bit.

TE's own modules: with their kernels on a GPU, with emulated ones elsewhere.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from example import forget_groups
from gpu import CUDA
from grids import grid

pytestmark = [pytest.mark.te, *([pytest.mark.gpu] if CUDA else [])]

HIDDEN, FFN, EXPERTS = 32, 48, 3
GATED = ('geglu', 'reglu', 'swiglu')
# rows that each expert gets of a microbatch; one gets none in one of them
TOKENS = ((8, 5, 3), (16, 0, 0), (4, 4, 8))
# in which order the W passes of three microbatches run; 'at once': their B has no W
ORDERS = {'in order': (0, 1, 2), 'out of order': (1, 2, 0), 'at once': (0, 1, 2)}


def te_options(config, bias):
    """Of TE's own modules, where Megatron's specs have none around them."""
    return {
        'bias': bias,
        'params_dtype': config.params_dtype,
        'fuse_wgrad_accumulation': config.gradient_accumulation_fusion,
        'delay_wgrad_compute': config.delay_wgrad_compute,
    }


def megatron_options(config, bias, is_expert=False):
    return {
        'config': config,
        'init_method': config.init_method,
        'bias': bias,
        'skip_bias_add': False,
        'is_expert': is_expert,
    }


def linear(config, bias, norm, activation):
    from transformer_engine.pytorch import Linear

    return Linear(HIDDEN, FFN, **te_options(config, bias))


def layer_norm_linear(config, bias, norm, activation):
    from transformer_engine.pytorch import LayerNormLinear

    return LayerNormLinear(HIDDEN, FFN, normalization=norm, **te_options(config, bias))


def layer_norm_mlp(config, bias, norm, activation):
    from transformer_engine.pytorch import LayerNormMLP

    chosen = {'normalization': norm, 'activation': activation}
    return LayerNormMLP(HIDDEN, FFN, **chosen, **te_options(config, bias))


def grouped_linear(config, bias, norm, activation):
    from transformer_engine.pytorch import GroupedLinear

    return GroupedLinear(EXPERTS, HIDDEN, FFN, **te_options(config, bias))


def te_column(config, bias, norm, activation):
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

    options = megatron_options(config, bias)
    return TEColumnParallelLinear(HIDDEN, FFN, gather_output=False, **options)


def te_row(config, bias, norm, activation):
    from megatron.core.extensions.transformer_engine import TERowParallelLinear

    options = megatron_options(config, bias)
    return TERowParallelLinear(HIDDEN, FFN, input_is_parallel=True, **options)


def te_layer_norm_column(config, bias, norm, activation):
    from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear

    options = megatron_options(config, bias)
    return TELayerNormColumnParallelLinear(HIDDEN, FFN, gather_output=False, **options)


def te_column_grouped(config, bias, norm, activation):
    from megatron.core.extensions.transformer_engine import TEColumnParallelGroupedLinear

    options = megatron_options(config, bias, is_expert=True)
    return TEColumnParallelGroupedLinear(EXPERTS, HIDDEN, FFN, **options)


def te_row_grouped(config, bias, norm, activation):
    from megatron.core.extensions.transformer_engine import TERowParallelGroupedLinear

    options = megatron_options(config, bias, is_expert=True)
    return TERowParallelGroupedLinear(EXPERTS, HIDDEN, FFN, **options)


LAYERS = {
    'Linear': linear,
    'LayerNormLinear': layer_norm_linear,
    'LayerNormMLP': layer_norm_mlp,
    'GroupedLinear': grouped_linear,
    'TEColumnParallelLinear': te_column,
    'TERowParallelLinear': te_row,
    'TELayerNormColumnParallelLinear': te_layer_norm_column,
    'TEColumnParallelGroupedLinear': te_column_grouped,
    'TERowParallelGroupedLinear': te_row_grouped,
}


def layer_config(dtype, norm, fused):
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        normalization=norm,
        params_dtype=torch.float32 if dtype == 'fp32' else torch.bfloat16,
        bf16=dtype != 'fp32',
    )
    config.gradient_accumulation_fusion = fused
    return config


def precision(dtype):
    """FP8 by TE's default recipe, or by that which TE has written in Python."""
    if 'fp8' not in dtype:
        return contextlib.nullcontext()
    from transformer_engine.pytorch import fp8_autocast

    return fp8_autocast(enabled=True, fp8_recipe=None if dtype == 'fp8' else reference_recipe())


def reference_recipe():
    """None where this TE has none."""
    from transformer_engine.common import recipe

    if not hasattr(recipe, 'CustomRecipe'):
        return None
    from transformer_engine.pytorch.custom_recipes.reference_current_scaling import (
        current_scaling_ref_factory,
    )

    return recipe.CustomRecipe(qfactory=current_scaling_ref_factory)


def has_reference_recipe():
    return reference_recipe() is not None


@contextlib.contextmanager
def uninitialized_is_nan():
    """Whoever reads memory that nobody has written finds NaN there."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def call(kind, model, x, microbatch):
    output = model(x, list(TOKENS[microbatch])) if 'Grouped' in kind else model(x)
    output, bias = output if isinstance(output, tuple) else (output, None)
    return output if bias is None else output + bias


def layer_gradients(split, order, kind, norm, activation, dtype, bias, fused, overlap):
    """Gradients of three microbatches through one layer in DistributedDataParallel.

    Args:
        split: whether the layer leaves its weight gradients.
        order: a key of ORDERS; without a split, that of the backwards.

    Returns:
        For each of two iterations those of the inputs, those of parameters by name after the last
        B, and at the end.
    """
    from megatron.core import tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    import megatron_zbpp
    from megatron_zbpp.mcore import te

    torch.manual_seed(1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = layer_config(dtype, norm, fused)
    if split:
        te.delay_weight_gradients(config)
    layer = LAYERS[kind](config, bias, norm, activation).cuda()
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=overlap)
    model = DistributedDataParallel(config, ddp, layer)
    store = megatron_zbpp.enable('zb-h1').store
    torch.manual_seed(2 + torch.distributed.get_rank())
    return [iteration(kind, model, store, split, order, dtype, config.params_dtype) for _ in '12']


def iteration(kind, model, store, split, order, dtype, params_dtype):
    """One global batch, as the executor runs it."""
    from megatron_zbpp.mcore import te

    model.zero_grad_buffer()
    for module in model.modules():
        if hasattr(module, 'is_first_microbatch'):  # as Megatron sets it; it asks for W in order
            module.is_first_microbatch = order != 'out of order'
    delaying = te.Delaying(model, store)
    assert bool(delaying.modules) == split
    defers = split and order != 'at once'
    inputs = [
        torch.randn(sum(TOKENS[k]), HIDDEN, dtype=params_dtype, device='cuda').requires_grad_()
        for k in range(3)
    ]
    outputs = []
    for k, x in enumerate(inputs):
        with store.scope((0, k) if defers else None), precision(dtype):
            outputs.append(call(kind, model, x, k))
    backwards = range(3) if split else ORDERS[order]
    for k in backwards:
        if defers:
            store.open((0, k))
        last = k == backwards[-1]
        with store.scope((0, k) if defers else None), accumulating(model, last):
            with delaying.queueing():
                outputs[k].float().square().mean().backward()
    before = grads(model)
    for k in ORDERS[order] if defers else ():
        with accumulating(model, k == ORDERS[order][-1]):
            store.run((0, k))
    assert not store.pending
    model.finish_grad_sync()
    return [x.grad.cpu() for x in inputs], before, grads(model)


def accumulating(model, last):
    return contextlib.nullcontext() if last else model.no_sync()


def grads(model):
    """By name; those of weights in fp32, where the optimizer reads them."""
    assert all(parameter.grad is None for parameter in model.parameters())
    return {
        name.rpartition('module.')[2]: parameter.main_grad.cpu().clone()
        for name, parameter in model.named_parameters()
    }


def compare(order, *case):
    """On each rank: what differs between TE's own backward and the split one."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    with uninitialized_is_nan():
        split = layer_gradients(True, order, *case)
        whole = layer_gradients(False, order, *case)
        in_order = layer_gradients(False, 'in order', *case)
    wrong = []
    for mine, theirs, norms in zip(split, whole, in_order, strict=True):
        if not all(map(torch.equal, mine[0], theirs[0])):
            wrong.append('gradient of the input')
        assert mine[2].keys() == theirs[2].keys()
        for name, gradient in mine[2].items():
            # norms' gradients come with B
            expected = (norms if 'layer_norm' in name else theirs)[2][name]
            assert expected.any(), name
            if not torch.equal(gradient, expected):
                wrong.append(name)
            waits = 'layer_norm' not in name and order != 'at once'
            if waits and 'bias' not in name and mine[1][name].any():
                wrong.append(f'{name} did not wait for W')
    return wrong


@pytest.fixture(scope='module')
def layer_ranks(te_ranks):
    """One rank a GPU, at most two, with Megatron's groups for all tests here."""
    chosen = te_ranks(min(torch.cuda.device_count(), 2) if CUDA else 2)
    yield chosen
    chosen.run(forget_groups)


def exists(kind, norm, activation, dtype, bias, fused, overlap, order):
    """Whether the case is another than one which is there."""
    if 'Norm' not in kind and norm != 'LayerNorm':
        return False
    if kind != 'LayerNormMLP' and activation != 'gelu':
        return False
    if dtype == 'fp8 reference':
        return kind in ('Linear', 'LayerNormLinear') and not fused
    return True


@grid(
    exists,
    kind=tuple(LAYERS),
    fused=(False, True),
    dtype=('bf16', 'fp32', 'fp8' if CUDA else 'fp8 reference'),
    bias=(True, False),
    overlap=(True, False),
    order=tuple(ORDERS),
    norm=('LayerNorm', 'RMSNorm'),
    activation=('gelu', 'swiglu', 'srelu', 'geglu', 'reglu', 'relu', 'qgelu'),
)
def test_gradients_to_the_bit(
    layer_ranks, kind, norm, activation, dtype, bias, fused, overlap, order
):
    if dtype == 'fp8' and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip('this GPU has no FP8')
    if dtype == 'fp8 reference' and not all(layer_ranks.run(has_reference_recipe)):
        pytest.skip('this Transformer Engine has no recipe in Python')
    case = order, kind, norm, activation, dtype, bias, fused, overlap
    assert not any(layer_ranks.run(compare, *case))
