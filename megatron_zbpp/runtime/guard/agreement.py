"""Ranks tell each other their settings before they depend on each other's."""

from __future__ import annotations

import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Mapping
from enum import Enum

import torch.distributed as dist

from megatron_zbpp.ir import Schedule
from megatron_zbpp.runtime.groups import gather_objects


class DisagreementError(ValueError):
    """Ranks have different settings; the message names each, with its values by global rank."""


def fingerprint(value: object) -> str:
    """Return a setting as text that is equal on two ranks exactly if the setting is."""
    if isinstance(value, Schedule):
        return f'{value.name} ({digest(value.to_json())})'
    return str(value)


def digest(text: str) -> str:
    """Return a short hash of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def comparable_flags(flags: Mapping[str, object]) -> dict[str, object]:
    """Return the flags that must be equal on all ranks: plain values, and lists of them.

    What a rank has for itself is left out: its number, and paths, which hosts may have elsewhere.
    """
    found = {}
    for name, value in flags.items():
        values = value if isinstance(value, list | tuple) else (value,)
        has_path = any(isinstance(entry, str) and os.sep in entry for entry in values)
        if _is_plain(value) and not _OWN.search(name) and not has_path:
            found[name] = value
    return found


# flags that say who a rank is, or where it finds and leaves files
_OWN = re.compile(
    r'^(save|load|(local_|node_|group_)?rank)$|(_path|_dir|_file|_folder|_checkpoint|_prefix)s?$'
)


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | Enum)


def gather(settings: Mapping[str, object], group: dist.ProcessGroup) -> dict[int, dict[str, str]]:
    """Return the settings of each global rank of `group`, as text: a collective."""
    own = {name: fingerprint(value) for name, value in settings.items()}
    return dict(zip(dist.get_process_group_ranks(group), gather_objects(own, group), strict=True))


def reasons(own: str | None) -> list[str]:
    """Return the reasons that ranks have for not doing something, `own` too: a collective."""
    return sorted(filter(None, set(gather_objects(own))))


def compare(settings: Mapping[int, Mapping[str, str]]) -> None:
    """Raise DisagreementError unless all ranks, by their numbers, have the same settings."""
    names = dict.fromkeys(name for own in settings.values() for name in own)
    lines = []
    for name in names:
        ranks = defaultdict(list)
        for rank, own in settings.items():
            ranks[own.get(name, 'unknown')].append(rank)
        if len(ranks) > 1:
            values = '; '.join(f'{value} on {_ranks(who)}' for value, who in ranks.items())
            lines.append(f'\n  {name}: {values}')
    if lines:
        raise DisagreementError(
            'ranks were started with different settings: give all of them the same' + ''.join(lines)
        )


def agree(settings: Mapping[str, object], group: dist.ProcessGroup) -> None:
    """Raise DisagreementError, on all ranks of `group`, unless their settings are the same."""
    compare(gather(settings, group))


def _ranks(ranks: list[int]) -> str:
    return f'rank{"s" if len(ranks) > 1 else ""} {", ".join(map(str, ranks))}'
