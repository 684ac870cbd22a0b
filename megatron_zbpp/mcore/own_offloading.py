"""Where Megatron's own offloading of activations, by modules of a layer, fits a schedule.

It is told of forwards only, and takes for granted which chunk runs back next: as Megatron's own
schedules have it. Where another does, it ends with an assertion, or brings back the wrong tensors.
"""

from __future__ import annotations

from typing import Any

from megatron_zbpp.ir import BW, B, F, Schedule

SETTING = 'fine_grained_activation_offloading'


def fits(schedule: Schedule) -> bool:
    """Return whether backwards of each rank come as Megatron's own offloading takes them to.

    Of one chunk a rank, in the order of its forwards; with several chunks, releases of Megatron
    differ in what they take for granted. And nothing moves or makes again what forwards have saved
    beside it.
    """
    if schedule.graph.techniques or schedule.placement.num_chunks > 1:
        return False
    return all(
        [p.microbatch for p in order if p.kind == F]
        == [p.microbatch for p in order if p.kind in (B, BW)]
        for order in schedule.passes
    )


def end(config: Any, trained: bool) -> None:
    """Let it forget an iteration that has ended, as Megatron's own functions do.

    Args:
        config: of the model.
        trained: whether an iteration of training has begun; before, what an evaluation has told it
            would be taken for the order of training.
    """
    if getattr(config, SETTING, False):
        from megatron_zbpp.mcore import compat  # imports Megatron, which plans do without

        offloading = compat.offloading()
        (offloading.reset if trained else offloading.reset_instance)()
