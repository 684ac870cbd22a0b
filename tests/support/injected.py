"""The example's training with events in its gradients, and variants that it has no flags for."""

from __future__ import annotations

import functools
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from megatron_zbpp.post_validation.speculative_step import KEPT_BYTES

VALUES = {'inf': float('inf'), 'nan': float('nan'), 'large': 1e4}


@dataclass(frozen=True)
class Event:
    """Something in the gradients of one pipeline rank.

    Attributes:
        iteration: from 1.
        rank: in the pipeline.
        kind: of `VALUES`.
    """

    iteration: int
    rank: int
    kind: str


@dataclass(frozen=True)
class Early:
    """What post-validation did on a rank: steps tried, and taken back."""

    tried: int
    taken_back: int


def train(
    argv: list[str],
    metrics: Path,
    events: list[Event],
    clean_steps: int,
    variant: str,
    kept_bytes: int = KEPT_BYTES,
) -> Early | None:
    """Runs on each rank: the example's `train`.

    Args:
        argv: of the example.
        metrics: file for what it logs.
        events: to happen.
        clean_steps: before steps are tried; 0: they never are.
        variant: one of `_VARIANTS`, or empty.
        kept_bytes: of the optimizer's old state, that a speculative step keeps.
    """
    import pretrain_gpt
    from example import forget_groups

    import megatron_zbpp
    from megatron_zbpp.mcore.optimizer import early_steps

    argv = [*argv, '--no-check-for-nan-in-loss-and-grad']
    plugins = []
    enable = megatron_zbpp.enable

    def enabling(*args, **kwargs):
        plugins.append(enable(*args, **kwargs | {'post_validation': clean_steps or False}))
        if clean_steps:
            plugins[-1].post_validation.policy.tolerated = 1000  # it shall never step back
        return plugins[-1]

    with ExitStack() as stack:
        stack.callback(forget_groups)
        stack.enter_context(mock.patch.object(megatron_zbpp, 'enable', enabling))
        stack.enter_context(mock.patch.object(early_steps, 'most_kept', lambda *_: kept_bytes))
        finalize = _injecting(pretrain_gpt.finalize_model_grads, events)
        stack.enter_context(mock.patch.object(pretrain_gpt, 'finalize_model_grads', finalize))
        for name, replacement in _VARIANTS[variant](pretrain_gpt).items():
            stack.enter_context(mock.patch.object(pretrain_gpt, name, replacement))
        pretrain_gpt.train(pretrain_gpt.parse_args([*argv, '--metrics-file', str(metrics)]))
        done = plugins[-1].post_validation
        return done and Early(done.early, done.taken_back)


def _injecting(original, events):
    """Puts the events into gradients before they are reduced among replicas, so that all have
    them."""
    happens = {(event.iteration, event.rank): VALUES[event.kind] for event in events}
    iterations = []

    def finalize_model_grads(model, *args, **kwargs):
        from megatron.core import parallel_state

        iterations.append(None)
        rank = parallel_state.get_pipeline_model_parallel_rank()
        value = happens.get((len(iterations), rank))
        if value is not None:
            next(model[0].parameters()).main_grad.view(-1)[0] = value
        return original(model, *args, **kwargs)

    return finalize_model_grads


def _plain(script):
    return {}


def _sgd(script):
    return {'OptimizerConfig': _with(script.OptimizerConfig, optimizer='sgd', sgd_momentum=0.9)}


def _precise(script):
    """The optimizer keeps what is missing of bf16 weights, and moments in that type."""
    import torch

    types = {'exp_avg_dtype': torch.bfloat16, 'exp_avg_sq_dtype': torch.bfloat16}
    config = _with(script.OptimizerConfig, use_precision_aware_optimizer=True, **types)
    return {'OptimizerConfig': config}


def _half(script):
    """fp16 with a loss scale that moves within a few steps."""
    import torch

    half = {'fp16': True, 'bf16': False, 'params_dtype': torch.float16}
    scale = {'initial_loss_scale': 2.0**10, 'loss_scale_window': 3, 'hysteresis': 1}
    config = _with(script.TransformerConfig, **half, pipeline_dtype=torch.float16)
    return {
        'TransformerConfig': config,
        'OptimizerConfig': _with(script.OptimizerConfig, **half, **scale),
    }


def _experts(script):
    """Experts in every layer: dense parameters and those of experts have optimizers of their own,
    chained."""
    routed = {
        'num_moe_experts': 4,
        'moe_router_load_balancing_type': 'aux_loss',
        'moe_aux_loss_coeff': 0.1,
        'moe_router_topk': 2,
        'moe_router_enable_expert_bias': False,
        'add_bias_linear': False,
    }
    spec = functools.partial(script.get_gpt_layer_local_spec, num_experts=4)
    return {
        'TransformerConfig': _with(script.TransformerConfig, **routed),
        'get_gpt_layer_local_spec': spec,
    }


def _dropout(script):
    """Random masks: with their states of random generators."""
    return {'TransformerConfig': _with(script.TransformerConfig, hidden_dropout=0.1)}


def _with(config, **values):
    return lambda *args, **given: config(*args, **(given | values))


_VARIANTS = {
    '': _plain,
    'sgd': _sgd,
    'precise': _precise,
    'fp16': _half,
    'experts': _experts,
    'dropout': _dropout,
}
