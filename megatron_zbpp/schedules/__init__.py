"""Every synchronous schedule by its paper's name.

    >>> from megatron_zbpp.schedules import build, names
    >>> ' '.join(map(str, build('zb-h1', num_ranks=2, num_microbatches=2).passes[1]))
    '1F0 1B0 1F1 1B1 1W0 1W1'

Adding one: a file with one pure function and its `Family`, an entry in `FAMILIES`, a formula test.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from megatron_zbpp.ir import Schedule
from megatron_zbpp.schedules import (
    breadth_first,
    dualpipe_v,
    gis,
    gpipe,
    hanayo,
    interleaved,
    one_f_one_b,
    v_1f1b,
    v_controlled,
    zb_auto,
    zb_h,
    zb_interleaved,
    zb_v,
    zeropp,
)
from megatron_zbpp.schedules.family import Family

if TYPE_CHECKING:
    from megatron_zbpp.ir.costs import Costs

__all__ = ['FAMILIES', 'Family', 'build', 'find', 'names']

FAMILIES: tuple[Family, ...] = (
    gpipe.FAMILY,
    one_f_one_b.FAMILY,
    interleaved.FAMILY,
    breadth_first.FAMILY,
    *zb_h.FAMILIES,
    *zb_auto.FAMILIES,
    zb_v.FAMILY,
    *v_controlled.FAMILIES,
    v_1f1b.FAMILY,
    zb_interleaved.FAMILY,
    *gis.FAMILIES,
    hanayo.FAMILY,
    dualpipe_v.FAMILY,
    zeropp.FAMILY,
)


def _key(name: str) -> str:
    """What a look-up compares: neither case nor separators matter."""
    return name.strip().lower().replace('-', '').replace('_', '')


_BY_KEY = {_key(name): family for family in FAMILIES for name in (family.name, *family.aliases)}


def names() -> tuple[str, ...]:
    """Canonical names of all families."""
    return tuple(family.name for family in FAMILIES)


def find(name: str) -> Family:
    """The family of that name or alias.

    Raises:
        ValueError: none has it; the message names the known ones and the nearest match.
    """
    family = _BY_KEY.get(_key(name))
    if family is None:
        near = difflib.get_close_matches(_key(name), _BY_KEY, n=1)
        hint = f' (did you mean {_BY_KEY[near[0]].name!r}?)' if near else ''
        raise ValueError(f'unknown schedule {name!r}{hint}: known are {", ".join(names())}')
    return family


def build(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    *,
    num_chunks: int | None = None,
    costs: Costs | None = None,
    memory_limit: float | None = None,
) -> Schedule:
    """The schedule of that family for p ranks and m microbatches.

    Args:
        name: of the family, or an alias; case, `-` and `_` do not matter.
        num_ranks: p.
        num_microbatches: m.
        num_chunks: v, stages per rank; the family's own default where None.
        costs: times and activations per stage. Families that adapt to times use them, others have
            one order whatever the times.
        memory_limit: most that a rank may hold, in the unit of `costs.activation`; without costs,
            in activations of one microbatch on a full rank.

    Raises:
        ValueError: an unknown name, or a value that the family cannot take.
    """
    family = find(name)
    if num_ranks < family.min_ranks:
        raise ValueError(
            f'{family.name} needs at least {family.min_ranks} ranks, not {num_ranks}: '
            'use more pipeline ranks or another schedule, such as 1f1b'
        )
    if num_microbatches < 1:
        raise ValueError(f'num_microbatches is {num_microbatches}: give at least 1')
    chunks = _checked_chunks(family, num_chunks)
    _require_costs(family, costs, num_ranks * chunks)
    _require_no_limit(family, memory_limit)
    options = {'num_chunks': chunks, 'costs': costs, 'memory_limit': memory_limit}
    taken = {key: value for key, value in options.items() if key in family.options}
    return family.generate(num_ranks, num_microbatches, **taken)


def _checked_chunks(family: Family, num_chunks: int | None) -> int:
    """The number of chunks to use."""
    if num_chunks is None:
        return family.default_chunks
    if num_chunks not in family.chunks:
        first, step = family.chunks.start, family.chunks.step
        can = f'exactly {first}' if len(family.chunks) == 1 else f'{first}, {first + step}, ...'
        raise ValueError(
            f'{family.name} cannot have {num_chunks} chunks per rank: '
            f'it takes {can}; leave num_chunks out for {family.default_chunks}'
        )
    return num_chunks


def _require_costs(family: Family, costs: Costs | None, num_stages: int) -> None:
    """Raises ValueError unless costs, if given, are of as many stages as the schedule."""
    if costs is not None and len(costs.forward) != num_stages:
        raise ValueError(
            f'costs are of {len(costs.forward)} stages, but this {family.name} has {num_stages}: '
            'give one entry per stage, in model order'
        )


def _require_no_limit(family: Family, memory_limit: float | None) -> None:
    """Raises ValueError for a memory limit that the family would not heed."""
    if memory_limit is not None and 'memory_limit' not in family.options:
        takers = ', '.join(f.name for f in FAMILIES if 'memory_limit' in f.options)
        raise ValueError(
            f'{family.name} has one peak memory and takes no memory_limit (given {memory_limit}): '
            f'leave it out, or use one that does: {takers}'
        )
