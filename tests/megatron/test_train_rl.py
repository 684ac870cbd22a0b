"""NVIDIA's train_rl.py, unedited: policy and reference score what was rolled out, then it trains.

What rolls out is Megatron's inference engine, which needs a GPU: fixed answers stand in for it, and
empty modules for packages that it serves them by.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from types import ModuleType
from unittest import mock

import bridge
import pytest
import torch
from grids import grid
from nvidia import CHECKOUT, run
from supported import supports
from test_launch import NO_CLIPPING
from test_launch_post_validation import EARLY
from test_other_scripts import script
from wheels import skip_oldest

pytestmark = [
    pytest.mark.te,
    pytest.mark.skipif(not CHECKOUT, reason='needs a checkout: MEGATRON_LM names it'),
]
FLAGS = """--perform-rl-step --grpo-prompts-per-step 3 --grpo-group-size 2 --grpo-iterations 2
    --global-batch-size 6 --train-iters 4 --lr 1e-2 --min-lr 1e-2 --grpo-kl-beta 0.1 --bf16
    --transformer-impl transformer_engine --calculate-per-token-loss
    --position-embedding-type rope""".split()
SERVING = ('datasets', 'fastapi', 'httpx', 'openai', 'tensorboard', 'uvicorn', 'wandb', 'yaml')


@contextlib.contextmanager
def rollouts(training: ModuleType) -> Iterator[list]:
    """Runs on each rank: answers come from here; reports what each model scored."""
    missing = [name for name in SERVING if importlib.util.find_spec(name) is None]
    finder = bridge.StandIns(missing, '9')
    sys.meta_path.append(finder)
    from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer
    from megatron.rl import rl_profiling, rl_utils

    known = inspect.signature(rl_utils.prepare_data_for_update).parameters
    # which the loop imports where the packages are there
    imports = {name: own for name, own in vars(rl_profiling).items() if not name.startswith('_')}
    imports = {name: own for name, own in imports.items() if not hasattr(training, name)}
    imports |= {'rl_utils': rl_utils, 'has_rl_utils': True}
    scored, score = [], rl_utils.compute_logprobs_batch

    def answers(*asked):
        groups = [[answer(rl_utils.TokenRollout, group, k) for k in range(2)] for group in range(3)]
        return (groups, {}) if 'request_ledger' in known else groups

    def compute_logprobs_batch(*args, **named):
        scored.append(found := score(*args, **named))
        return found

    try:
        with (
            mock.patch.object(rl_utils, 'get_environment_rollouts', answers),
            mock.patch.object(rl_utils, 'rl_inference_interface_shutdown', lambda: None),
            mock.patch.object(rl_utils, 'compute_logprobs_batch', compute_logprobs_batch),
            mock.patch.multiple(training, **imports, create=True),
            mock.patch.object(NullTokenizer, 'bos_id', None, create=True),
            mock.patch.object(NullTokenizer, 'pad_id', 0),
            # the reference is a copy, as it is of weights on a GPU
            mock.patch.object(torch.Tensor, 'cpu', torch.Tensor.clone),
        ):
            yield scored
    finally:
        sys.meta_path.remove(finder)
        for name in [*sys.modules]:
            own = name.startswith(('megatron.rl', 'torch.utils.tensorboard'))
            if own or name.split('.')[0] in missing:
                del sys.modules[name]
        scored[:] = [[value.hex() for value in each.flatten().tolist()] for each in scored]


def answer(made: type, group: int, k: int):
    """An answer to the prompt of `group`, of another length each."""
    from megatron.training.global_vars import get_tokenizer

    prompt, told = 3 + group, 4 + group + k
    fields = {
        'trajectory': [[*range(10 * k + 1, 10 * k + prompt + told), get_tokenizer().eod]],
        'reward': float(k + group % 2),
        'generation_mask': [[False] * prompt + [True] * told],
        'logprobs': [[-1.0] * told],
        'env_id': 'own',
        'policy_epoch': [[(0, 0)]],
        'kv_cache_epoch': [[(0, 0)]],
        'num_evictions': [0],
    }
    return made(**{name: value for name, value in fields.items() if name in made.model_fields})


@supports('`train_rl.py` with given answers')
@grid(schedule=('zb-h1', 'zb-h1+post-validation', '1f1b'))
def test_identical_to_megatron(request, te_ranks, tmp_path, schedule):
    """Log probabilities of policy and reference, losses and weights."""
    skip_oldest(request, 'has no attention to packed sequences without a GPU')
    name, _, early = schedule.partition('+')
    path = script('train_rl.py')
    flags = [*FLAGS, *NO_CLIPPING, '--pipeline-model-parallel-size', 2]
    stock = run(te_ranks(2), *flags, event=rollouts, script=path)
    ours = run(
        te_ranks(2), *flags, '--pipeline-schedule', name, *(EARLY if early else ()),
        event=rollouts, script=path,
    )  # fmt: skip
    assert len(stock.losses) == 4
    assert len(set(stock.losses.values())) == 3  # the first step has a rate of 0
    (policy, reference, later, again), _ = stock.reported
    assert policy == reference == again != later
    assert ours == stock
