"""Host memory that an offload needs, compared with what the host has."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping

from megatron_zbpp.analysis.memory import live
from megatron_zbpp.ir import Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.graph import HOST
from megatron_zbpp.mcore.command_line.layer_memory import layer_memory
from megatron_zbpp.runtime.activations import host

_SURE = 0.9  # of what is reckoned: that much leaves, whatever small tensors stay


def require_host_memory(
    args: Namespace, schedule: Schedule, environment: Mapping[str, str]
) -> None:
    """Return unless activations of all ranks of this node cannot be on the host.

    Args:
        args: Megatron's, not validated.
        schedule: in Megatron's ranks.
        environment: of torchrun; without it nothing is known of the node.

    Raises:
        ValueError: more is needed than the host has; with what could be done.
    """
    names = ('RANK', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'WORLD_SIZE')
    if not any(on_host(schedule, 1.0)) or any(name not in environment for name in names):
        return
    layer, room = layer_memory(args), host.room()
    if layer is None or room is None:
        return
    rank, local, on_node, size = (int(environment[name]) for name in names)
    held = on_host(schedule, layer.activation * args.num_layers / schedule.num_stages)
    replicas = max(1, size // schedule.num_ranks)  # pipeline ranks are the outermost
    first = rank - local
    needed = sum(held[(each // replicas) % len(held)] for each in range(first, first + on_node))
    if _SURE * needed > room.nbytes:
        raise ValueError(
            f'{schedule.name} needs about {needed / 2**30:.3g} GiB of host memory for the '
            f'{on_node} ranks of this node, which has {room} left: offload fewer chunks, put '
            'fewer of the first pipeline ranks on one node, or give the job more memory'
        )


def on_host(schedule: Schedule, activation: float) -> tuple[float, ...]:
    """Return the most bytes that each rank has on the host.

    Args:
        schedule: any.
        activation: bytes of a microbatch on one stage.
    """
    costs = Costs.uniform(schedule.placement)
    each = (activation,) * schedule.num_stages
    costs = costs.with_amounts(activation=each, retained=each)
    return tuple(max(held, default=0.0) for held in live(schedule, costs, HOST))
