"""Configs whose Transformer Engine modules leave their weight gradients to W."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

from megatron_zbpp.mcore.patches.registry import Patch


def patches(splits: Callable[[int], bool]) -> Iterator[Patch]:
    """Yield what makes configs whose modules leave weight gradients to W.

    Args:
        splits: whether the schedule of so many pipeline ranks has W passes.
    """
    if find_spec('transformer_engine') is not None:
        config = 'megatron.core.transformer.transformer_config:TransformerConfig'
        yield Patch(config, '__post_init__', functools.partial(_delaying, splits))


def _delaying(splits: Callable[[int], bool], original: Callable) -> Callable:
    """Run `TransformerConfig.__post_init__`; let Transformer Engine leave gradients to W."""

    @functools.wraps(original)
    def __post_init__(self: Any) -> None:
        split = self.pipeline_model_parallel_size > 1 and splits(self.pipeline_model_parallel_size)
        if split:
            self.delay_wgrad_compute = False  # a copy has it, and Megatron would refuse it
        original(self)
        if split:
            delay_weight_gradients(self)

    return __post_init__


def delay_weight_gradients(config: Any) -> None:
    """Make TE modules built from `config` leave their weight gradients to `backward_dw`.

    To be called between the construction of the config, which refuses the setting without
    `overlap_moe_expert_parallel_comm`, and that of the model.

    Raises:
        NotImplementedError: TE cannot delay weight gradients with userbuffers.
    """
    if config.tp_comm_overlap:
        raise NotImplementedError(
            'tp_comm_overlap does not work with schedules that split the backward: Transformer '
            'Engine cannot delay weight gradients with userbuffers; drop --tp-comm-overlap'
        )
    config.delay_wgrad_compute = True
