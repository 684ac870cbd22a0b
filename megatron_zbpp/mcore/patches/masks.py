"""Attention masks for every chunk, where documents are not to attend to each other.

NVIDIA's scripts read batches on the first and the last stage alone; layers between would take the
plain causal mask. By Megatron's 1F1B on two ranks both stages are such ends, and all layers have
the masks. With several chunks a rank the stages between read them, too: see `needs_masks`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from megatron.core import parallel_state

from megatron_zbpp.ir import Placement
from megatron_zbpp.mcore import compat, model_settings
from megatron_zbpp.mcore.patches.registry import Patch


def patches(placement: Callable[[int], Placement]) -> Iterator[Patch]:
    """Yield what NVIDIA's scripts ask before they read a batch, and before they build its data.

    Args:
        placement: of a number of pipeline ranks.
    """

    def ours(original: Callable) -> Callable:
        @functools.wraps(original)
        def is_first_or_last_pipeline_stage(vp_stage: int | None) -> bool:
            return original(vp_stage) or given_to_all(placement)

        return is_first_or_last_pipeline_stage

    name = 'is_first_or_last_pipeline_stage'
    yield Patch('megatron.training.utils', name, ours, everywhere=True, late=True)


def given_to_all(placement: Callable[[int], Placement]) -> bool:
    """Return whether every chunk is given the masks of its batches.

    Args:
        placement: of a number of pipeline ranks.
    """
    ranks = parallel_state.get_pipeline_model_parallel_world_size()
    chunks = placement(ranks).num_chunks if ranks > 1 else 1
    return chunks > 1 and model_settings.needs_masks(compat.training_arguments())
