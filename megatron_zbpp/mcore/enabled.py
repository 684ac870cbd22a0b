"""The one plugin that this process has enabled, for all who ask: the only thing global here.

Megatron is imported when the first one is.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from megatron_zbpp.mcore.options import ARGUMENTS, Names, with_options_of
from megatron_zbpp.mcore.settings import OPTIONS, Settings

if TYPE_CHECKING:
    from megatron_zbpp.mcore.plugin import Plugin
    from megatron_zbpp.mcore.programs import Programs

plugin: Plugin | None = None


def programs_of(settings: Settings) -> Programs:
    """Return the programs of settings: those of the enabled plugin, if it has the same."""
    from megatron_zbpp.mcore.programs import Programs

    if plugin is not None and plugin.enabled and plugin.settings == settings:
        return plugin.session.programs
    return Programs(settings)


def switch(
    settings: Settings, programs: Programs | None = None, names: Names = ARGUMENTS
) -> Plugin:
    """Enable a plugin with these settings, unless it is enabled, which must have the same.

    Settings without flags of the program leave those of before.
    """
    global plugin
    from megatron_zbpp.mcore.plugin import Plugin
    from megatron_zbpp.runtime.guard import agreement

    if plugin is None or not plugin.enabled:
        other = Plugin(settings, programs)
        other.session.names = names
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


@with_options_of(Settings, OPTIONS)
def enable(settings: Settings) -> Plugin:
    """Make Megatron-Core's pipelined forward_backward functions run `schedule`.

    Calling it again with equal arguments changes nothing; for others `disable()` comes first. The
    default is the best schedule for which a model of one chunk a rank need not change; with two
    chunks a rank 'zb-v' is better.

    Returns:
        The plugin: its `num_chunks` says how many chunks of the model each rank builds; `disable()`
        undoes everything, as does leaving its `with` block.

    Raises:
        ValueError: no such schedule, the message names the known ones; or another argument that
            makes no sense; or another plugin is enabled.
        OSError: the file of `freeze` cannot be read.
    """
    return switch(settings)
