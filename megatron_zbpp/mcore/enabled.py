"""The one plugin that this process has enabled, for all who ask: the only thing global here.

Megatron is imported when the first one is.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_zbpp.mcore.plugin import Plugin
    from megatron_zbpp.mcore.settings import Settings

plugin: Plugin | None = None


def enable(settings: Settings) -> Plugin:
    """Enable a plugin with these settings, unless it is enabled.

    Args:
        settings: what is asked for; without flags of the program, those of before stay.

    Raises:
        ValueError: settings that make no sense, or a plugin with others is enabled; that stays.
    """
    global plugin
    from megatron_zbpp.mcore.plugin import Plugin
    from megatron_zbpp.runtime.guard import agreement

    if plugin is None or not plugin.enabled:
        other = Plugin(settings)
        other.install()
        plugin = other
    for name in (each.name for each in fields(settings) if each.compare):
        before, now = getattr(plugin.settings, name), getattr(settings, name)
        if before != now:
            before, now = (getattr(each, 'name', each) for each in (before, now))
            raise ValueError(
                f'{name} is {now}, but a plugin is enabled with {before}: call its disable() first'
            )
    if settings.flags is not None:
        plugin.session.flags = agreement.comparable_flags(settings.flags)
    return plugin
