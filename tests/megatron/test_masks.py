"""Masks that keep documents apart, in NVIDIA's loop: stages between the ends have them, too."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from grids import grid
from nvidia import needs_training, run, since
from supported import supports
from test_launch import NO_CLIPPING, PIPELINE, TENSOR
from test_launch_post_validation import EARLY

pytestmark = needs_training

ENDS = [254, 255]  # of a document: by the tokenizer of megatron-core 0.19, and of 0.16
RESET = ['--reset-attention-mask', '--reset-position-ids', '--eod-mask-loss']


@pytest.fixture
def documents(ranks, tmp_path) -> list[str | Path]:
    """Flags that name documents much shorter than a sample."""
    ranks(2).run(write_documents, tmp_path / 'text')
    return ['--data-path', tmp_path / 'text']


def write_documents(prefix: Path) -> None:
    """Runs on each rank: the first one writes."""
    import nvidia

    nvidia._find_megatron()
    import numpy
    import torch
    import torch.distributed as dist
    from megatron.core.datasets import indexed_dataset

    if dist.get_rank():
        return
    draw = random.Random(7)
    files = indexed_dataset.get_bin_path(str(prefix)), indexed_dataset.get_idx_path(str(prefix))
    builder = indexed_dataset.IndexedDatasetBuilder(files[0], dtype=numpy.uint16)
    for _ in range(100):
        words = draw.choices(range(ENDS[0]), k=draw.randint(2, 8))
        builder.add_item(torch.tensor([*words, *ENDS]))
        builder.end_document()
    builder.finalize(files[1])


@supports("NVIDIA's loop: masks between documents")
@grid(schedule=('zb-v', 'zb-interleaved', 'zb-v+post-validation'), tensor=(False, True, False))
def test_identical_to_megatron(ranks, documents, tmp_path, schedule, tensor):
    """From a checkpoint of Megatron's own 1F1B, both of whose stages have the masks."""
    name, _, early = schedule.partition('+')
    size = 4 if tensor else 2
    flags = [*PIPELINE, *NO_CLIPPING, *documents, *(TENSOR if tensor else []), '--train-iters', 4]
    stock = run(ranks(size), *flags, *RESET, '--save', tmp_path, '--save-interval', 1)
    assert len(set(stock.losses.values())) == 4
    ours = ['--load', tmp_path, '--ckpt-step', 1, '--pipeline-schedule', name]
    found = run(ranks(size), *flags, *RESET, *ours, *(EARLY if early else []))
    assert found.losses == since(1, stock.losses)
    assert found.parameters == stock.parameters
    if tensor:
        return
    plain = run(ranks(size), *flags, *RESET[1:], *ours)
    assert plain.losses != found.losses, 'masks make a difference'
