"""TE's FusedAdam, Megatron's default where TE is: its own Python, also where steps come early."""

import pytest
import torch
from example import MODEL, logged
from gpu import CUDA
from grids import grid
from injected import Event, train
from supported import supports

from megatron_zbpp.post_validation.speculative_step import KEPT_BYTES

pytestmark = [
    pytest.mark.te,
    pytest.mark.skipif(CUDA, reason='test_te_models has it'),
]

ITERATIONS = 8
COMMON = ['--num-layers', 4, '--global-batch-size', 8, '--train-iters', ITERATIONS]
COMMON += ['--pipeline-model-parallel-size', 2, '--log-interval', 1000, '--clip-grad', 10]
# processes, schedule, flags, variant: see `injected`
SETUPS = {
    'fp32': (2, 'zb-h1', [], ''),
    'fp16': (2, 'zb-2p', ['--bf16'], 'fp16'),
    'distributed, V': (4, 'zb-v', ['--bf16', '--use-distributed-optimizer'], ''),
    'precision-aware': (4, 'zb-v', ['--bf16', '--use-distributed-optimizer'], 'precise'),
    'SGD': (2, 'zb-h1', [], 'sgd'),
}
HAPPENING = [Event(5, 1, 'large'), Event(6, 0, 'inf'), Event(8, 1, 'nan')]


def counted(*args, **metrics):
    """As `train`, and how often TE's kernels of optimizers were called."""
    from devtools.te import calls

    before = calls.copy()
    early = train(*args, **metrics)
    return early, dict(calls - before)


@supports("steps validated later: Transformer Engine's, {setup}", 'any+post-validation')
@grid(setup=tuple(SETUPS), kept_bytes=(KEPT_BYTES, 0))
def test_early_steps_are_synchronous_ones(te_ranks, data, setup, kept_bytes):
    """Clipping, overflow and nonsense included."""
    size, schedule, flags, variant = SETUPS[setup]
    argv = [*MODEL, *COMMON, '--pipeline-schedule', schedule, '--data-path', data, *flags]
    given = counted, list(map(str, argv)), HAPPENING
    later, found = (
        te_ranks(size).run(logged, *given, clean_steps, variant, kept_bytes)
        for clean_steps in (0, 1)
    )
    assert found[-1][1] == later[-1][1] and len(found[-1][1]) >= ITERATIONS
    early, called = zip(*(result for result, _ in found), strict=True)
    assert any(rank.tried for rank in early)
    own = {'SGD': 'multi_tensor_sgd', 'precision-aware': 'multi_tensor_adam_param_remainder'}
    stepping = own.get(setup, 'multi_tensor_adam')
    assert all({stepping, 'multi_tensor_l2norm'} <= names.keys() for names in called)


@pytest.mark.on_ranks(1)
@pytest.mark.usefixtures('te_ranks')
@pytest.mark.parametrize('master', [False, True], ids=['fp32', 'bf16'])
def test_steps_as_torch(master):
    """FusedAdam beside torch's AdamW, from one start."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    torch.manual_seed(1)
    dtype = torch.bfloat16 if master else torch.float32
    ours = [torch.nn.Parameter(torch.randn(3, 4).to(dtype)) for _ in '123']
    theirs = [torch.nn.Parameter(p.detach().float()) for p in ours]
    settings = {'lr': 1e-2, 'betas': (0.9, 0.99), 'weight_decay': 0.1}
    fused = FusedAdam(ours, **settings, master_weights=master)
    plain = torch.optim.AdamW(theirs, **settings)
    for _ in range(4):
        for mine, own in zip(ours, theirs, strict=True):
            mine.grad = torch.randn(3, 4).to(dtype)
            own.grad = mine.grad.float()
        fused.step()
        plain.step()
    for mine, own in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, own.to(dtype), rtol=1e-2 if master else 1e-5, atol=1e-6)
        for name in ('exp_avg', 'exp_avg_sq'):
            torch.testing.assert_close(fused.state[mine][name], plain.state[own][name])
