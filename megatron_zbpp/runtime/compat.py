"""What torch keeps to itself and we need; a test holds that the installed release has it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.autograd import grad_mode
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

# what `torch.autograd.backward` calls once it has made a gradient of each root
run_backward = torch.autograd.Variable._execution_engine.run_backward
# whether torch.profiler or emit_nvtx is on
profiler_enabled: Callable[[], bool] = vars(torch.autograd)['_profiler_enabled']


def unseen_by_autograd(tensors: tuple[torch.Tensor, ...]) -> AbstractContextManager[None]:
    """Let `tensors` be written to, as if nothing were, for graphs that have saved them."""
    return grad_mode._unsafe_preserve_version_counter(tensors)


def default_store() -> Store:
    """Return where the ranks of the world met."""
    return distributed_c10d._get_default_store()


def tcp_store(store: Store) -> TCPStore | None:
    """Return the one that `store` is a view of, and that is served somewhere; None: none is."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, TCPStore) else None


def another_client(store: Any) -> Store:
    """Return one that can be used at the same time as `store`, where this torch has such."""
    return store.clone() if hasattr(store, 'clone') else store


def group_options(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the options of the group's backend for `device`; None: it keeps none."""
    return getattr(group._get_backend(device), 'options', None)


def group_timeout(options: Any) -> timedelta | None:
    """Return that of a group with these options; None: it keeps none."""
    return getattr(options, '_timeout', None)
