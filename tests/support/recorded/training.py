"""Trainings of `models` on the recorded device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import models

from recorded.communicators import Operation


@dataclass(frozen=True)
class Recorded:
    trained: models.Trained | None  # what `models.train` returns; None of another training
    races: dict[str, int]  # in words, and how often
    kernels: Counter[tuple[str, int, str]]  # by (kind of pass, stream, name), how many
    waits: Counter[tuple[str, str]]  # of the host, by (what, pass), how many
    operations: list[Operation]  # of communicators, in order
    planned: int  # see `ordering.Order`
    in_passes: int
    held: int
    late: dict[str, int]


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
    import pretrain_gpt

    wrapped = _on_side_stream(pretrain_gpt.DDP)
    with mock.patch.object(pretrain_gpt, 'DDP', wrapped), recording() as recorded:
        trained = models.train(job, argv)
    return replace(recorded[0], trained=trained)


@contextmanager
def recording() -> Iterator[list[Recorded]]:
    """Record what Megatron trains meanwhile; what was recorded is in the list behind that."""
    from recorded import device, groups

    groups.operations.clear()
    found: list[Recorded] = []
    with device.passes(), device.recording() as order:
        yield found
    found.append(
        Recorded(
            None,
            {str(race): times for race, times in order.races.items()},
            Counter(
                (''.join(filter(str.isalpha, use.within)), use.stream, use.kernel)
                for use in order.uses
            ),
            Counter((wait.what, wait.within) for wait in order.waits),
            list(groups.operations),
            order.planned,
            order.in_passes,
            order.held,
            dict(order.late),
        )
    )
