"""Every schedule by its paper's name, and those of your own.

    >>> from megatron_zbpp.schedules import build, names
    >>> ' '.join(map(str, build('zb-h1', num_ranks=2, num_microbatches=2).passes[1]))
    '1F0 1B0 1F1 1B1 1W0 1W1'

Adding one: a file with a pure function under `@family`, a line in the registry's table, a formula
test. One of your own needs no line: `build('package.module:name', ...)` imports its module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_zbpp.ir import Schedule, strict_json
from megatron_zbpp.schedules.registry import (
    Family,
    Formula,
    Sizes,
    families,
    family,
    find,
    own_families,
)

if TYPE_CHECKING:
    from megatron_zbpp.ir.costs import Costs

    FAMILIES: tuple[Family, ...]

__all__ = ['FAMILIES', 'Family', 'Formula', 'Sizes', 'build', 'families', 'family', 'find', 'names']


def __getattr__(name: str) -> object:
    """Return `FAMILIES`: the library's own families, in the order of `zbpp list`, imported now."""
    if name != 'FAMILIES':
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return own_families()


def names(plain: bool = False) -> tuple[str, ...]:
    """Return the canonical names of the library's families; `plain`: with F, B and W alone."""
    return tuple(each.name for each in own_families() if not (plain and each.moves))


def build(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    *,
    num_chunks: int | None = None,
    costs: Costs | None = None,
    memory_limit: float | None = None,
    together: bool = False,
    num_slices: int | None = None,
) -> Schedule:
    """Return the schedule of that family for p ranks and m microbatches.

    Args:
        name: of the family, or an alias; case, `-` and `_` do not matter. Of a family of your own
            `package.module:name`, which imports that module.
        num_ranks: p.
        num_microbatches: m.
        num_chunks: v, stages per rank; the family's own default where None.
        costs: times and activations per stage. Families that adapt to times use them, others have
            one order whatever the times.
        memory_limit: most that a rank may hold, in the unit of `costs.amounts`; without costs,
            in activations of one microbatch on a full rank.
        together: pairs of F and BW run as one, for families that have such pairs.
        num_slices: n, slices of each sequence, for families of slices; the family's own default
            where None. `techniques.slices.place.in_slices` cuts any family.

    Raises:
        ValueError: an unknown name, a value that the family cannot take, or a family of somebody
            else's that makes no such schedule.
    """
    strict_json.require_whole(num_ranks=num_ranks, num_microbatches=num_microbatches)
    found = find(name)
    if num_ranks < found.min_ranks:
        raise ValueError(
            f'{found.name} needs at least {found.min_ranks} ranks, not {num_ranks}: '
            'use more pipeline ranks or another schedule, such as 1f1b'
        )
    if num_microbatches < 1:
        raise ValueError(f'num_microbatches is {num_microbatches}: give at least 1')
    chunks = checked_chunks(found, num_chunks)
    if costs is not None and costs.num_stages != num_ranks * chunks:
        raise ValueError(
            f'costs are of {costs.num_stages} stages, but this {found.name} has '
            f'{num_ranks * chunks}: give one entry per stage, in model order'
        )
    require_no_limit(found, memory_limit)
    if together and 'together' not in found.options:
        takers = ', '.join(f.name for f in own_families() if 'together' in f.options)
        raise ValueError(
            f'{found.name} has no forwards and backwards that run together: use {takers}'
        )
    slices = found.default_slices if num_slices is None else num_slices
    if slices < 1 or (slices > 1 and 'num_slices' not in found.options):
        raise ValueError(
            f'{found.name} cannot have {slices} slices: it takes '
            + ('1 or more' if 'num_slices' in found.options else 'whole sequences')
        )
    options = {
        'num_chunks': chunks,
        'costs': costs,
        'memory_limit': memory_limit,
        'together': together,
        'num_slices': slices,
    }
    taken = {key: value for key, value in options.items() if key in found.options}
    schedule: Any = found.generate(num_ranks, num_microbatches, **taken)
    if not isinstance(schedule, Schedule):
        raise ValueError(f'{found.name} made {type(schedule).__name__}: return a Schedule from it')
    ranks, m = schedule.num_ranks, schedule.num_microbatches
    several_calls = found.asynchronous and m % num_microbatches == 0
    if ranks != num_ranks or (m != num_microbatches and not several_calls):
        raise ValueError(
            f'{found.name} made a schedule of {ranks} ranks and {m} microbatches: return one of '
            f'the {num_ranks} and {num_microbatches} that it was asked for'
        )
    return schedule


def checked_chunks(found: Family, num_chunks: int | None, cure: str | None = None) -> int:
    """Return the number of chunks to use."""
    if num_chunks is None:
        return found.default_chunks
    if num_chunks not in found.chunks:
        first, step = found.chunks.start, found.chunks.step
        can = f'exactly {first}' if len(found.chunks) == 1 else f'{first}, {first + step}, ...'
        cure = cure or (
            'leave the number (num_chunks, --vpp, or --num-virtual-stages-per-pipeline-rank) out '
            f'for {found.default_chunks}'
        )
        raise ValueError(
            f'{found.name} cannot have {num_chunks} chunks per rank: it takes {can}; {cure}'
        )
    return num_chunks


def require_no_limit(found: Family, memory_limit: float | None, name: str = 'memory_limit') -> None:
    """Raise ValueError for a memory limit, given by `name`, that the family would not heed."""
    if memory_limit is not None and 'memory_limit' not in found.options:
        takers = ', '.join(f.name for f in own_families() if 'memory_limit' in f.options)
        raise ValueError(
            f'{found.name} has one peak memory and takes no {name} (given {memory_limit}): '
            f'leave it out, or use one that does: {takers}'
        )
