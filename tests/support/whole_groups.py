"""Our interleaved schedule with Megatron's own restriction, which NVIDIA's tests ask for."""

from megatron_zbpp import Schedule, build
from megatron_zbpp.schedules.registry import TWO, family


@family('interleaved', chunks=TWO)
def interleaved(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Ours, which takes any number of microbatches."""
    if num_microbatches > num_ranks and num_microbatches % num_ranks:
        raise RuntimeError(f'{num_microbatches} microbatches are no multiple of {num_ranks} ranks')
    return build('interleaved', num_ranks, num_microbatches, num_chunks=num_chunks)
