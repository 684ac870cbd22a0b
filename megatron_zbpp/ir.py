"""The schedule as a value: passes, placements, schedules.

Everything else in this package is a function over these three frozen types. No torch here.

    >>> v = Placement.v(2)
    >>> v.ranks, v.stages(0)
    ((0, 1, 1, 0), (0, 3))
    >>> str(Pass('B', 3, 1)), Pass.parse('3B1')
    ('3B1', Pass(kind='B', stage=3, microbatch=1))
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

F, B, W, BW = 'F', 'B', 'W', 'BW'
KINDS = (F, B, W, BW)

_PASS = re.compile(r'(\d+)(F|BW|B|W)(\d+)')


class Pass(NamedTuple):
    """One node of a schedule: what (`kind`), where in the model (`stage`), on which `microbatch`.

    Kinds: `F` forward, `B` gradient of the input, `W` gradient of the weights, `BW` both at once.
    """

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f'{self.stage}{self.kind}{self.microbatch}'

    @property
    def words(self) -> str:
        """The pass in words, for messages to people."""
        return f'{self.kind} stage {self.stage} microbatch {self.microbatch}'

    @classmethod
    def parse(cls, text: str) -> Pass:
        """The pass that `text` names, for example `3F1`: stage 3, forward, microbatch 1.

        Raises:
            ValueError: `text` is not of that form.
        """
        match = _PASS.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f'{text!r} is not a pass: expected {{stage}}F|B|W|BW{{microbatch}}, such as 3F1'
            )
        return cls(match[2], int(match[1]), int(match[3]))


@dataclass(frozen=True)
class Placement:
    """Which rank holds which stage.

    Attributes:
        ranks: rank of each stage, in model order. Rank r's chunks are its stages in that order.
        name: `loop`, `v`, `wave`, ...: for people.
    """

    ranks: tuple[int, ...]
    name: str = 'custom'

    def __post_init__(self) -> None:
        held = set(self.ranks)
        if not held or min(held) != 0 or max(held) != len(held) - 1:
            raise ValueError(
                f'placement {self.ranks} is not valid: give each rank 0..p-1 at least one stage'
            )

    @property
    def num_stages(self) -> int:
        return len(self.ranks)

    @cached_property
    def num_ranks(self) -> int:
        return max(self.ranks) + 1

    @cached_property
    def _stages(self) -> tuple[tuple[int, ...], ...]:
        held: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for stage, rank in enumerate(self.ranks):
            held[rank].append(stage)
        return tuple(map(tuple, held))

    def stages(self, rank: int) -> tuple[int, ...]:
        """Stages that `rank` holds, in model order: entry c is its chunk c."""
        return self._stages[rank]

    @cached_property
    def chunks(self) -> tuple[int, ...]:
        """Chunk of each stage: its index among the stages of its rank (Megatron's vp_stage)."""
        return tuple(self._stages[rank].index(stage) for stage, rank in enumerate(self.ranks))

    @cached_property
    def num_chunks(self) -> int:
        """Most chunks that any rank holds."""
        return max(map(len, self._stages))

    @property
    def is_loop(self) -> bool:
        """Whether stages go around the ranks, as Megatron's own do."""
        return self.ranks == Placement.loop(self.num_ranks, self.num_chunks).ranks

    def reversed(self) -> Placement:
        """The same placement with rank r renamed to p-1-r (a V becomes a Λ and back)."""
        return replace(self, ranks=tuple(self.num_ranks - 1 - rank for rank in self.ranks))

    @classmethod
    def loop(cls, num_ranks: int, num_chunks: int = 1) -> Placement:
        """Stage s on rank s mod p, as Megatron does (PTD-P, arXiv 2104.04473, section 2.2)."""
        return cls(tuple(range(num_ranks)) * num_chunks, 'loop')

    @classmethod
    def wave(cls, num_ranks: int, num_chunks: int = 2) -> Placement:
        """Down, up, down, ...: stages snake over the ranks (Hanayo, arXiv 2308.15762)."""
        down = tuple(range(num_ranks))
        ranks = sum((down[::-1] if chunk % 2 else down for chunk in range(num_chunks)), ())
        return cls(ranks, 'v' if num_chunks == 2 else 'wave')

    @classmethod
    def v(cls, num_ranks: int) -> Placement:
        """Stages s and 2p-1-s on rank s (ZB-V, arXiv 2401.10241, section 6)."""
        return cls.wave(num_ranks, 2)


@dataclass(frozen=True)
class Schedule:
    """For each rank, the order of its passes: an immutable value.

    Attributes:
        name: of the family that made it, or of the plan.
        placement: which rank holds which stage.
        num_microbatches: m; microbatches are 0..m-1.
        passes: for each rank, its passes in order.
    """

    name: str
    placement: Placement
    num_microbatches: int
    passes: tuple[tuple[Pass, ...], ...]

    @classmethod
    def of(
        cls,
        name: str,
        placement: Placement,
        num_microbatches: int,
        passes: Iterable[Iterable[Pass]],
    ) -> Schedule:
        """A schedule from any iterables of passes."""
        return cls(name, placement, num_microbatches, tuple(map(tuple, passes)))

    @property
    def num_ranks(self) -> int:
        return self.placement.num_ranks

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages

    def __iter__(self) -> Iterator[tuple[int, Pass]]:
        """(rank, pass) of every pass, rank by rank."""
        return ((rank, p) for rank, order in enumerate(self.passes) for p in order)

    def reversed(self) -> Schedule:
        """The same schedule with rank r renamed to p-1-r."""
        return replace(self, placement=self.placement.reversed(), passes=self.passes[::-1])

    def forward_only(self) -> Schedule:
        """What is left for evaluation: the forward passes, in their order."""
        kept = tuple(tuple(p for p in order if p.kind == F) for order in self.passes)
        return replace(self, name=f'{self.name} (forward only)', passes=kept)

    def to_json(self) -> str:
        """One JSON object; `from_json` reads it back to an equal value."""
        return json.dumps(
            {
                'format': 'megatron_zbpp.schedule/1',
                'name': self.name,
                'placement': {'name': self.placement.name, 'ranks': self.placement.ranks},
                'num_microbatches': self.num_microbatches,
                'passes': [' '.join(map(str, order)) for order in self.passes],
            },
            indent=1,
        )

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        """The schedule that `to_json` wrote.

        Raises:
            ValueError: `text` is not JSON, or not a schedule; the message names the field.
        """
        data = json.loads(text)
        if not isinstance(data, dict) or data.get('format') != 'megatron_zbpp.schedule/1':
            raise ValueError('not a schedule: no "format": "megatron_zbpp.schedule/1" in it')
        try:
            placement = Placement(tuple(data['placement']['ranks']), data['placement']['name'])
            passes = [[Pass.parse(p) for p in order.split()] for order in data['passes']]
            return cls.of(data['name'], placement, int(data['num_microbatches']), passes)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f'schedule lacks a field or has one of a wrong type: {error!r}'
            ) from error


def predecessors(p: Pass, num_stages: int, split: bool) -> tuple[Pass, ...]:
    """Passes that must end before `p` starts, on whatever rank.

    Args:
        p: the pass.
        num_stages: S of its schedule.
        split: whether stage `p.stage + 1` runs this microbatch as B and W (else as BW).
    """
    kind, stage, microbatch = p
    if kind == F:
        return (Pass(F, stage - 1, microbatch),) if stage else ()
    if kind == W:
        return (Pass(B, stage, microbatch),)
    own = Pass(F, stage, microbatch)
    if stage == num_stages - 1:
        return (own,)
    return own, Pass(B if split else BW, stage + 1, microbatch)
