"""The module `transformer_engine_torch`: what Transformer Engine's Python asks of it by name."""

from __future__ import annotations

import enum
import functools
import types
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

NAME = 'transformer_engine_torch'
KERNELS: dict[str, Callable] = {}
calls: Counter[str] = Counter()  # how often each kernel was called


def kernel(function: Callable) -> Callable:
    """Register `function` as the extension's function of that name."""
    return registered(function.__name__, function)


def registered(name: str, function: Callable) -> Callable:
    """Register `function` as the extension's function `name`, and return it as it is.

    Autograd does not see into the extension: TE writes the backwards itself.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        with torch.no_grad():
            return function(*args, **kwargs)

    call.__name__ = name
    KERNELS[name] = call
    return function


class DType(enum.IntEnum):
    """Types of elements; the numbers are those of `transformer_engine.h`."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


_TORCH = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
    DType.kFloat8E4M3: torch.float8_e4m3fn,
    DType.kFloat8E5M2: torch.float8_e5m2,
}


def torch_dtype(dtype: Any, default: torch.dtype | None = None) -> torch.dtype:
    """Torch's type for any spelling of a type; `default` for None.

    Raises:
        NotImplementedError: torch has no such type.
    """
    if dtype is None:
        dtype = default
    if isinstance(dtype, torch.dtype):
        return dtype
    found = DType(int(dtype))
    if found not in _TORCH:
        raise NotImplementedError(f'{found.name} on the CPU')
    return _TORCH[found]


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


class FP8TensorMeta:
    """Scales and amax history of delayed scaling."""

    def __init__(self) -> None:
        self.scale = self.scale_inv = self.amax_history = None


class _Member(int):
    """Of an enumeration that is known by name only."""

    name: str


class _ByName(type):
    """Makes members of an enumeration as they are named."""

    @property
    def __members__(cls) -> dict[str, _Member]:
        return {name: value for name, value in vars(cls).items() if isinstance(value, _Member)}

    def __getattr__(cls, name: str) -> _Member:
        if name.startswith('__'):
            raise AttributeError(name)
        member = _Member(len(vars(cls)))  # no two alike
        member.name = name
        setattr(cls, name, member)
        return member


@functools.cache
def named(name: str) -> type:
    """Return the class `name` of the extension: members are there by name; it cannot be made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f'{NAME}.{name} on the CPU')

    return _ByName(name, (), {'__init__': __init__, '__module__': NAME})


class Extension(types.ModuleType):
    """The module itself: the kernels, and by name whatever else is asked for."""

    __file__ = __file__
    __spec__ = None

    def __init__(self) -> None:
        super().__init__(NAME)
        own = (DType, FP8FwdTensors, FP8BwdTensors, FP8TensorMeta)
        vars(self).update({each.__name__: each for each in own} | KERNELS)  # also for import *

    def __getattr__(self, name: str) -> Any:
        if name.startswith('__'):
            raise AttributeError(name)
        if name[:1].isupper():
            return named(name)

        def missing(*args: Any, **kwargs: Any) -> None:
            raise NotImplementedError(f'{NAME}.{name} on the CPU')

        missing.__name__ = name
        return missing
