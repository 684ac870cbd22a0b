"""The example's training with events in its gradients, and variants that it has no flags for."""

import functools
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from unittest import mock

import torch
from events import before
from models import KINDS, with_fields

from megatron_zbpp.post_validation.speculative_step import KEPT_BYTES

VALUES = {'inf': float('inf'), 'nan': float('nan'), 'large': 1e4}


@dataclass(frozen=True)
class Event:
    iteration: int  # from 1
    rank: int  # in the pipeline
    kind: str  # of `VALUES`


@dataclass(frozen=True)
class Early:
    """What post-validation did on a rank: steps tried, and taken back."""

    tried: int
    taken_back: int


def train(
    argv: list[str],
    events: list[Event],
    clean_steps: int,
    variant: str,
    kept_bytes: int = KEPT_BYTES,
    *,
    metrics: Path,
) -> Early | None:
    """Runs on each rank: the example's `train` with events, in one of `_VARIANTS`.

    Steps are tried after so many clean ones (0: never), and keep so much of the optimizer's state.
    """
    import pretrain_gpt
    from megatron.core import parallel_state

    from megatron_zbpp.mcore.optimizer import early_steps

    def enabled(plugin):
        if clean_steps:
            plugin.post_validation.policy.tolerated = 1000  # it shall never step back

    happens = {(event.iteration, event.rank): VALUES[event.kind] for event in events}
    iterations = count(1)

    def inject(model, *_, **__):
        """Before gradients are reduced among replicas, so that all have the event."""
        rank = parallel_state.get_pipeline_model_parallel_rank()
        value = happens.get((next(iterations), rank))
        if value is not None:
            next(model[0].parameters()).main_grad.view(-1)[0] = value

    injected = pretrain_gpt, 'finalize_model_grads', inject
    with mock.patch.object(early_steps, 'most_kept', lambda *_: kept_bytes), before(injected):
        argv = [*argv, '--no-check-for-nan-in-loss-and-grad']
        plugin = run(argv, clean_steps or False, variant, {}, metrics, enabled)[-1]
    done = plugin.post_validation
    return done and Early(done.early, done.taken_back)


def run(argv, post_validation, variant, replaced, metrics, enabled=lambda plugin: None):
    """Train the example with a variant, and with functions replaced; return the plugins."""
    import pretrain_gpt
    from example import forget_groups

    import megatron_zbpp

    plugins, enable = [], megatron_zbpp.enable

    def enabling(*args, **kwargs):
        plugins.append(enable(*args, **kwargs | {'post_validation': post_validation}))
        enabled(plugins[-1])
        return plugins[-1]

    with ExitStack() as stack:
        stack.callback(forget_groups)
        stack.enter_context(mock.patch.object(megatron_zbpp, 'enable', enabling))
        for name, replacement in {**_VARIANTS[variant](pretrain_gpt), **replaced}.items():
            stack.enter_context(mock.patch.object(pretrain_gpt, name, replacement))
        pretrain_gpt.train(pretrain_gpt.parse_args([*argv, '--metrics-file', str(metrics)]))
        return plugins


# the optimizer keeps what is missing of bf16 weights, and moments in that type
_PRECISE = {'use_precision_aware_optimizer': True}
_PRECISE |= dict.fromkeys(('exp_avg_dtype', 'exp_avg_sq_dtype'), torch.bfloat16)
_HALF = {'fp16': True, 'bf16': False, 'params_dtype': torch.float16}


def _experts(script):
    """Experts in every layer: dense parameters and those of experts have optimizers of their own,
    chained."""
    routed = KINDS['experts'] | {'moe_aux_loss_coeff': 0.1}
    spec = functools.partial(script.get_gpt_layer_local_spec, num_experts=4)
    return _config(script, **routed) | {'get_gpt_layer_local_spec': spec}


def _config(script, of='Transformer', **values):
    name = f'{of}Config'
    return {name: with_fields(getattr(script, name), **values)}


_SCALE = {'initial_loss_scale': 2.0**10, 'loss_scale_window': 3, 'hysteresis': 1}
_VARIANTS = {
    '': lambda script: {},
    'sgd': lambda script: _config(script, 'Optimizer', optimizer='sgd', sgd_momentum=0.9),
    'precise': lambda script: _config(script, 'Optimizer', **_PRECISE),
    # a loss scale that moves within a few steps
    'fp16': lambda script: (
        _config(script, **_HALF, pipeline_dtype=torch.float16)
        | _config(script, 'Optimizer', **_HALF, **_SCALE)
    ),
    'experts': _experts,
    # random masks: with their states of random generators
    'dropout': lambda script: _config(script, hidden_dropout=0.1),
}
