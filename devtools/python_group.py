"""A process group that is its own backend, written in Python, and gloo for what it computes."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import ClassVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store


class PythonGroup(dist.ProcessGroup):
    """What torch asks of a group whose backend it does not know.

    Attributes:
        NAME: of the backend.
    """

    NAME: ClassVar[str]

    def __init__(self, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue]  # missing in the stubs
        self.options = SimpleNamespace(_timeout=timeout)

    def getBackendName(self) -> str:
        return self.NAME

    def _get_backend(self, device: torch.device) -> PythonGroup:
        return self

    def _set_group_name(self, name: str) -> None:
        self._title = name  # torch keeps it in backends that are written in C++

    @property
    def group_name(self) -> str:
        return self._title


def over_gloo(store: Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """Return a group of the same ranks whose tensors are on the host."""
    gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device('cpu'), dist.ProcessGroup.BackendType.GLOO, gloo)
    return group
