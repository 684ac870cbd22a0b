"""Private names of torch that we need; a test holds that the installed release has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore as TCPStore
from torch.autograd import grad_mode
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import Store

# what `torch.autograd.backward` calls once it has made a gradient of each root
run_backward = torch.autograd.Variable._execution_engine.run_backward
# whether torch.profiler or emit_nvtx is on
profiler_enabled: Callable[[], bool] = vars(torch.autograd)['_profiler_enabled']

RUN_BACKWARD = '_engine_run_backward'  # what `backward()` and `torch.autograd.grad` call


@contextmanager
def no_backward(message: str) -> Iterator[None]:
    """Raise NotImplementedError(message) where a program asks for gradients within."""

    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError(message)

    engine = getattr(torch.autograd, RUN_BACKWARD)
    setattr(torch.autograd, RUN_BACKWARD, refuse)
    try:
        yield
    finally:
        setattr(torch.autograd, RUN_BACKWARD, engine)


def unseen_by_autograd(tensors: tuple[torch.Tensor, ...]) -> AbstractContextManager[None]:
    """Let `tensors` be written to, as if nothing were, for graphs that have saved them."""
    return grad_mode._unsafe_preserve_version_counter(tensors)


def holders(storage: torch.UntypedStorage) -> int:
    """Return how many tensors have `storage`, beside this one Python object of it."""
    return torch._C._storage_Use_Count(storage._cdata) - 1


def place_of(tensor: torch.Tensor) -> tuple:
    """Return a key that is equal only for tensors of the same memory and shape."""
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.size(), tensor.stride()


@contextmanager
def saved_parameters(parameters: Mapping[tuple, torch.Tensor]) -> Iterator[None]:
    """Let backward functions in Python find `parameters` themselves among what they saved.

    What saved-tensor hooks give back they would else find as tensors without the attributes that
    Megatron's and Transformer Engine's layers read there and write there: `main_grad`, and the flag
    that it has been added to. An alias that needs no gradient stays what it is.
    """
    backward: Any = torch.autograd.function.BackwardCFunction
    saved: Any = torch._C._FunctionBase.__dict__['saved_tensors']

    def themselves(ctx: Any) -> tuple[torch.Tensor | None, ...]:
        found = saved.__get__(ctx)
        return tuple(
            parameters.get(place_of(each), each)
            if each is not None and each.requires_grad
            else each
            for each in found
        )

    backward.saved_tensors = property(themselves)
    try:
        yield
    finally:
        del backward.saved_tensors


def default_store() -> Store:
    """Return the store in which the ranks of the world met."""
    return distributed_c10d._get_default_store()


def another_client(store: Any) -> Store:
    """Return a client that can be used at the same time as `store`, where this torch has clones."""
    return store.clone() if hasattr(store, 'clone') else store


def group_options(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the options of the group's backend for `device`; None: it keeps none."""
    return getattr(group._get_backend(device), 'options', None)


def group_timeout(options: Any) -> timedelta | None:
    """Return the timeout of a group with these options; None: it keeps none."""
    return getattr(options, '_timeout', None)
