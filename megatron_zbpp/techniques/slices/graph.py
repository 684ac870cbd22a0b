"""WHAT slices of a sequence make of a graph, and HOW LONG they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, cast

from megatron_zbpp.ir.graph import DEVICE, KV, KV_GRADIENT, B, F, Graph, Hold, Need, Task, chain
from megatron_zbpp.ir.techniques import applied, made_of


def sliced(graph: Graph, slices: int, sizes: Sequence[int] = ()) -> Graph:
    """Each sequence is cut into slices (Seq1F1B, arXiv 2406.03488).

    F of a slice needs that of the slice before (its keys and values), B that of the slice behind
    (their gradients). Keys and values of all slices are held from the first F on, their gradients
    from the first B on, which is of the last slice; B of the first slice gives both back.
    """
    sizes = tuple(sizes)
    if slices < 1:
        raise ValueError(f'{slices} slices: give at least 1')
    if sizes and (len(sizes) != slices or min(sizes) < 1):
        raise ValueError(
            f'sizes {", ".join(map(str, sizes))} of {slices} slices: give the tokens of each'
        )
    if graph.num_slices > 1:
        raise ValueError('the graph is sliced already: slice it once')
    needs: dict[Task, tuple[Need, ...]] = {}
    holds: dict[Task, tuple[Hold, ...]] = {}
    for task, old in graph.needs.items():
        for part in range(slices):
            own = task._replace(slice=part)
            new = [need._replace(task=need.task._replace(slice=part)) for need in old]
            other = {F: part - 1, B: part + 1}.get(task.kind, -1)
            if 0 <= other < slices:
                new.append(Need(task._replace(slice=other)))
            needs[own] = tuple(new)
            # of keys and values
            changes = {
                (F, 0): {KV: slices},
                (B, slices - 1): {KV_GRADIENT: slices},
                (B, 0): {KV: -slices, KV_GRADIENT: -slices},
            }
            more = changes.get((task.kind, part), {}) if slices > 1 else {}
            kept = tuple(Hold(DEVICE, name, count) for name, count in more.items())
            holds[own] = graph.holds[task] + kept
    return made_of(graph, 'sliced', (slices, sizes) if sizes else (slices,), needs, holds, {})


def exchanging_context(graph: Graph) -> Graph:
    """Say that ranks even out the attention of equal slices: see `exchange`, which has the plan.

    What travels for it begins and ends within one forward or backward, so tasks and their needs
    stay. (SlimPipe, arXiv 2504.14519.)
    """
    return made_of(graph, 'exchanging_context', (), graph.needs, graph.holds, {})


class Slicing(NamedTuple):
    """Makes the graph of a plain pipeline whose sequences are sliced, for any number of stages."""

    slices: int
    sizes: tuple[int, ...] = ()

    def __call__(self, num_stages: int) -> Graph:
        return sliced(chain(num_stages), self.slices, self.sizes)


def parts_in_words(graph: Graph) -> str:
    """Return ` of 4 slices`, behind a number of microbatches; nothing where sequences are whole."""
    return f' of {graph.num_slices} slices' if graph.num_slices > 1 else ''


def of_one_slice(graph: Graph) -> Graph:
    """Return the graph of what each slice goes through: that of which `sliced` made this one."""
    if graph.num_slices == 1:
        return graph
    cut = sliced.__name__, exchanging_context.__name__
    others = [each for each in graph.techniques if each.name not in cut]
    return applied(graph.num_stages, others)


def sized(graph: Graph, sizes: Sequence[int]) -> Graph:
    """Return a graph of slices that says how many tokens each of them has."""
    cut = sliced.__name__, (graph.num_slices, tuple(sizes))
    steps = [cut if step.name == sliced.__name__ else step for step in graph.techniques]
    return applied(graph.num_stages, steps)


AUTO, BALANCED = 'auto', 'balanced'
LEAST = 4096  # tokens, a careful guess: docs/long-context.md


@dataclass(frozen=True)
class ToFind:
    """Slices of equal times, whose sizes are to be found."""

    number: int = 0  # of them; 0: as many as pay
    least: int = LEAST  # then, tokens of a slice, as a mean of all

    def __str__(self) -> str:
        if self.number:
            return f'{BALANCED}:{self.number}'
        return AUTO if self.least == LEAST else f'{AUTO}:{self.least}'


Slices = int | tuple[int, ...] | ToFind
"""How many slices, as equal as can be; or the tokens of each; or what finds them."""


def slices_of(asked: object) -> Slices:
    """Return the slices that a user names: how many, or the tokens of each, or `ToFind`.

    As text they are `4`, `1024,512,512`, `balanced:4`, `auto`, or `auto:2048` with the fewest
    tokens of a slice.
    """
    if isinstance(asked, ToFind):
        return asked
    word, colon, number = str(asked).partition(':')
    if word == AUTO and not colon:
        return ToFind()
    if word in (AUTO, BALANCED) and (told := _whole(number)):
        return ToFind(least=told) if word == AUTO else ToFind(told)
    words: Iterable[object] = [asked]
    if isinstance(asked, str):
        words = asked.split(',')
    elif isinstance(asked, list | tuple):
        words = cast(Sequence[object], asked)
    found = tuple(map(_whole, words))
    if not found or min(found) < 1:
        raise ValueError(
            f'slices is {asked!r}: give how many, such as 4, or the tokens of each, such as '
            '1024,512,512, or balanced:4, or auto'
        )
    return found[0] if len(found) == 1 else found


def _whole(value: object) -> int:
    """Return a whole number, also from text; 0: it is none."""
    if isinstance(value, str):
        return int(value) if value.strip().isdecimal() else 0
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def number_of(slices: Slices) -> int:
    """Return how many slices there are; 0: that is to be found."""
    if isinstance(slices, ToFind):
        return slices.number
    return slices if isinstance(slices, int) else len(slices)


def cuts_of(slices: int | tuple[int, ...], length: int, multiple: int = 1) -> tuple[int, ...]:
    """Return the first token of each slice, and behind them the tokens of a sequence.

    Of a number of slices, which are as equal as can be, the last takes what is left; each slice has
    a multiple of `multiple` tokens, which tensor-parallel ranks share.
    """
    among = f' among {multiple} ranks of tensor parallelism' if multiple > 1 else ''
    if isinstance(slices, int):
        starts = (length * k // slices // multiple * multiple for k in range(slices))
        cuts = *starts, length
        if len(set(cuts)) < slices + 1:
            raise ValueError(
                f'slices: {slices} are too many for sequences of {length} tokens{among}: give at '
                f'most {max(length // multiple, 1)}'
            )
        return cuts
    if sum(slices) != length:
        raise ValueError(
            f'slices: {",".join(map(str, slices))} are {sum(slices)} tokens, but sequences have '
            f'{length}: give sizes that sum to that, or a number of slices'
        )
    if uneven := [size for size in slices if size % multiple]:
        raise ValueError(
            f'slices: {uneven[0]} tokens cannot be shared out{among}: give multiples of {multiple}'
        )
    return (0, *accumulate(slices))


def sizes_of(graph: Graph) -> tuple[int, ...]:
    """Return the tokens of each slice; none: the graph does not say them, or has no slices."""
    for name, arguments in graph.techniques:
        if name == 'sliced' and len(arguments) > 1:
            return cast('tuple[int, ...]', arguments[1])
    return ()
