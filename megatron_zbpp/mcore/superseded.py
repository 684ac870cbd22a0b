"""Megatron's settings for what a schedule of ours does by itself: they are taken back, and said."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

DEFERRED = 'defer_embedding_wgrad_compute'
_SETTINGS = {DEFERRED: 'the schedule places all W passes'}
# with W passes; without, Megatron's combined step delays them
_WITH_W = {'delay_wgrad_compute': 'the schedule places all W passes'}
NAMES = (*_SETTINGS, *_WITH_W)


def drop(settings: Any, splits: bool = False) -> Iterator[str]:
    """Take back what is set of them; yield in words what has no effect, and why.

    Args:
        settings: Megatron's arguments or config, before a model is built.
        splits: whether the schedule has W passes.
    """
    for name, why in (_SETTINGS | (_WITH_W if splits else {})).items():
        if getattr(settings, name, False):
            setattr(settings, name, False)
            yield f'--{name.replace("_", "-")} has no effect: {why}'


def require_none(config: Any) -> None:
    """Raise where a model has been built with one of them: it keeps gradients to itself.

    Raises:
        NotImplementedError: names it, and the cure.
    """
    for name in _SETTINGS:
        if getattr(config, name, False):
            raise NotImplementedError(
                f'{name}=True, and the model was built so, without the plugin: call '
                'megatron_zbpp.enable() before the model is built, which takes it back'
            )
