"""Megatron's settings beside a schedule: refused, ignored, or a barrier between steps.

The flags, `zbpp doctor`, Megatron Bridge and each first call of a size ask, of one table
(`job.rules_table`). `megatron_zbpp.enable` sees none of Megatron's settings: its first call asks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pkgutil import resolve_name
from typing import Any

from megatron_zbpp.emulation import cpu, te
from megatron_zbpp.ir import Placement
from megatron_zbpp.mcore import own_offloading
from megatron_zbpp.mcore.job import rules_table
from megatron_zbpp.mcore.job.rules import Context, Refusal, check
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
    by_bridge: bool = False,
    others: Any = (),
) -> tuple[Refusal, ...]:
    """Return all that is refused.

    Args:
        settings: Megatron's arguments or config; settings that it lacks are not set.
        programs: of the schedule.
        num_ranks: pipeline ranks.
        num_microbatches: of an iteration; None: any number.
        on_cpu: also what only a GPU can.
        with_te: on a CPU, Transformer Engine is there, its kernels emulated.
        by_bridge: also what Megatron-Bridge has otherwise.
        others: a tuple of objects that have settings which `settings` lacks.

    Raises:
        ValueError: sequences cannot be sliced so.
    """
    programs.cuts(settings, getattr(settings, 'seq_length', None))
    offloads = bool(getattr(settings, own_offloading.SETTING, False))
    context = Context(
        (settings, *others),
        on_cpu,
        with_te,
        programs.placement(num_ranks),
        programs.splits(num_ranks),
        programs.techniques(num_ranks),
        programs.joins,
        offloads and programs.in_order(num_ranks, num_microbatches),
        programs.mirrored(num_ranks),
        programs.seeded,
        by_bridge,
    )
    return tuple(check(context, rules_table.REFUSALS))


def barriers(settings: Any, placement: Placement) -> Iterator[str]:
    """Yield settings that make ranks wait although optimizer steps do not, with the cure."""
    yield from map(str, check(Context((settings,), placement=placement), rules_table.BARRIERS))


def take_back(settings: Any, splits: bool = False) -> Iterator[str]:
    """Take back settings for what the schedule does by itself; yield what has no effect, and why.

    Args:
        settings: Megatron's arguments or config, before a model is built.
        splits: whether the schedule has W passes.
    """
    for each in check(Context((settings,), splits=splits), rules_table.SUPERSEDED):
        setattr(settings, each.setting, False)
        yield f'--{each.setting.replace("_", "-")} has no effect: {each.reason}'


def require_taken_back(config: Any) -> None:
    """Raise where a model has been built with such a setting: it keeps gradients to itself.

    Raises:
        NotImplementedError: names it, and the cure.
    """
    for each in check(Context((config,), splits=False), rules_table.SUPERSEDED):
        raise NotImplementedError(
            f'{each.setting}=True, and the model was built so, without the plugin: call '
            'megatron_zbpp.enable() before the model is built, which takes it back'
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
