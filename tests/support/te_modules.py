"""Modules of Transformer Engine, and Megatron's around them, as tests make them."""

import contextlib

import torch

HIDDEN, FFN, EXPERTS = 32, 48, 3


# modules of TE (None), and Megatron's around them with their own options
KINDS = {
    'LayerNormMLP': None,
    'Linear': None,
    'TEColumnParallelLinear': {'gather_output': False},
    'GroupedLinear': None,
    'TEColumnParallelGroupedLinear': {},
    'TERowParallelLinear': {'input_is_parallel': True},
    'TERowParallelGroupedLinear': {},
    'LayerNormLinear': None,
    'TELayerNormColumnParallelLinear': {'gather_output': False},
}
NORMS = ('LayerNorm', 'RMSNorm')
ACTIVATIONS = ('gelu', 'swiglu', 'srelu', 'geglu', 'reglu', 'relu', 'qgelu')
# kind, then norm and activation where it has them
LAYERS = (
    *(f'LayerNormMLP {norm} {activation}' for norm in NORMS for activation in ACTIVATIONS),
    *(kind for kind in KINDS if 'Norm' not in kind),
    *(
        f'{kind} {norm}'
        for kind in KINDS
        if kind.endswith('Linear') and 'Norm' in kind
        for norm in NORMS
    ),
)
SETTINGS = ('plain', 'bias', 'fused', 'fused bias')


def module_of(kind, config, bias, activation=None):
    """One module of a kind; of TE's own with the options that Megatron's would give it."""
    sizes = (EXPERTS, HIDDEN, FFN) if 'Grouped' in kind else (HIDDEN, FFN)
    if KINDS[kind] is not None:
        from megatron.core.extensions import transformer_engine as megatrons

        return getattr(megatrons, kind)(
            *sizes,
            config=config,
            init_method=config.init_method,
            bias=bias,
            skip_bias_add=False,
            is_expert='Grouped' in kind,
            **KINDS[kind],
        )
    from transformer_engine import pytorch

    own = {'normalization': config.normalization} if 'Norm' in kind else {}
    own |= {'activation': activation} if activation else {}
    return getattr(pytorch, kind)(
        *sizes,
        bias=bias,
        params_dtype=config.params_dtype,
        fuse_wgrad_accumulation=config.gradient_accumulation_fusion,
        delay_wgrad_compute=config.delay_wgrad_compute,
        **own,
    )


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
    if not dtype.startswith('fp8'):
        return contextlib.nullcontext()
    from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
    from transformer_engine.pytorch import fp8_autocast

    recipe = DelayedScaling(reduce_amax=False) if 'delayed' in dtype else Float8CurrentScaling()
    return fp8_autocast(enabled=True, fp8_recipe=recipe)
