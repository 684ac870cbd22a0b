"""Data for the training tests, made by the first rank."""

from pathlib import Path


def prepare_on_first(prefix: Path) -> None:
    """Runs on each rank: a small data set of real text is there behind it."""
    import prepare_data
    import torch.distributed as dist

    if dist.get_rank() == 0:
        prepare_data.prepare(prefix, max_bytes=500_000)
    dist.barrier()
