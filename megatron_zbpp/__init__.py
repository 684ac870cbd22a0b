"""Pipeline schedules for unmodified Megatron-Core.

import megatron_zbpp

plugin = megatron_zbpp.enable('zb-v')   # before the model is built
...
plugin.disable()
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_zbpp.ir import Schedule
    from megatron_zbpp.mcore.plugin import Plugin

__version__ = '0.1.0'
__all__ = ['__version__', 'enable']

_enabled: Plugin | None = None


def enable(schedule: str | Schedule = 'zb-h1', num_chunks: int | None = None) -> Plugin:
    """Makes Megatron-Core's pipelined forward_backward functions run `schedule`.

    Calling it again with the same arguments changes nothing; with others it switches.

    Args:
        schedule: a name or alias of a schedule (`zbpp list` prints them), or a schedule itself.
        num_chunks: stages a rank, for schedules that leave the choice.

    Returns:
        The plugin: `disable()` undoes everything, as does leaving its `with` block.

    Raises:
        ValueError: no such schedule; the message names the known ones.
    """
    global _enabled
    from megatron_zbpp.mcore.plugin import Plugin

    plugin = Plugin(schedule, num_chunks)
    if _enabled is not None and _enabled.enabled:
        if _enabled.source == plugin.source:
            return _enabled
        _enabled.disable()
    plugin.install()
    _enabled = plugin
    return plugin
