"""Megatron-Core on CPU and gloo: whatever asks for "cuda" gets the CPU.

Nothing of Megatron is edited. `install()` must run before megatron.core is imported. It is for
development, tests and trying things out: the arithmetic is the real one, the speed is not.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import importlib.util
import logging
import os
import platform
import sys
import time
import types
import typing
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import typing_extensions
from torch.distributed import distributed_c10d
from torch.overrides import TorchFunctionMode
from torch.utils._triton import has_triton_package

from megatron_zbpp.runtime.compat import RUN_BACKWARD
from megatron_zbpp.runtime.import_hook import after_import


def _cpu(device: Any) -> Any:
    """Return the CPU for any spelling of a CUDA device; everything else as it is."""
    if type(device) is int:  # torch.cuda.current_device()
        return 'cpu'
    if isinstance(device, str) and device.startswith('cuda'):
        return 'cpu'
    if isinstance(device, torch.device) and device.type == 'cuda':
        return torch.device('cpu')
    return device


_REWRITTEN = {torch.Tensor.to, torch.device}  # may name a device in another way than by `device=`


class CudaMeansCpu(TorchFunctionMode):
    """Every torch call with device=<cuda>, and Tensor.to(<cuda>): some 100 places upstream."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if not kwargs and func not in _REWRITTEN:  # as nearly always: reading a shape is a call
            return func(*args)
        kwargs = kwargs or {}
        if kwargs.get('device') is not None:
            kwargs['device'] = _cpu(kwargs['device'])
        if kwargs.get('pin_memory'):  # nothing is page-locked for no device
            kwargs['pin_memory'] = False
        if func is torch.Tensor.to and len(args) > 1 and type(args[1]) is not int:
            if args[1] == 'cpu' and type(args[0]).cpu is not torch.Tensor.cpu:
                return args[0].cpu()  # quantized ones come to the host in a way of their own
            args = (args[0], _cpu(args[1]), *args[2:])
        if func is torch.device:
            args = ('cuda', *args) if args and type(args[0]) is int else args
            return _cpu(torch.device(*args, **kwargs))
        if func in (torch.Tensor.backward, torch.autograd.backward):
            with self:  # torch leaves the mode while it runs `func`: layers' backwards need it
                return _backward(*args, **kwargs)
        return func(*args, **kwargs)


@contextlib.contextmanager
def _range(message: str, *args: object, **kwargs: object) -> Iterator[None]:
    """Be a range that no profiler of CUDA sees: around a block, or as a decorator."""
    yield


def _backward(
    tensors, gradients=None, retain_graph=None, create_graph=False, inputs=None, **renamed
):
    """Run torch.autograd.backward by the engine behind it, which no mode intercepts."""
    gradients = renamed.get('grad_tensors', renamed.get('gradient', gradients))
    tensors = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
    gradients = torch.autograd._tensor_or_tensors_to_tuple(gradients, len(tensors))
    vars(torch.autograd)[RUN_BACKWARD](
        tensors,
        torch.autograd._make_grads(tensors, gradients, is_grads_batched=False),
        create_graph if retain_graph is None else retain_graph,
        create_graph,
        (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs or ()),
        allow_unreachable=True,
        accumulate_grad=True,
    )


class _Done:
    """Work on the CPU, done when the call returns: there is nothing to order or to wait for."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self, *args: object, **kwargs: object) -> None:
        pass


class Stream(_Done):
    """A stream of the CPU."""

    cuda_stream = 0
    wait_stream = wait_event = _Done.synchronize

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()


class Event(_Done):
    """An event on such a stream has always happened."""

    record = wait = _Done.synchronize


def _as_written(model: Any = None, **options: object) -> Any:
    return _as_written if model is None else model


def _tensor_type(self, *args, _original=torch.Tensor.type, **kwargs):
    name = _original(self, *args, **kwargs)
    if not isinstance(name, str):  # type(dtype) converts
        return name
    return 'torch.cuda.' + name.rpartition('.')[2]


def _wrapper(cls, *args, _original=torch.Tensor._make_wrapper_subclass, **kwargs):
    if 'device' in kwargs:
        kwargs['device'] = _cpu(kwargs['device'])
    return _original(cls, *args, **kwargs)


_MODE = CudaMeansCpu()
_STREAM = Stream()
_PROPERTIES = types.SimpleNamespace(
    name='cpu', major=9, minor=0, total_memory=16 << 30, multi_processor_count=1
)

# name in torch.cuda: replacement
_CUDA: dict[str, object] = {
    # megatron.training asserts it; the optimizers choose by it
    'is_available': lambda: True,
    'device_count': lambda: 1,
    'current_device': lambda: 0,
    'set_device': lambda device: None,
    # the "CUDA generator" of CudaRNGStatesTracker is the CPU's: the ops it is to steer run there
    'default_generators': (torch.default_generator,),
    '_lazy_init': lambda: None,
    # else seeds are only queued for a CUDA that never starts: nothing fails, nothing is seeded
    '_lazy_call': lambda function, **kwargs: function(),
    # timers, p2p_communication, train loop
    'synchronize': lambda *args: None,
    # DDP wrapping, MoE dispatch, combined 1F1B
    'Stream': Stream,
    'Event': Event,
    'current_stream': lambda *args: _STREAM,
    'stream': lambda stream: contextlib.nullcontext(),
    # Transformer Engine
    'device': lambda *args: contextlib.nullcontext(),
    'is_current_stream_capturing': lambda: False,
    'is_bf16_supported': lambda *args: True,
    # architecture checks
    'get_device_properties': lambda *args: _PROPERTIES,
    # no mock, which would keep whatever it is called with
    'nvtx': types.SimpleNamespace(
        range_push=lambda message: 0, range_pop=lambda: 0, mark=lambda message: None, range=_range
    ),
}

_TENSOR: dict[str, object] = {
    'cuda': lambda self, *args, **kwargs: self,
    # maybe_move_tensor_to_cpu (MoE) turns its splits into lists only if is_cuda
    'is_cuda': property(lambda self: True),
    'record_stream': lambda self, stream: None,
    # gradient clipping checks for 'torch.cuda.FloatTensor' and its like
    'type': _tensor_type,
    '_make_wrapper_subclass': staticmethod(_wrapper),
}


def installed() -> bool:
    """Return True if this process runs Megatron-Core on the CPU."""
    return isinstance(torch.Tensor.is_cuda, property)


@contextlib.contextmanager
def untranslated() -> Iterator[None]:
    """Leave the mode that translates devices: each call of torch costs what torch takes.

    For timing. What runs inside finds `torch.cuda.current_device()` to be the CPU, and fails where
    it names CUDA itself.
    """
    _MODE.__exit__(None, None, None)
    try:
        with mock.patch.object(torch.cuda, 'current_device', lambda: 'cpu'):
            yield
    finally:
        _MODE.__enter__()


def device() -> torch.device:
    """Return where to train: this process's GPU or, where there is none, the CPU, made ready."""
    if not installed() and torch.cuda.is_available():
        return torch.device('cuda', int(os.environ.get('LOCAL_RANK', 0)))
    install()
    return torch.device('cpu')


def install(alias_sends: bool = True) -> None:
    """Make this process run Megatron-Core on CPU and gloo; again does nothing more.

    Args:
        alias_sends: also protect Megatron's own interleaved schedule: see `_aliased_isend`.

    Raises:
        RuntimeError: megatron.core was imported first, and may have asked for CUDA already.
    """
    if installed():
        return
    if 'megatron.core' in sys.modules:
        raise RuntimeError(
            'megatron_zbpp.emulation.cpu.install() comes too late: call it before megatron.core is '
            'imported'
        )
    # torch.compile (megatron.core.jit) would look for libcuda through triton: what it has made by
    # now, and will make, runs as it is written
    os.environ.setdefault('TORCHDYNAMO_DISABLE', '1')
    if 'torch._dynamo' in sys.modules:  # whose import takes as long as a third of torch's
        torch.compiler.set_stance('force_eager')
    torch.compile = _as_written
    # wanted with tensor parallelism
    os.environ.setdefault('CUDA_DEVICE_MAX_CONNECTIONS', '1')
    install_gloo(alias_sends)
    for name, value in _CUDA.items():
        setattr(torch.cuda, name, value)
        if name in vars(torch.cuda.random):  # its own 'from . import'
            setattr(torch.cuda.random, name, value)
    for name, value in _TENSOR.items():
        setattr(torch.Tensor, name, value)
    # DataLoader(pin_memory=True) asks this one
    torch.accelerator.is_available = lambda: False
    _MODE.__enter__()
    # the CPU's random state is the GPU's, too: Megatron would warn whenever it uses that
    random = logging.getLogger('megatron.core.tensor_parallel.random')
    random.addFilter(lambda record: 'CPU RNG state changed' not in record.msg)
    install_packages()
    # What tensors free stays with the process, as PyTorch keeps it on a GPU. glibc gives large
    # blocks back to the system; taking them anew, page by page, would cost a fifth of the backwards
    # of a schedule that holds activations from B to W, and nothing of a fused one.
    if platform.libc_ver()[0] == 'glibc':
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: never
        mallopt(-4, 0)  # M_MMAP_MAX: no block of its own


_MOE = 'megatron.core.transformer.moe.moe_utils'
_DATASETS = 'megatron.core.datasets.utils'
_FUSED = 'megatron.legacy.fused_kernels'
APEX = 'fused_weight_gradient_mlp_cuda'  # which Megatron's own linear layers import


def install_packages() -> None:
    """Stand in for packages that Megatron imports for a GPU, and mend its own modules."""
    install_apex()
    # megatron.training 0.18, 0.19 on Python 3.11: from typing import override
    if not hasattr(typing, 'override'):
        setattr(typing, 'override', typing_extensions.override)  # noqa: B010
    # megatron.core 0.18, 0.19 and megatron.training 0.16 import triton for kernels that the CPU
    # never runs; torch keeps the answer it gives here and goes on without triton
    if not has_triton_package():
        triton = mock.MagicMock(__version__='3.7.1', __spec__=None)
        sys.modules.update({'triton': triton, 'triton.language': triton.language})
    after_import(dict.fromkeys((_MOE, _DATASETS, _FUSED), _mend))


def _mend(module: types.ModuleType) -> None:
    own = vars(module)
    if module.__name__ == _MOE:  # 0.16: without Transformer Engine a name is looked up in vain
        own.setdefault('te_general_gemm', None)
    elif module.__name__ == _FUSED:  # 0.16 asks nvcc for its version; it builds nothing
        own['load'] = lambda args: None
    elif importlib.util.find_spec('megatron.core.datasets.helpers_cpp'):
        # 'make' for helpers_cpp: the wheel has the built file and no Makefile, so that 'make' fails
        # there and ends the program
        own['compile_helpers'] = lambda: None


def wgrad_gemm_accum_fp32(
    input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor
) -> None:
    """Add the gradient of a weight, computed in fp32, to `main_grad`; 16 bits are rounded once."""
    with torch.no_grad():
        gradient = grad_output.t().float() @ input.float()
        if main_grad.dtype is torch.float32:
            main_grad.add_(gradient)
        else:
            main_grad.copy_(main_grad.float() + gradient)


wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32


def install_apex() -> None:
    """Make apex's kernel importable where it is not built."""
    module = types.ModuleType(APEX, __doc__)
    module.__spec__ = ModuleSpec(APEX, None)
    kernels = ('wgrad_gemm_accum_fp32', 'wgrad_gemm_accum_fp16')
    vars(module).update({name: globals()[name] for name in kernels})
    sys.modules[APEX] = module


# ---- Gloo where Megatron and Transformer Engine count on what NCCL does.

_DRAIN_S = 5  # seconds for gloo's threads to end before the process ends
_LET_GO = 0.05  # seconds in which one of them does, or is seen running

# of a process group, by the release of torch
_GATHERS = ('allgather_into_tensor_coalesced', 'all_gather_single_coalesced')


def install_gloo(alias_sends: bool) -> None:
    """Let gloo stand in for NCCL in this process, and end before it."""
    if alias_sends:
        dist.isend = distributed_c10d.isend = _aliased_isend
    dist.init_process_group = _over_gloo(dist.init_process_group)
    dist.new_group = distributed_c10d.new_group = _over_gloo(dist.new_group)
    dist.all_gather = distributed_c10d.all_gather = _of_any_sizes(dist.all_gather)
    for name in _GATHERS:
        if hasattr(dist.ProcessGroup, name):
            setattr(dist.ProcessGroup, name, _by_bytes(getattr(dist.ProcessGroup, name)))
    atexit.register(_drain_threads)


def _aliased_isend(tensor: torch.Tensor, *args, _original=distributed_c10d.isend, **kwargs):
    """Send an alias, which keeps the memory.

    Megatron's interleaved schedule frees what it sends (`deallocate_output_tensor`) before the send
    is waited for. CUDA's allocator keeps such memory for the stream that reads it; gloo's send
    would read freed memory (0.16 and 0.17). The executor of this package needs no alias.
    """
    return _original(tensor.detach(), *args, **kwargs)


def _by_bytes(original: Callable) -> Callable:
    """Gather bytes where types differ, as FP8 weights do: gloo would convert all to the first's."""

    @functools.wraps(original)
    def gather(self, outputs, inputs, *args, **kwargs):
        if len({tensor.dtype for tensor in outputs}) > 1:
            outputs, inputs = ([t.view(torch.uint8) for t in part] for part in (outputs, inputs))
        return original(self, outputs, inputs, *args, **kwargs)

    return gather


def _of_any_sizes(original: Callable) -> Callable:
    """Gather tensors of different sizes, as NCCL does and gloo does not."""

    @functools.wraps(original)
    def wrapper(outputs, own, group=None, async_op=False):  # by that name a watchdog leaves it out
        if len({output.numel() for output in outputs}) == 1:
            return original(outputs, own, group, async_op)
        outputs[dist.get_rank(group)].copy_(own)
        works = _Works(
            dist.broadcast(output, group=group, group_src=rank, async_op=True)
            for rank, output in enumerate(outputs)
            if output.numel()
        )
        return works if async_op else works.wait()

    return wrapper


class _Works(tuple[Any, ...]):
    """Collectives that stand for one."""

    def wait(self) -> None:
        """Return when all have ended."""
        for work in self:
            work.wait()


def _over_gloo(original: Callable) -> Callable:
    """Give gloo for 'nccl', --distributed-backend's default and BridgeCommunicator's name."""

    @functools.wraps(original)
    def call(*args, **kwargs):
        args = ['gloo' if a == 'nccl' else a for a in args]
        return original(*args, **{k: 'gloo' if v == 'nccl' else v for k, v in kwargs.items()})

    return call


def _drain_threads() -> None:
    """Wait until gloo's threads have nothing left to do."""
    deadline = time.monotonic() + _DRAIN_S
    time.sleep(_LET_GO)
    while _runs() and time.monotonic() < deadline:
        time.sleep(_LET_GO)


def _runs() -> bool:
    for task in Path('/proc/self/task').glob('*/stat'):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            if task.read_text().partition('(')[2].startswith('pt_gloo_runloop) R'):
                return True
    return False
