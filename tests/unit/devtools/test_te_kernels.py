"""Kernels that stand in for Transformer Engine's extension, against torch's own operators."""

import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import grad

from devtools.te import extension, quantization
from devtools.te.activation import ACTIVATIONS
from devtools.te.extension import KERNELS, Extension, calls
from megatron_zbpp.emulation import cpu, te

TEX = Extension()
NO_FLAG = torch.zeros(1, dtype=torch.int32)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(5)
    NO_FLAG.zero_()


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype)


def gemm(a, transa, b, transb, out=None, bias=None, with_grad=False, accumulate=False, dtype=None):
    rest = (False, None, with_grad, torch.empty(1), 1, accumulate, False)
    args = (a, transa, b, transb, out, None, dtype, bias, None)
    return TEX.generic_gemm(*args, *rest)[:2]


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_products_of_a_linear_layer(dtype):
    """As TE calls them, for the output, the input's gradient, and the weight's with the bias's."""
    x, w, b = randn(2, 3, 4, dtype=dtype), randn(5, 4, dtype=dtype), randn(5, dtype=dtype)
    x, w, b = (t.requires_grad_() for t in (x, w, b))
    y = F.linear(x.float(), w.float(), b.float()).to(dtype)
    dy = torch.randn_like(y)
    expected = grad(y, (x, w, b), dy)
    number = {torch.float32: extension.DType.kFloat32, torch.bfloat16: extension.DType.kBFloat16}
    torch.testing.assert_close(gemm(w, True, x, False, bias=b, dtype=number[dtype])[0], y)
    torch.testing.assert_close(gemm(w, False, dy, False)[0], expected[0])
    main = torch.ones(5, 4)
    flat = (t.detach().view(6, -1) for t in (x, dy))
    dw, db = gemm(next(flat), False, next(flat), True, main, b, with_grad=True, accumulate=True)
    assert dw is main
    torch.testing.assert_close(dw - 1, expected[1].float(), rtol=1e-2, atol=3e-2)
    torch.testing.assert_close(db, expected[2])


@pytest.mark.parametrize('single', [True, False], ids=['one below the other', 'apart'])
def test_grouped_products(single):
    splits, w = [2, 0, 3], [randn(5, 4) for _ in range(3)]
    x, bias = randn(5, 4), [randn(5) for _ in range(3)]
    out = [torch.empty(5, 5)] if single else [torch.empty(n, 5) for n in splits]
    rest = (None, single, [], False, [torch.empty(1)], 1, False, False, 0)
    TEX.te_general_grouped_gemm(*(w, True, x.split(splits), False, out, None, splits, bias, *rest))
    expected = [F.linear(part, *wb) for part, *wb in zip(x.split(splits), w, bias, strict=True)]
    torch.testing.assert_close(torch.cat(out), torch.cat(expected))


def test_grouped_weight_gradients():
    splits, x, dy = [2, 0, 3], randn(5, 4), randn(5, 6)
    main, biases = [torch.ones(6, 4) for _ in splits], [torch.empty(6) for _ in splits]
    parts = x.split(splits), False, dy.split(splits), True
    rest = (None, False, [], True, [torch.empty(1)], 1, True, False, 0)
    made = TEX.te_general_grouped_gemm(*parts, main, None, splits, biases, *rest)
    for part, g, total, bias in zip(x.split(splits), dy.split(splits), main, made, strict=True):
        torch.testing.assert_close(total, 1 + g.t() @ part)
        torch.testing.assert_close(bias, g.sum(0))


@pytest.mark.parametrize('zero_centered', [False, True])
@pytest.mark.parametrize('kind', ['layernorm', 'rmsnorm'])
def test_norms(kind, zero_centered):
    x, gamma, beta = (t.requires_grad_() for t in (randn(3, 8), randn(8), randn(8)))
    scale = gamma + 1 if zero_centered else gamma
    tail = (0, zero_centered)
    if kind == 'layernorm':
        y = F.layer_norm(x, (8,), scale, beta, 1e-5)
        out, *saved = TEX.layernorm_fwd(x, gamma, beta, 1e-5, None, None, None, *tail)
        inputs = (x, gamma, beta)
    else:
        y = F.rms_norm(x, (8,), scale, 1e-5)
        out, _, *saved = TEX.rmsnorm_fwd(x, gamma, 1e-5, torch.empty(3, 8), None, None, *tail)
        inputs = (x, gamma)
    torch.testing.assert_close(out, y.detach())
    dz = torch.randn_like(y)
    found = KERNELS[f'{kind}_bwd'](dz, x, *saved, gamma, *tail)
    torch.testing.assert_close(found, grad(y, inputs, dz))


@pytest.mark.parametrize('name', ACTIVATIONS)
def test_activations(name):
    x = randn(3, 8).requires_grad_()
    y = ACTIVATIONS[name](x)
    dy = torch.randn_like(y)
    (expected,) = grad(y, x, dy)
    assert torch.equal(KERNELS[name](x, None), y)
    assert torch.equal(KERNELS[f'd{name}'](dy, x, None), expected)
    bias, found = KERNELS[f'dbias_d{name}'](dy, x, None)
    assert torch.equal(found, expected) and torch.equal(bias, expected.sum(0))


def test_gates_are_the_first_half():
    gate, value = torch.tensor([[2.0]]), torch.tensor([[3.0]])
    assert TEX.reglu(torch.cat([gate, value], -1), None).item() == 6
    assert TEX.reglu(torch.cat([-gate, value], -1), None).item() == 0


@pytest.mark.parametrize('queries', [4, 2])
def test_softmax(queries):
    x, keys = randn(2, queries, 4).requires_grad_(), 4
    shifted = torch.ones(queries, keys, dtype=torch.bool).triu(1 + keys - queries)
    for name, y, more in (
        ('scaled', (0.5 * x).softmax(-1), ()),
        ('scaled_masked', (0.5 * x).masked_fill(shifted, -1e4).softmax(-1), (shifted,)),
        ('scaled_aligned_causal_masked', (0.5 * x).masked_fill(shifted, -1e9).softmax(-1), ()),
    ):
        out = KERNELS[f'{name}_softmax_forward'](x, *more, 0.5)
        torch.testing.assert_close(out, y.detach())
        dy = torch.randn_like(y)
        (expected,) = grad(y, x, dy)
        torch.testing.assert_close(KERNELS[f'{name}_softmax_backward'](dy, out, 0.5), expected)


ADAM = (1e-2, 0.9, 0.99, 1e-8)  # learning rate, betas, epsilon


@pytest.mark.parametrize('mode', [0, 1], ids=['L2', 'AdamW'])
def test_adam(mode):
    theirs = [randn(3, 4), randn(5)]
    ours = [p.clone() for p in theirs]
    moments = [[torch.zeros_like(p) for p in theirs] for _ in range(2)]
    kind = (torch.optim.Adam, torch.optim.AdamW)[mode]
    optimizer = kind(theirs, ADAM[0], ADAM[1:3], ADAM[3], weight_decay=0.1)
    for step in (1, 2, 3):
        for p in theirs:
            p.grad = torch.randn_like(p)
        optimizer.step()
        lists = [[p.grad for p in theirs], ours, *moments]
        TEX.multi_tensor_adam(1, NO_FLAG, lists, *ADAM, step, mode, 1, 0.1)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def adam_states(parameter):
    return [[randn(*parameter.shape).abs()] for _ in range(2)]


def test_adam_of_every_kind_steps_alike():
    """With parameters in fp32 beside, or their lower halves, or with numbers on the device."""
    main = randn(64)
    parameter, gradient, states = main.bfloat16(), randn(64).bfloat16(), adam_states(main)
    settings = (*ADAM, 3, 1, 1, 0.1)

    def stepped(name, parameter, more, settings):
        own = [[t.clone() for t in part] for part in states]
        lists = [[gradient.clone()], [parameter], *own, *more]
        KERNELS[name](1, NO_FLAG, lists, *settings)
        return own

    expected, low = main.clone(), parameter.clone()
    state = stepped('multi_tensor_adam', low, [[expected]], settings)
    assert not torch.equal(expected, main) and torch.equal(low, expected.bfloat16())

    bits = main.view(torch.int32)
    remainder = ((bits << 16) >> 16).to(torch.int16)
    high = ((bits >> 16) + (remainder < 0).int()).to(torch.int16).view(torch.bfloat16)
    half = stepped('multi_tensor_adam_param_remainder', high, [[remainder]], settings)
    upper = high.view(torch.int16).int() - (remainder < 0).int()
    assert torch.equal((upper << 16) | (remainder.int() & 0xFFFF), expected.view(torch.int32))

    own, copy = main.clone(), parameter.clone()
    on_device = (torch.tensor(ADAM[0], dtype=torch.float64), *ADAM[1:], torch.tensor(3))
    settings = (*on_device, 1, 1, 0.1, torch.ones(1))
    captured = stepped('multi_tensor_adam_capturable_master', copy, [[own]], settings)
    assert torch.equal(own, expected) and torch.equal(copy, low)
    for (first,), (second,), (third,) in zip(state, half, captured, strict=True):
        assert torch.equal(first, second) and torch.equal(first, third)


def test_captured_adam_scales_gradients_and_stops_at_overflow():
    parameter, gradient = randn(4), torch.full((4,), 8.0)
    lists = [[gradient], [parameter], *adam_states(parameter)]
    rest = (torch.tensor(1e-2), *ADAM[1:], torch.tensor(1), 1, 1, 0.1, torch.tensor(0.25))
    before = parameter.clone()
    TEX.multi_tensor_adam_capturable(1, torch.ones(1, dtype=torch.int32), lists, *rest)
    assert torch.equal(parameter, before) and gradient[0] == 8
    TEX.multi_tensor_adam_capturable(1, NO_FLAG, lists, *rest)
    assert not torch.equal(parameter, before) and gradient[0] == 2


def test_adam_of_fp8_parameters():
    main, gradient, scale = randn(16), randn(16), torch.tensor([64.0])
    states, expected = adam_states(main), main.clone()
    alike = [[t.clone() for t in part] for part in states]
    settings = (*ADAM, 3, 1, 1, 0.1)
    TEX.multi_tensor_adam(1, NO_FLAG, [[gradient], [expected], *alike], *settings)
    codes, amax, inverse = torch.empty(16, dtype=torch.uint8), torch.zeros(1), torch.empty(1)
    lists = [[gradient], [codes], *states, [main], [scale], [amax], [inverse]]
    TEX.multi_tensor_adam_fp8(1, NO_FLAG, lists, *settings, extension.DType.kFloat8E4M3)
    assert torch.equal(main, expected) and amax == expected.abs().max() and inverse == 1 / 64
    values = codes.view(torch.float8_e4m3fn).float() / 64
    torch.testing.assert_close(values, expected, rtol=0.07, atol=1e-3)


@pytest.mark.parametrize(
    ('momentum', 'dampening', 'nesterov'), [(0, 0, False), (0.9, 0.1, False), (0.9, 0, True)]
)
def test_sgd(momentum, dampening, nesterov):
    theirs = [randn(3, 4), randn(5)]
    ours = [p.clone() for p in theirs]
    copies = [p.bfloat16() for p in theirs]
    velocities = [torch.full_like(p, float('nan')) for p in theirs]
    optimizer = torch.optim.SGD(theirs, 0.1, momentum, dampening, 0.01, nesterov)
    for step in range(3):
        for p in theirs:
            p.grad = torch.randn_like(p)
        optimizer.step()
        lists = [[2 * p.grad for p in theirs], ours, velocities, copies]
        settings = (0.01, momentum, dampening, 0.1, nesterov, step == 0, False, 0.5)
        TEX.multi_tensor_sgd(1, NO_FLAG, lists, *settings)
    torch.testing.assert_close(ours, theirs)
    assert all(torch.equal(c, p.bfloat16()) for c, p in zip(copies, ours, strict=True))


def test_norms_of_lists():
    tensors = [randn(3, 4).bfloat16(), randn(5)]
    expected = torch.stack([t.float().norm() for t in tensors])
    total, each = TEX.multi_tensor_l2norm(1, NO_FLAG, [tensors], True)
    torch.testing.assert_close(each, expected)
    torch.testing.assert_close(total, expected.norm().view(1))
    half, none = TEX.multi_tensor_unscale_l2norm(1, NO_FLAG, [tensors], torch.tensor(0.5))
    torch.testing.assert_close(half, total / 2)
    assert not none.numel()


@pytest.mark.parametrize('name', ['multi_tensor_scale', 'multi_tensor_scale_tensor'])
def test_scaling_tells_of_what_is_not_finite(name):
    source, target = [randn(3), randn(2)], [torch.empty(3), torch.empty(2).bfloat16()]
    KERNELS[name](1, NO_FLAG, [source, target], torch.tensor(0.5))
    assert torch.equal(target[0], source[0] / 2) and not NO_FLAG.item()
    assert torch.equal(target[1], (source[1] / 2).bfloat16())
    source[1][0] = float('nan')
    KERNELS[name](1, NO_FLAG, [source, target], torch.tensor(0.5))
    assert NO_FLAG.item()


@pytest.mark.parametrize(
    ('amax', 'options', 'scale'),
    [
        (7.0, {}, 64.0), (0.0, {}, 1.0), (float('inf'), {}, 1.0), (float('nan'), {}, 1.0),
        (0.25, {'epsilon': 3.5}, 128.0), (5.0, {'power_of_2': True}, 64.0),
        (1e-44, {}, torch.finfo(torch.float32).max),
    ],
)  # fmt: skip
def test_scales(amax, options, scale):
    assert quantization.scale_of(torch.tensor(amax), 448.0, **options).item() == scale
    scales, inverses = [torch.empty(1)], [torch.empty(1)]
    flags = (options.get('power_of_2', False), options.get('epsilon', 0.0))
    lists = [[torch.tensor([amax])], scales, inverses]
    TEX.multi_tensor_compute_scale_and_scale_inv(1, NO_FLAG, lists, 448.0, *flags)
    assert scales[0].item() == scale and inverses[0] == 1 / scales[0]


def test_codes():
    codes = quantization.encode(
        torch.tensor([1e9, -1e9, 1.5]), torch.tensor(1.0), torch.float8_e5m2
    )
    assert codes.view(torch.float8_e5m2).float().tolist() == [57344, -57344, 1.5]
    codes = torch.arange(24, dtype=torch.uint8).view(2, 3, 4)
    moved = TEX.fp8_transpose(codes, None, out=None)
    assert moved.shape == (4, 2, 3)
    out = torch.empty(4, 6, dtype=torch.uint8)
    assert TEX.fp8_transpose(codes, None, out=out) is out and torch.equal(out, codes.view(6, 4).t())


def test_padding_and_packed_sequences():
    x, out, back = randn(5, 4), torch.full((12, 4), float('nan')), torch.empty(5, 4)
    TEX.fused_multi_row_padding(x, out, [2, 0, 3], [4, 4, 4])
    assert torch.equal(out[:2], x[:2]) and torch.equal(out[8:11], x[2:])
    assert not out[2:8].any() and not out[11].any()
    TEX.fused_multi_row_unpadding(out, back, [4, 4, 4], [2, 0, 3])
    assert torch.equal(back, x)
    x, ends = randn(5, 2, 3), torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    batch = TEX.convert_thd_to_bshd(x, ends, 3, 4)
    assert torch.equal(batch[0, :2], x[:2]) and torch.equal(batch[2, :3], x[2:])
    assert not batch[0, 2:].any() and not batch[1].any() and not batch[2, 3:].any()
    assert torch.equal(TEX.convert_bshd_to_thd(batch, ends, 5), x)


def test_what_is_missing_says_so():
    assert TEX.CommOverlapType.RS != TEX.CommOverlapType.AG
    before = calls['get_num_cublas_streams']
    assert TEX.get_num_cublas_streams() and calls['get_num_cublas_streams'] == before + 1
    for missing in (TEX.fused_rope_forward, TEX.CommOverlapHelper):
        with pytest.raises(NotImplementedError, match=missing.__name__):
            missing()


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_fused_accumulation(dtype):
    x, dy, main = randn(6, 4).bfloat16(), randn(6, 5).bfloat16(), torch.ones(5, 4, dtype=dtype)
    add = {torch.float32: cpu.wgrad_gemm_accum_fp32}.get(dtype, cpu.wgrad_gemm_accum_fp16)
    add(x, dy, main)
    torch.testing.assert_close(main, (1 + dy.t().float() @ x.float()).to(dtype))


# ---- The package loads the emulated kernels of its own checkout, or says why it cannot.


def test_another_package_of_the_name(monkeypatch, tmp_path):
    """One of the name is on PyPI."""
    other = types.ModuleType('devtools')
    other.__file__ = '/site-packages/devtools/__init__.py'
    monkeypatch.setitem(sys.modules, 'devtools', other)
    (tmp_path / 'transformer_engine').mkdir()
    with pytest.raises(ImportError, match='devtools is imported from /site-packages/devtools/__'):
        te.install(tmp_path)
    assert not te.installed()


def test_no_folder_of_transformer_engine(tmp_path):
    with pytest.raises(ModuleNotFoundError, match=f'no transformer_engine in {tmp_path}: pip inst'):
        te.install(tmp_path)
