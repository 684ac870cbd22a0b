"""Megatron-Bridge: a recipe's configuration made ready for a schedule of ours.

from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron_zbpp import bridge

bridge.enable(config, 'zb-v')  # config: a recipe's, after all changes to it
pretrain(config, forward_step)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import megatron_zbpp

if TYPE_CHECKING:
    from megatron_zbpp.ir import Schedule
    from megatron_zbpp.mcore.plugin import Plugin
    from megatron_zbpp.techniques.amounts import Amount

__all__ = ['enable']


def enable(
    config: Any,
    schedule: str | Schedule = 'zb-h1',
    num_chunks: int | None = None,
    *,
    memory_limit: float | None = None,
    post_validation: bool | int = False,
    offload: Amount | None = None,
    recompute: Amount | None = None,
    **options: Any,
) -> Plugin:
    """Enable `schedule` for Megatron-Bridge, and write what it needs into `config`.

    That is the layout of the layers and the number of chunks a rank. Call it last, before
    `pretrain(config, forward_step)` or `finetune`.

    Args:
        config: a `ConfigContainer`. A layout of its own must have as many stages as the schedule,
            in model order; `virtual_pipeline_model_parallel_size` is the number of chunks of a
            schedule that leaves the choice.
        schedule: as for `megatron_zbpp.enable`, as are the others.
        num_chunks: chunks a rank.
        memory_limit: in activations.
        post_validation: whether optimizer steps are validated later.
        offload: activations that go to the host.
        recompute: forwards that run again.
        **options: the rest.

    Returns:
        The plugin, as `megatron_zbpp.enable` does.

    Raises:
        ValueError: a setting that cannot work, with the cure.
        NotImplementedError: a setting that is refused, with the cure.
    """
    from megatron_zbpp.mcore.bridge import prepare

    chunks, flags = prepare(
        config, schedule, num_chunks, memory_limit, post_validation, offload, recompute
    )
    return megatron_zbpp.enable(
        schedule,
        chunks,
        memory_limit=memory_limit,
        post_validation=post_validation,
        offload=offload,
        recompute=recompute,
        flags=flags,
        **options,
    )
