"""Where the GPT benchmark runs, the only place that knows: this process's GPU, or the CPU."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from megatron_zbpp.emulation import cpu

# dense bf16 TFLOP/s by what the device's name contains, from NVIDIA's data sheets
_PEAK_TFLOPS = {
    'A100': 312.0,
    'H100 PCIe': 756.0,
    'H100 NVL': 835.0,
    'H100': 989.0,
    'H200': 989.0,
    'B200': 2250.0,
}


class Gpu:
    """A CUDA device."""

    backend = 'nccl'

    def __init__(self, device: torch.device) -> None:
        self.torch = device
        torch.cuda.set_device(device)
        self.name = torch.cuda.get_device_name(device)
        self.total_bytes: int | None = torch.cuda.get_device_properties(device).total_memory
        matches = [peak for part, peak in _PEAK_TFLOPS.items() if part in self.name]
        self.peak_tflops: float | None = matches[0] if matches else None

    def synchronize(self) -> None:
        """Wait for all work."""
        torch.cuda.synchronize()

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        """Most that tensors have taken since `reset_peak`."""
        return torch.cuda.max_memory_allocated()

    @contextmanager
    def following(self) -> Iterator[Gpu]:
        """Around what `held_bytes` is asked about."""
        yield self

    def held_bytes(self) -> int:
        """Return what tensors take now."""
        return torch.cuda.memory_allocated()


class Host:
    """The CPU: same calls, so that tests run what a GPU runs."""

    backend = 'gloo'
    total_bytes: int | None = None
    peak_tflops: float | None = None

    def __init__(self, device: torch.device) -> None:
        self.torch = device
        self.name = 'cpu'
        self._followed: _Storages | None = None

    def synchronize(self) -> None:
        """Work on the CPU is done when the call returns."""

    def reset_peak(self) -> None:
        """Do nothing: the system's count of a process cannot be reset."""

    def peak_bytes(self) -> int:
        """Most that this process has had resident, ever."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

    @contextmanager
    def following(self) -> Iterator[Host]:
        """Around what `held_bytes` is asked about."""
        with _Storages() as self._followed:
            yield self
        self._followed = None

    def held_bytes(self) -> int:
        """Return what tensors that were made inside `following` take now."""
        return self._followed.alive()


class _Storages(TorchDispatchMode):
    """Knows every storage that an operation returns, without keeping it alive."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        given = {_key(x) for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)}
        made = func(*args, **(kwargs or {}))
        for tensor in tree_iter(made):
            if isinstance(tensor, torch.Tensor) and (key := _key(tensor)) not in given:
                storage = tensor.untyped_storage()
                self._known[key] = StorageWeakRef(storage), storage.nbytes()
        return made

    def alive(self) -> int:
        """Return bytes of those that are still there."""
        self._known = {key: own for key, own in self._known.items() if not own[0].expired()}
        return sum(size for _, size in self._known.values())


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def find() -> Gpu | Host:
    """Return this process's device; to be called before megatron.core is imported."""
    device = cpu.device()
    return Gpu(device) if device.type == 'cuda' else Host(device)
