"""Patches of Megatron-Bridge's checkpoints; `bridge_files`, which they call, comes with Bridge."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from megatron_zbpp.mcore.patches.registry import Patch
from megatron_zbpp.mcore.session import Session

_BRIDGE = 'megatron.bridge.training.checkpointing'


def patches(session: Session) -> Iterator[Patch]:
    """Yield what saves and loads Bridge's checkpoints."""
    saves, loads = f'{_BRIDGE}:save_checkpoint', f'{_BRIDGE}:_load_checkpoint_from_path'
    writes, compares = (_for_bridge(session, name) for name in ('with_layout', 'comparing'))
    yield Patch(_BRIDGE, 'generate_state_dict', writes, (saves,), late=True)
    yield Patch(_BRIDGE, '_load_base_checkpoint', compares, (loads,), late=True)


def _for_bridge(session: Session, name: str) -> Callable[[Any], Any]:
    """Return the wrapper of that name in `bridge_files`, which is imported when Bridge is."""

    def wrapped(original: Any) -> Any:
        from megatron_zbpp.mcore.patches import bridge_files

        return getattr(bridge_files, name)(session, original)

    return wrapped
