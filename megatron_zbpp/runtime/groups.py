"""Process groups: what carries the tensors of a device, and groups for one direction each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_zbpp.runtime import MessageKernels, compat

_DEFAULT = MessageKernels()
_T = TypeVar('_T')


def backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the backend for each type of device that the group takes tensors of.

    `get_backend` answers with what the group was asked for: 'undefined', or all of these in one.
    """
    config = dist.get_backend_config(group)  # cpu:gloo,cuda:nccl
    return dict(entry.split(':') for entry in config.split(','))


def backend_for(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the backend that carries the tensors of `device`; ValueError: the group has none."""
    found = backends(group)
    if device.type not in found:
        raise ValueError(
            f'the process group has backends for {", ".join(sorted(found))}, but the model is on '
            f'{device}: initialize torch.distributed with a backend for {device.type}'
        )
    return found[device.type]


def host_device(group: dist.ProcessGroup) -> str:
    """Return the type of device whose tensors the group carries, the host's if it can."""
    return 'cpu' if 'cpu' in backends(group) else 'cuda'


def gather_objects(own: _T, group: dist.ProcessGroup | None = None) -> list[_T]:
    """Return the values of all ranks of `group` in their order: a collective; None: of the job."""
    found = [own] * dist.get_world_size(group)
    dist.all_gather_object(found, own, group=group)
    return found


def directions(
    group: dist.ProcessGroup,
    device: torch.device,
    pairs: Iterable[tuple[int, int]],
    kernels: MessageKernels = _DEFAULT,
) -> dict[tuple[int, int], dist.ProcessGroup]:
    """Return a group for each pair of ranks in `group`, made by all ranks of all pipelines.

    All make all of them, in one order. Made by their members alone, groups would get a name from
    how many each member is in already, which differs between the ranks of a pipeline.
    """
    own, pairs = dist.get_process_group_ranks(group), sorted(pairs)
    groups = {}
    for ranks in _all_like(own):
        for pair in pairs:
            # options anew: each group writes into its own
            made = dist.new_group(
                sorted(ranks[rank] for rank in pair), **like(group, device, kernels)
            )
            if list(ranks) == own:
                groups[pair] = made
    return groups


def host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a group of the same ranks for tensors of the host, made by those of all pipelines."""
    options = compat.group_options(group, torch.device(host_device(group)))
    return _same_ranks(group, lambda: {'backend': 'gloo', 'timeout': compat.group_timeout(options)})


def beside(
    group: dist.ProcessGroup, device: torch.device, kernels: MessageKernels = _DEFAULT
) -> dist.ProcessGroup:
    """Return another group of the same ranks, for tensors of `device`, made as a host group is."""
    return _same_ranks(group, lambda: like(group, device, kernels))


def _same_ranks(
    group: dist.ProcessGroup, arguments: Callable[[], dict[str, Any]]
) -> dist.ProcessGroup:
    own = dist.get_process_group_ranks(group)
    made = {ranks: dist.new_group(list(ranks), **arguments()) for ranks in _all_like(own)}
    return made[tuple(own)]  # pyright: ignore[reportReturnType]


def _all_like(own: list[int]) -> list[tuple[int, ...]]:
    """Return the ranks of this pipeline and of all others, in an order that all ranks share."""
    return sorted(set(gather_objects(tuple(own))))


def like(
    group: dist.ProcessGroup, device: torch.device, kernels: MessageKernels = _DEFAULT
) -> dict[str, Any]:
    """Return arguments of `new_group` for one that carries messages of `device` as `group` does."""
    options = compat.group_options(group, device)
    return {
        'backend': backend_for(group, device),
        'timeout': compat.group_timeout(options),  # Megatron's --distributed-timeout-minutes
        'pg_options': _for_messages(options, kernels) if hasattr(options, 'config') else None,
    }


def _for_messages(theirs: Any, kernels: MessageKernels) -> Any:
    """Return NCCL's options as the group's, which --nccl-communicator-config-path may give."""
    options = dist.ProcessGroupNCCL.Options()
    unset = options.config.max_ctas
    if timeout := compat.group_timeout(theirs):
        options._timeout = timeout  # else torch warns of two
    options.is_high_priority_stream = kernels.high_priority or theirs.is_high_priority_stream
    options.config = theirs.config  # a copy
    if theirs.config.max_ctas == unset:
        options.config.max_ctas = max(kernels.ctas, theirs.config.min_ctas)
    return options
