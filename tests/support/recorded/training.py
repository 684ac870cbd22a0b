"""Trainings of `models` on the recorded device."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any
from unittest import mock

import models


@dataclass(frozen=True)
class Recorded:
    """What a training left on a rank, and what its device wrote down.

    Attributes:
        trained: what `models.train` returns.
        races: in words, and how often.
        kernels: of each pass and stream, how many.
        waits: of the host in passes, in words.
        operations: of communicators, in order.
        planned, held: see `ordering.Order`.
    """

    trained: models.Trained
    races: dict[str, int]
    kernels: Counter
    waits: Counter
    operations: list[Any]
    planned: int
    held: int


def _on_side_stream(make: Any) -> Any:
    """Wrap a model on a stream of its own, as NVIDIA's loop does."""

    def wrapped(*args: Any, **options: Any) -> Any:
        import torch

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            made = make(*args, **options)
        torch.cuda.current_stream().wait_stream(stream)
        return made

    return wrapped


def train(job: models.Job, argv: list[str]) -> Recorded:
    """Runs on each rank."""
    import pretrain_gpt

    from recorded import device, groups

    groups.operations.clear()
    wrapped = _on_side_stream(pretrain_gpt.DDP)
    with (
        device.passes(),
        mock.patch.object(pretrain_gpt, 'DDP', wrapped),
        device.recording() as order,
    ):
        trained = models.train(job, argv)
    return Recorded(
        trained,
        {str(race): times for race, times in order.races.items()},
        Counter((use.within[:2], use.stream) for use in order.uses),
        Counter((wait.what, wait.within) for wait in order.waits if wait.within),
        list(groups.operations),
        order.planned,
        order.held,
    )
