"""Transformer Engine's own Python modules on a CPU: stands in for their extension in C++.

    from megatron_zbpp.emulation import te; te.install('FOLDER_OF_THE_WHEEL')
    import transformer_engine.pytorch as te

Only the unquantized path (fp32, bf16, fp16). Everything else of the extension is there by name and
raises when it is called. `calls` counts what was called.
"""

from __future__ import annotations

import contextlib
import enum
import importlib.util
import os
import sys
import types
from collections import Counter
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F

calls: Counter[str] = Counter()


class DType(enum.IntEnum):
    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


TORCH = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
}


def _torch(dtype, default):
    if dtype is None:
        return default
    return dtype if isinstance(dtype, torch.dtype) else TORCH[DType(int(dtype))]


KERNELS = {}


def kernel(function):
    def call(*args, **kwargs):
        calls[call.__name__] += 1
        with torch.no_grad():  # autograd does not see into the extension
            return function(*args, **kwargs)

    call.__name__ = function.__name__

    KERNELS[call.__name__] = call
    return function


def _plain(*quantizers):
    for quantizer in quantizers:
        if quantizer is not None:
            raise NotImplementedError('quantization on the CPU')


def _quantized(value, quantizer):
    """By a quantizer that is written in Python: those of TE's custom recipes."""
    if quantizer is None:
        return value
    if not getattr(quantizer, 'custom', False):
        raise NotImplementedError(f'{type(quantizer).__name__} on the CPU')
    return quantizer(value)


def _product(A, transa, B, transb):
    """cuBLAS is column-major: rows of the result are B's, columns A's. In fp32, rounded once."""
    a, b = A.reshape(-1, A.shape[-1]), B.reshape(-1, B.shape[-1])
    a = a.t() if transa else a  # (k, m)
    b = b.t() if transb else b  # (n, k)
    return b.float() @ a.float()


@kernel
def generic_gemm(
    A,
    transa,
    B,
    transb,
    D,
    quantizer,
    out_dtype,
    bias,
    bias_type,
    gelu,
    gelu_in,
    grad,
    workspace,
    workspace_size,
    accumulate,
    use_split_accumulator,
    comm_overlap=None,
    comm_type=None,
    extra_output=None,
    bulk_overlap=False,
    alpha=1.0,
    beta=None,
):
    _plain(quantizer)
    assert comm_overlap is None and not gelu
    out = _product(A, transa, B, transb) * alpha
    bias_grad = None
    if grad and bias is not None:  # of the weight gradient: B is the output's gradient
        bias_grad = B.reshape(-1, B.shape[-1]).float().sum(0).to(bias.dtype)
    elif bias is not None and bias.numel():
        out = out + bias.float()
    if D is not None:
        D.copy_((D.float() + out.view(D.shape)) if accumulate else out.view(D.shape))
        return D, bias_grad, None, None
    shape = [*B.shape[:-1], out.shape[-1]] if not transb else list(out.shape)
    return out.to(_torch(out_dtype, A.dtype)).view(shape), bias_grad, None, None


@kernel
def te_general_grouped_gemm(
    A,
    transa,
    B,
    transb,
    D,
    D_type,
    m_splits,
    bias,
    bias_type,
    single_output,
    pre_gelu_out,
    grad,
    workspace,
    workspace_size,
    accumulate,
    use_split_accumulator,
    math_sm_count,
):
    at = 0
    for k, (a, b) in enumerate(zip(A, B, strict=True)):
        out = _product(a, transa, b, transb)
        if grad and bias and bias[k].numel():
            bias[k].copy_(b.reshape(-1, b.shape[-1]).float().sum(0))
        elif not grad and bias and bias[k].numel():
            out = out + bias[k].float()
        if single_output:
            rows = out.shape[0]
            target = D[0].view(-1, D[0].shape[-1])[at : at + rows]
            at += rows
        else:
            target = D[k]
        out = out.view(target.shape)
        target.copy_(target.float() + out if accumulate else out)
    return bias


def _norm_out(value, out, dtype, quantizer=None):
    value = value.to(dtype)
    if quantizer is not None:
        return _quantized(value, quantizer)
    if out is not None:
        out.copy_(value.view(out.shape))
        return out
    return value


@kernel
def layernorm_fwd(x, weight, bias, eps, out, quantizer, out_dtype, sm_margin, zero_centered_gamma):
    v = x.float()
    mean = v.mean(-1)
    rsigma = (v.var(-1, unbiased=False) + eps).rsqrt()
    gamma = weight.float() + (1 if zero_centered_gamma else 0)
    y = (v - mean[..., None]) * rsigma[..., None] * gamma + bias.float()
    return _norm_out(y, out, _torch(out_dtype, x.dtype), quantizer), mean, rsigma


@kernel
def layernorm_bwd(dz, x, mu, rsigma, gamma, sm_margin, zero_centered_gamma):
    g = gamma.float() + (1 if zero_centered_gamma else 0)
    hat = (x.float() - mu.view(*x.shape[:-1], 1)) * rsigma.view(*x.shape[:-1], 1)
    d = dz.float()
    dg = (d * hat).reshape(-1, x.shape[-1]).sum(0)
    db = d.reshape(-1, x.shape[-1]).sum(0)
    d = d * g
    dx = rsigma.view(*x.shape[:-1], 1) * (
        d - d.mean(-1, keepdim=True) - hat * (d * hat).mean(-1, keepdim=True)
    )
    return dx.to(x.dtype), dg.to(gamma.dtype), db.to(gamma.dtype)


@kernel
def rmsnorm_fwd(x, weight, eps, out, quantizer, out_dtype, sm_margin, zero_centered_gamma):
    v = x.float()
    rsigma = (v.square().mean(-1) + eps).rsqrt()
    gamma = weight.float() + (1 if zero_centered_gamma else 0)
    y = v * rsigma[..., None] * gamma
    return _norm_out(y, out, _torch(out_dtype, x.dtype), quantizer), None, rsigma


@kernel
def rmsnorm_bwd(dz, x, rsigma, gamma, sm_margin, zero_centered_gamma):
    g = gamma.float() + (1 if zero_centered_gamma else 0)
    hat = x.float() * rsigma.view(*x.shape[:-1], 1)
    d = dz.float()
    dg = (d * hat).reshape(-1, x.shape[-1]).sum(0)
    d = d * g
    dx = rsigma.view(*x.shape[:-1], 1) * (d - hat * (d * hat).mean(-1, keepdim=True))
    return dx.to(x.dtype), dg.to(gamma.dtype)


def _gated(act):
    def forward(x):
        a, b = x.chunk(2, -1)
        return act(a) * b

    return forward


def _qgelu(x):
    return x * torch.sigmoid(1.702 * x)


def _gelu(x):
    return F.gelu(x, approximate='tanh')


def _square_relu(x):
    return F.relu(x).square()


ACTIVATIONS = {
    'gelu': _gelu,
    'relu': F.relu,
    'silu': F.silu,
    'qgelu': _qgelu,
    'srelu': _square_relu,
    'geglu': _gated(_gelu),
    'reglu': _gated(F.relu),
    'swiglu': _gated(F.silu),
    'qgeglu': _gated(_qgelu),
    'sreglu': _gated(_square_relu),
    'glu': _gated(torch.sigmoid),
}


def _derivative(function, grad, x):
    with torch.enable_grad():
        v = x.detach().float().requires_grad_()
        (d,) = torch.autograd.grad(function(v), v, grad.float())
    return d.to(x.dtype)


def _activations():
    for name, function in ACTIVATIONS.items():

        def forward(x, quantizer=None, *_, function=function):
            return _quantized(function(x.float()).to(x.dtype), quantizer)

        def backward(grad, x, quantizer=None, *_, function=function):
            return _quantized(_derivative(function, grad, x), quantizer)

        def dbias(grad, x, quantizer=None, *_, function=function):
            d = _derivative(function, grad, x)
            return d.float().reshape(-1, d.shape[-1]).sum(0).to(d.dtype), _quantized(d, quantizer)

        for made, known in ((forward, name), (backward, 'd' + name), (dbias, 'dbias_d' + name)):
            made.__name__ = known
            kernel(made)


_activations()


@kernel
def bgrad_quantize(grad, quantizer):
    return grad.float().reshape(-1, grad.shape[-1]).sum(0).to(grad.dtype), _quantized(
        grad, quantizer
    )


@kernel
def split_quantize(tensor, splits, quantizers, disable_bulk_allocation=False):
    return [_quantized(t, q) for t, q in zip(tensor.split(splits), quantizers, strict=True)]


@kernel
def get_num_cublas_streams():
    return 4


@kernel
def get_cublasLt_version():
    return 120900


@kernel
def get_cudnn_version():
    return 91400


@kernel
def get_stream_priority_range():
    return 0, 0


@kernel
def device_supports_multicast(*_):
    return False


@kernel
def get_fused_attn_backend(*_, **__):
    none = _Missing('NVTE_Fused_Attn_Backend').NVTE_No_Backend
    source = sys.modules[
        'transformer_engine.pytorch.attention.dot_product_attention.utils'
    ].__file__
    with_reason = 'reject_message = tex.get_fused_attn_backend' in Path(source).read_text()
    return (none, 'the CPU has none') if with_reason else none


@kernel
def ubuf_built_with_mpi():
    return False


@kernel
def scaled_upper_triang_masked_softmax_forward(x, scale):
    s = x.shape[-1]
    mask = torch.ones(s, s, dtype=torch.bool).triu(1)
    return (x.float() * scale).masked_fill(mask, float('-inf')).softmax(-1).to(x.dtype)


@kernel
def scaled_aligned_causal_masked_softmax_forward(x, scale):
    q, k = x.shape[-2:]
    mask = torch.ones(q, k, dtype=torch.bool).triu(1 + k - q)
    return (x.float() * scale).masked_fill(mask, float('-inf')).softmax(-1).to(x.dtype)


@kernel
def scaled_softmax_forward(x, scale):
    return (x.float() * scale).softmax(-1).to(x.dtype)


@kernel
def scaled_masked_softmax_forward(x, mask, scale):
    return (x.float() * scale).masked_fill(mask.bool(), -10000.0).softmax(-1).to(x.dtype)


def _softmax_backward(grad, y, scale):
    g, p = grad.float(), y.float()
    return (scale * p * (g - (g * p).sum(-1, keepdim=True))).to(y.dtype)


for _name in (
    'scaled_upper_triang_masked_softmax_backward',
    'scaled_aligned_causal_masked_softmax_backward',
    'scaled_softmax_backward',
    'scaled_masked_softmax_backward',
):

    def _backward(grad, y, scale):
        return _softmax_backward(grad, y, scale)

    _backward.__name__ = _name
    kernel(_backward)


class Member(int):
    """Of an enumeration that is known by name only."""


class _Meta(type):
    @property
    def __members__(cls):
        return {name: value for name, value in vars(cls).items() if isinstance(value, Member)}

    def __getattr__(cls, name):
        if name.startswith('__'):
            raise AttributeError(name)
        member = Member(len(vars(cls)))  # no two alike
        member.name = name
        setattr(cls, name, member)
        return member


def _Missing(name):
    """A class of the extension: its members are their own names; it cannot be made."""
    if name not in _missing:

        def __init__(self, *args, **kwargs):
            raise NotImplementedError(f'tex.{name} on the CPU')

        _missing[name] = _Meta(
            name, (), {'__init__': __init__, '__module__': 'transformer_engine_torch'}
        )
    return _missing[name]


_missing = {}


class FP8TensorMeta:
    def __init__(self):
        self.scale = self.amax_history = None


class FP8FwdTensors(enum.IntEnum):
    GEMM1_INPUT = 0
    GEMM1_WEIGHT = 1
    GEMM1_OUTPUT = 2
    GEMM2_INPUT = 3
    GEMM2_WEIGHT = 4
    GEMM2_OUTPUT = 5
    GEMM3_INPUT = 6
    GEMM3_WEIGHT = 7
    GEMM3_OUTPUT = 8


class FP8BwdTensors(enum.IntEnum):
    GRAD_OUTPUT1 = 0
    GRAD_INPUT1 = 1
    GRAD_OUTPUT2 = 2
    GRAD_INPUT2 = 3
    GRAD_OUTPUT3 = 4
    GRAD_INPUT3 = 5


class Triton:
    """Finds every module of triton, whose kernels the CPU never runs."""

    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] == 'triton':
            return importlib.util.spec_from_loader(name, self, is_package=True)

    def create_module(self, spec):
        made = mock.MagicMock(__version__='3.7.1', __spec__=spec, __path__=[], __name__=spec.name)
        made.jit = lambda function=None, **_: function or (lambda f: f)
        return made

    def exec_module(self, module):
        pass


class Extension(types.ModuleType):
    DType = DType
    FP8FwdTensors = FP8FwdTensors
    FP8BwdTensors = FP8BwdTensors
    FP8TensorMeta = FP8TensorMeta
    __file__ = __file__

    def __init__(self, name):
        super().__init__(name)
        vars(self).update(KERNELS)  # for those that import *

    def __getattr__(self, name):
        if name.startswith('__'):
            raise AttributeError(name)
        if name[:1].isupper():
            return _Missing(name)

        def missing(*args, **kwargs):
            raise NotImplementedError(f'tex.{name} on the CPU')

        missing.__name__ = name
        return missing


# beyond what megatron_zbpp.emulation.cpu puts there
CUDA = {
    'get_device_capability': lambda *_: (9, 0),
    'get_device_name': lambda *_: 'cpu',
    'is_current_stream_capturing': lambda: False,
    'is_bf16_supported': lambda *_: True,
    'device': lambda *_: contextlib.nullcontext(),
}


def _device_means_cpu():
    """torch.device(<cuda>) is the CPU, in the mode of megatron_zbpp.emulation.cpu."""
    from megatron_zbpp.emulation.cpu import CudaMeansCpu

    original = CudaMeansCpu.__torch_function__

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.device and args and (type(args[0]) is int or str(args[0])[:4] == 'cuda'):
            return torch.device('cpu')
        return original(self, func, types, args, kwargs)

    CudaMeansCpu.__torch_function__ = __torch_function__


def install(site):
    """`site`: where the wheel `transformer_engine` was unpacked."""
    os.environ['NVTE_PROJECT_BUILDING'] = '1'  # no look for CUDA's libraries
    os.environ.pop('NVTE_RELEASE_BUILD', None)
    os.environ.setdefault('NVTE_TORCH_COMPILE', '0')
    site = Path(site)
    _device_means_cpu()
    for name, value in CUDA.items():
        setattr(torch.cuda, name, value)
    torch.cuda.graphs._cuda_isCurrentStreamCapturing = lambda: False
    if isinstance(sys.modules.get('triton'), mock.Mock):
        for name in [name for name in sys.modules if name.partition('.')[0] == 'triton']:
            del sys.modules[name]
        sys.meta_path.append(Triton())
    sys.path.insert(0, str(site))
    sys.modules['transformer_engine_torch'] = Extension('transformer_engine_torch')
    # the real module, but for the loading of the library
    spec = importlib.util.spec_from_file_location(
        'transformer_engine.common',
        site / 'transformer_engine/common/__init__.py',
        submodule_search_locations=[str(site / 'transformer_engine/common')],
    )
    common = importlib.util.module_from_spec(spec)
    sys.modules['transformer_engine.common'] = common
    spec.loader.exec_module(common)
    common.load_framework_extension = lambda framework: None
    import transformer_engine

    transformer_engine.common = common  # which an import does, where it loads the module itself
