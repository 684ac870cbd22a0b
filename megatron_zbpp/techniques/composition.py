"""Which techniques go together: one table, for errors, `zbpp` and the docs alike."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from megatron_zbpp.ir import Schedule
from megatron_zbpp.ir.graph import PARTNER, Applied
from megatron_zbpp.schedules.registry import ASYNCHRONOUS, Family
from megatron_zbpp.techniques import NAMES


class Clash(NamedTuple):
    """A pair that does not go together."""

    reason: str  # why the second cannot be added to a schedule that has the first
    cure: str  # what to do


OVERLAP = 'overlap'  # pairs of F and BW that a model runs as one: not of the graph
SEEDS = 'dropout_seeds'  # of each layer and microbatch: likewise

# By the name of their graph's function: optimizer steps without a flush, slices of a sequence, the
# output layer on all ranks, and the word embedding on all ranks beside it.
UPDATING, SLICED = 'updating', 'sliced'
VOCABULARY, EMBEDDING = 'split_vocabulary', 'split_embedding'
OUTPUT, BOTH = SHARED_LAYERS = 'output', 'input+output'  # that all ranks share, as users ask
# techniques that share these layers, in the order in which they are put into a schedule
LAYERS_OF = {None: (), OUTPUT: (VOCABULARY,), BOTH: (VOCABULARY, EMBEDDING)}
# Techniques that train, each by itself. Others are planned, simulated and drawn.
TRAINED = (*NAMES, SLICED, OVERLAP, VOCABULARY, EMBEDDING)
ADDED = (*NAMES, VOCABULARY, EMBEDDING)  # to the orders of a schedule
# families that train what others plan, in an order that Megatron's optimizers allow
TRAINED_BY = {'wpipe': 'wpipe-joint'}

_UNTRAINED = {
    UPDATING: Clash(
        'asynchronous updates',
        f'take a synchronous schedule, such as zb-v, or by its name {", ".join(ASYNCHRONOUS)}',
    ),
    'exchanging_context': Clash(
        'context exchange',
        'make it without --context-exchange, of slices that take equal times: --slices balanced:N',
    ),
}
_ONCE = Clash('it is placed once', 'leave it out')
_LATE = Clash(
    'copies were given times without passes that run again',
    'take a schedule without it, such as po or 1f1b, and ask for both',
)
_NO_PLAN = 'Megatron makes no plan of the layers of a forward that runs again'
_FREED = 'Megatron frees what layers of such a pair pass to each other before it could be elsewhere'
_PLAIN = Clash('shards are put between F, B and W alone', 'take a schedule of these, such as zb-v')
_APART = Clash(
    'shards run between passes, and such a pair has no between',
    'drop {overlap_moe_expert_parallel_comm}, or leave out {vocab_parallel}',
)
_MOVED = Clash(
    'what goes to partners does not go to the host as well',
    'take a schedule that moves nothing, such as 1f1b',
)
CLASHES: Mapping[tuple[str, str], Clash] = {
    **{(name, name): _ONCE for name in ADDED},
    (EMBEDDING, VOCABULARY): _ONCE,
    **{(name, shards): _PLAIN for name in NAMES for shards in (VOCABULARY, EMBEDDING)},
    **{(OVERLAP, shards): _APART for shards in (VOCABULARY, EMBEDDING)},
    **{
        (OVERLAP, name): Clash(
            reason,
            f'drop {{overlap_moe_expert_parallel_comm}}, or take a schedule without {name}',
        )
        for name, reason in {'recompute': _NO_PLAN, 'offload': _FREED, 'evict': _FREED}.items()
    },
    ('offload', 'recompute'): _LATE,
    ('evict', 'offload'): _MOVED,
}
"""By the technique that a schedule has and the one that is to be added. A schedule may have pairs
whatever is added: a model that runs them one after the other trains."""


def name_of(applied: Applied) -> str:
    """Return by which name of the table a graph's technique goes."""
    return 'evict' if applied.arguments[-1:] == (PARTNER,) else applied.name


def techniques_of(schedule: Schedule) -> frozenset[str]:
    """Return the names of the techniques that a schedule has."""
    return frozenset(map(name_of, schedule.graph.techniques))


def techniques_of_family(family: Family, num_slices: int) -> frozenset[str]:
    """Return the names of the techniques that a family's schedules of so many slices can have."""
    own = {
        SLICED: max(num_slices, family.default_slices) > 1,
        UPDATING: family.asynchronous,
        OVERLAP: 'together' in family.options,
    }
    return frozenset(name for name, has in own.items() if has)


def require_trained(schedule: Schedule) -> None:
    """Raise ValueError for a schedule with what is simulated only; it says the cure."""
    _require(schedule.name, techniques_of(schedule))


def require_family_trained(family: Family) -> None:
    """Raise ValueError for a family whose schedules are simulated only; it says the cure."""
    trained = not family.asynchronous or family.name in ASYNCHRONOUS
    _require(family.name, set() if trained else {UPDATING})


def _require(schedule: str, techniques: AbstractSet[str]) -> None:
    for name in sorted(techniques & _UNTRAINED.keys()):
        what, cure = _UNTRAINED[name]
        raise ValueError(f'{schedule} has {what}: simulated, does not train yet: {cure}')


def require_goes_with(schedule: Schedule, name: str) -> None:
    """Raise ValueError if a technique cannot be added to what a schedule has; it says the cure."""
    for has in sorted(techniques_of(schedule)):
        clash = CLASHES.get((has, name))
        if clash is not None:
            raise ValueError(
                f'{name}: {schedule.name} has {has} already, and {clash.reason}: {clash.cure}'
            )


def table() -> str:
    """Return the docs' table of all pairs: a schedule has the row's, the column's is added."""
    lines = [f'| has, added | {" | ".join(ADDED)} |', '|---' * (1 + len(ADDED)) + '|']
    for has in (*TRAINED, SEEDS):
        cells = (CLASHES.get((has, name)) for name in ADDED)
        words = ('to the bit' if clash is None else f'refused: {clash.reason}' for clash in cells)
        lines.append(f'| {has} | {" | ".join(words)} |')
    return '\n'.join(lines)
