"""The one plugin that this process has enabled, for all who ask: the only thing global here.

Megatron is imported when the first one is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_zbpp.mcore.plugin import Plugin
    from megatron_zbpp.mcore.settings import Settings

plugin: Plugin | None = None


def switch(settings: Settings) -> Plugin:
    """Enable a plugin with these settings, unless it is enabled; undo one with others.

    Args:
        settings: what is asked for; without flags of the program, those of before stay.

    Raises:
        ValueError: settings that make no sense; what is enabled stays.
    """
    global plugin
    from megatron_zbpp.mcore.plugin import Plugin
    from megatron_zbpp.runtime.guard import agreement

    if plugin is None or not plugin.enabled or plugin.settings != settings:
        other = Plugin(settings)  # refuses what makes no sense before anything is undone
        if plugin is not None:
            plugin.disable()
        other.install()
        plugin = other
    if settings.flags is not None:
        plugin.session.flags = agreement.comparable_flags(settings.flags)
    return plugin
