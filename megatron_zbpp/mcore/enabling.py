"""`megatron_zbpp.enable`: its arguments are the fields of `Settings`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_zbpp.mcore import enabled
from megatron_zbpp.mcore.options import with_options_of
from megatron_zbpp.mcore.settings import OPTIONS, Settings

if TYPE_CHECKING:
    from megatron_zbpp.mcore.plugin import Plugin


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
    return enabled.enable(settings)
