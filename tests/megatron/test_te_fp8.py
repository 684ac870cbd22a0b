"""FP8 on a CPU: TE's own Python on emulated Float8 tensors, and on TE's own reference in Python."""

import contextlib

import pytest
import torch
from gpu import CUDA
from rows import row, trains

pytestmark = pytest.mark.te
on_cpu = pytest.mark.skipif(CUDA, reason='a GPU has kernels of its own')


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


def factory():
    """Of the reference's quantizers; None where this release has none."""
    try:
        from transformer_engine.pytorch.custom_recipes import reference_current_scaling
    except ImportError:
        return None
    return reference_current_scaling.current_scaling_ref_factory


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
    made = factory()
    if made is None:
        return False
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


test_models = trains(
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
