"""Whole models of Transformer Engine's layers: as by Megatron's own schedule, to the bit. FP8 on a
CPU: TE's own Python on emulated Float8 tensors, and on TE's own reference in Python. Optimizers of
TE, Megatron's default where TE is, also where steps come early."""

import contextlib

import pytest
import torch
from example import MODEL, logged
from gpu import CUDA, marks
from grids import grid
from injected import Event, train
from models import KINDS, Job, check
from nvidia import known_config
from rows import row, trains
from supported import absent, supports

from megatron_zbpp.post_validation.speculative_step import KEPT_BYTES

pytestmark = marks if CUDA else pytest.mark.te
on_cpu = pytest.mark.skipif(CUDA, reason='a GPU has kernels of its own')
SCHEDULES = ('zb-h1', 'zb-v', 'zb-2p+post-validation')
# longer pipelines; ranks that share tensors, experts, and the optimizer's state
SHAPES = {
    'pp 4': {'pp': 4},
    'tp 2': {'tp': 2},
    'overlap': {'dp': 2, 'overlap': True},
    'distributed': {'dp': 2, 'distributed': True},
    'ep 2': {'dp': 2, 'ep': 2, 'overlap': True, 'distributed': True},
}
# weight gradients are added to `main_grad` by the product or by Megatron, activations kept or
# computed anew
test_identical_to_megatron = trains(
    'GPT of {kind}, ',
    {},
    row(
        '{recompute}',
        SCHEDULES,
        **{'kind': tuple(KINDS), 'fused': (True, False, True, False, False)},
        bf16=(True, True, False, False, True),
        recompute=(None, 'full', 'selective', None, 'selective'),
    ),
    row(
        '{shape}',
        ('zb-2p+post-validation', 'zb-h1', 'zb-v', 'zb-2p+post-validation', 'zb-v'),
        lambda shape, kind, **_: shape != 'ep 2' or 'experts' in kind,
        **{'kind': ('MLA', 'SwiGLU', 'grouped experts', 'dense', 'experts'), 'shape': SHAPES},
        **{'bf16': True, 'fused': (False, True, True, False)},
    ),
    te=True,
)


@supports('GPT of grouped experts, dispatch overlapped with their weight gradients')
@grid(schedule=('1f1b', 'interleaved', '1f1b-v'), dp=(2, 1))
def test_dispatch_overlapped_with_weight_gradients(te_ranks, data, schedule, dp):
    """By Megatron's own hooks, in schedules that leave the backward whole."""
    if 'overlap_dispatch_backward_with_experts_wgrad' not in te_ranks(2).run(known_config)[0]:
        absent('from 0.18 on')
    check(te_ranks, data, schedule, Job('overlapped experts', bf16=True, fused=True, dp=dp, ep=dp))


def quantizer(**options):
    from transformer_engine.pytorch import float8_tensor  # noqa: F401  # of 2.8, too
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer
    from transformer_engine_torch import DType

    return Float8CurrentScalingQuantizer(DType.kFloat8E4M3, torch.device('cuda'), **options)


@on_cpu
@pytest.mark.on_ranks(1)
@pytest.mark.usefixtures('te_ranks')
def test_tensors():
    """What Float8 tensors are, by rows and by columns, made, written anew and viewed."""
    torch.manual_seed(1)
    x = torch.randn(4, 16, 32, dtype=torch.bfloat16)
    made = quantizer()(x)
    scale = (448 / x.float().abs().amax()).item()
    codes = (x.float() * scale).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(made._data, codes) and made._scale_inv.item() == pytest.approx(1 / scale)
    assert torch.equal(made._transpose, codes.movedim(-1, 0)) and not made._transpose_invalid
    torch.testing.assert_close(made.dequantize(), x, rtol=0.07, atol=0.02)
    assert torch.equal(made.view(64, 32).dequantize(), made.dequantize().view(64, 32))
    assert torch.equal(made.clone().dequantize(), made.dequantize())
    host = made.to('cpu', non_blocking=True)  # as checkpoints take them
    assert type(host) is type(made.cpu()) and torch.equal(host, made.cpu())
    rows = quantizer(columnwise=False)(x)
    assert rows._transpose is None and torch.equal(rows._data, codes)
    rows.update_usage(rowwise_usage=False, columnwise_usage=True)  # made from rows, then they go
    assert rows._data is None and torch.equal(
        rows._transpose.reshape(made._transpose.shape), codes.movedim(-1, 0)
    )
    empty = quantizer().make_empty(x.shape, dtype=torch.bfloat16)
    assert empty.shape == x.shape and empty.dtype is torch.bfloat16
    empty.copy_(x)
    assert torch.equal(empty.dequantize(), made.dequantize())
    before = empty._data
    empty.copy_(2 * x)
    assert empty._data is before, 'written in its place'
    torch.testing.assert_close(empty.dequantize(), 2 * made.dequantize())


def layer(name, recipe, split):
    """Output and gradients of a layer under a recipe; its weight gradients later, if split."""
    import transformer_engine.pytorch as te

    torch.manual_seed(1)
    made = getattr(te, name)(32, 48, params_dtype=torch.bfloat16, delay_wgrad_compute=split)
    x = torch.randn(16, 32, dtype=torch.bfloat16, requires_grad=True)
    with te.fp8_autocast(enabled=True, fp8_recipe=recipe) if recipe else contextlib.nullcontext():
        output = made(x)
    output.backward(torch.randn_like(output))
    if split:
        assert made.weight.grad is None
        made.backward_dw()
    return output.detach(), x.grad, *(p.grad for p in made.parameters())


def reference(name):
    """Whether TE's recipe in plain Python and our tensors make a layer's numbers alike."""
    from transformer_engine.common import recipe

    emulated = layer(name, recipe.Float8CurrentScaling(), False)
    plain = layer(name, None, False)
    assert not all(map(torch.equal, emulated, plain)), 'FP8 rounds'
    for ours, exact in zip(emulated, plain, strict=True):
        assert (ours - exact).norm() < 0.1 * exact.norm()
    try:
        from transformer_engine.pytorch.custom_recipes import reference_current_scaling
    except ImportError:  # this release has no such quantizers
        return False
    made = reference_current_scaling.current_scaling_ref_factory
    own = layer(name, recipe.CustomRecipe(qfactory=made), False)
    for ours, theirs in zip(emulated, own, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=1e-2)
    late = layer(name, recipe.CustomRecipe(qfactory=made), True)
    assert all(map(torch.equal, own, late))
    return True


@on_cpu
@pytest.mark.parametrize('name', ['Linear', 'LayerNormLinear'])
def test_reference_of_transformer_engine(te_ranks, request, name):
    known = te_ranks(1).run(reference, name) == [True]
    assert known == ('2.8.0' not in request.node.name)


test_fp8 = trains(
    '',
    {'bf16': True},
    row(
        '',
        ('zb-h1', 'zb-v', 'zb-2p+post-validation'),
        lambda fp8, distributed, **_: distributed or fp8 == 'products',
        **{'kind': ('dense', 'grouped experts', 'SwiGLU'), 'fp8': ('products', 'weights')},
        **{'distributed': (False, True), 'fused': (True, False)},
    ),
    te=True,
)


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


@pytest.mark.skipif(CUDA, reason='trainings above have it')
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
