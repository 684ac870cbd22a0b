"""Refusals of Megatron's settings, asked for here by whoever is about to run.

The flags, `zbpp doctor`, Megatron Bridge and each first call of a size ask, of one table
(`refusals`). `megatron_zbpp.enable` sees none of Megatron's settings: its first call asks.
"""

from __future__ import annotations

from collections.abc import Collection
from pkgutil import resolve_name
from typing import Any

from megatron_zbpp.emulation import cpu, te
from megatron_zbpp.mcore import own_offloading, refusals
from megatron_zbpp.mcore.programs import Programs
from megatron_zbpp.mcore.settings import Settings
from megatron_zbpp.techniques.slices.sizes import ToFind


def refused(
    settings: Any,
    programs: Programs,
    num_ranks: int,
    num_microbatches: int | None = None,
    on_cpu: bool = False,
    with_te: bool = False,
) -> tuple[refusals.Refusal, ...]:
    """Return all that is refused.

    Args:
        settings: Megatron's arguments or config: see `refusals.refused`.
        programs: of the schedule.
        num_ranks: pipeline ranks.
        num_microbatches: of an iteration; None: any number.
        on_cpu: also what only a GPU can.
        with_te: on a CPU, Transformer Engine is there, its kernels emulated.

    Raises:
        ValueError: sequences cannot be sliced so.
    """
    programs.cuts(settings, getattr(settings, 'seq_length', None))
    offloads = bool(getattr(settings, own_offloading.SETTING, False))
    return tuple(
        refusals.refused(
            settings,
            on_cpu,
            with_te,
            programs.placement(num_ranks),
            programs.splits(num_ranks),
            programs.techniques(num_ranks),
            programs.joins,
            offloads and programs.in_order(num_ranks, num_microbatches),
            programs.mirrored(num_ranks),
            programs.seeded,
        )
    )


def with_slices(
    settings: Settings, model: Any, num_ranks: int, counts: Collection[int]
) -> tuple[Settings, str]:
    """Return settings with the tokens of slices that are to be found, and what to say of them.

    Settings that have them, or ask for none, stay as they are: see `slice_choice.settled`.
    """
    if not isinstance(settings.sliced, ToFind) or not counts:
        return settings, ''
    settled = resolve_name('megatron_zbpp.mcore.techniques.slice_choice:settled')
    return settled(settings, model, num_ranks, counts)


def machine() -> dict[str, bool]:
    """Return the arguments of `refused` for a job that starts in this process."""
    return {'on_cpu': cpu.installed(), 'with_te': te.installed()}
