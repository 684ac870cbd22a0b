"""Pipeline schedules for unmodified Megatron-Core.

import megatron_zbpp

plugin = megatron_zbpp.enable('zb-v')   # before the model is built
...
plugin.disable()
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_zbpp.ir import Schedule
    from megatron_zbpp.mcore.plugin import Plugin

__version__ = '0.1.0'
__all__ = ['__version__', 'add_arguments', 'enable']

_enabled: Plugin | None = None


def enable(
    schedule: str | Schedule = 'zb-h1',
    num_chunks: int | None = None,
    *,
    memory_limit: float | None = None,
    watchdog_timeout: float | None = None,
    post_validation: bool | int = False,
) -> Plugin:
    """Makes Megatron-Core's pipelined forward_backward functions run `schedule`.

    Calling it again with equal arguments changes nothing; with others it switches.

    Args:
        schedule: a name or alias of a schedule (`zbpp list` prints them), or a schedule itself; or
            'auto': measures a few iterations and switches to a schedule that is planned for them.
        num_chunks: stages a rank, for schedules that leave the choice.
        memory_limit: in activations of one microbatch on a full rank, for schedules that take one.
        watchdog_timeout: seconds after which a rank whose pipeline no longer moves reports where it
            stands and exits; None or 0: never. Choose several times what an iteration takes.
            Between iterations (checkpoints, say) it has ten times as long, and 600 at least.
        post_validation: whether optimizer steps are taken before all ranks have agreed to them, and
            validated later, once 10 in a row were neither clipped nor skipped; or how many of them.

    Returns:
        The plugin: `disable()` undoes everything, as does leaving its `with` block.

    Raises:
        ValueError: no such schedule, the message names the known ones; or another argument that
            makes no sense.
    """
    global _enabled
    from megatron_zbpp.mcore.plugin import Plugin
    from megatron_zbpp.mcore.settings import Settings

    settings = Settings(schedule, num_chunks, memory_limit, watchdog_timeout, post_validation)
    if _enabled is not None and _enabled.enabled and _enabled.settings == settings:
        return _enabled
    plugin = Plugin(settings)  # refuses what makes no sense before anything is undone
    if _enabled is not None:
        _enabled.disable()
    plugin.install()
    _enabled = plugin
    return plugin


def add_arguments() -> None:
    """Adds our flags to the command line of `megatron.training`, now or once it is imported.

    For a script of Megatron-LM: two lines at its top make it what `megatron_zbpp.launch` makes it.
    """
    from megatron_zbpp.mcore.import_hook import after_import

    def install(_: object) -> None:
        from megatron_zbpp.mcore.command_line import arguments

        arguments.install()

    name = 'megatron.training.arguments'
    if name in sys.modules:
        install(None)
    else:
        after_import({name: install})
