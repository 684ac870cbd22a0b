"""Old state that an early step may keep on the device: of what it keeps, it steps once."""

from __future__ import annotations

import torch

from megatron_zbpp.post_validation.speculative_step import KEPT_BYTES

_SPARED = 0.1  # of what is free: memory in parts cannot all be used


def most_kept(device: torch.device, share: float, limit: float | None) -> int:
    """Return bytes that may be kept beside the forwards that run ahead meanwhile.

    No activation is held when this is asked, so all that passes have needed is free, and forwards
    that run ahead need a share of it again.

    Args:
        device: of the optimizer's state.
        share: of what passes have needed at most, that is needed until the step is validated.
        limit: GiB that are kept at most; None: as many as there is memory for.
    """
    found = KEPT_BYTES if device.type != 'cuda' else max(KEPT_BYTES, _free(device, share))
    return found if limit is None else min(found, int(limit * (1 << 30)))


def _free(device: torch.device, share: float) -> int:
    allocated = torch.cuda.memory_allocated(device)
    on_device, _ = torch.cuda.mem_get_info(device)
    free = on_device + torch.cuda.memory_reserved(device) - allocated
    by_passes = torch.cuda.max_memory_allocated(device) - allocated
    return int((1 - _SPARED) * free - min(1.0, share) * by_passes)
