"""Megatron-Bridge: a recipe's configuration made ready for a schedule of ours.

from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron_zbpp import bridge

bridge.enable(config, 'zb-v')  # config: a recipe's, after all changes to it
pretrain(config, forward_step)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_zbpp.ir import Schedule
    from megatron_zbpp.mcore.plugin import Plugin

__all__ = ['enable']


def enable(
    config: Any, schedule: str | Schedule = 'zb-h1', num_chunks: int | None = None, **options: Any
) -> Plugin:
    """Enable `schedule` for Megatron-Bridge, and write what it needs into `config`.

    That is the layout of the layers and the number of chunks a rank. Call it last, before
    `pretrain(config, forward_step)` or `finetune`.

    Args:
        config: a `ConfigContainer`. A layout of its own must have as many stages as the schedule,
            in model order; `virtual_pipeline_model_parallel_size` is the number of chunks of a
            schedule that leaves the choice.
        schedule: as for `megatron_zbpp.enable`.
        num_chunks: likewise.
        **options: likewise, but for `flags`: those are what `config` has.

    Returns:
        The plugin, as `megatron_zbpp.enable` does.

    Raises:
        ValueError: a setting that cannot work, with the cure.
        NotImplementedError: a setting that is refused, with the cure.
    """
    from megatron_zbpp.mcore import enabled
    from megatron_zbpp.mcore.bridge import prepare
    from megatron_zbpp.mcore.options import made_by
    from megatron_zbpp.mcore.settings import Settings

    settings = made_by('bridge.enable', Settings, schedule, num_chunks, **options)
    job = prepare(config, settings)
    assert job.settings is not None
    return enabled.switch(job.settings, job.programs, job.names)
