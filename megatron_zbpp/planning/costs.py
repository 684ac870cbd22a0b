"""What passes cost: seconds on the device, seconds on the wire, activations held.

>>> from megatron_zbpp.ir import Placement
>>> Costs.uniform(Placement.v(2), weight=0.8).time('W', 0)
0.4
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from megatron_zbpp.ir import B, F, Graph, Placement, W
from megatron_zbpp.ir.compiled import compiled
from megatron_zbpp.ir.graph import DEVICE


@dataclass(frozen=True)
class Costs:
    """Times and activations of every stage. Units are the caller's: seconds and bytes, or 1 and 1.

    Attributes:
        forward: per stage in model order, time of one F.
        backward: time of one B. A BW takes that of its B and its W.
        weight: time of one W.
        comm: latency of each F or B edge that crosses ranks; it does not occupy the device.
        message: further time of such an edge, bytes over bandwidth; added to `comm`.
        activation: per stage, held from the start of its F. Default: 1 a stage.
        retained: held in its place from the end of B to the end of W. It may be more: gradients of
            outputs, and inputs that tensor parallelism has gathered, wait for W. Default: as much.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    comm: float = 0.0
    message: float = 0.0
    activation: tuple[float, ...] = ()
    retained: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, 'activation', self.activation or (1.0,) * len(self.forward))
        object.__setattr__(self, 'retained', self.retained or self.activation)
        for name in ('forward', 'backward', 'weight', 'activation', 'retained'):
            values = tuple(getattr(self, name))
            object.__setattr__(self, name, values)
            _require_costs(name, values)
            if len(values) != len(self.forward):
                raise ValueError(
                    f'{name} has {len(values)} entries and forward {len(self.forward)}: '
                    'give one entry per stage'
                )
        _require_costs('comm', (self.comm,))
        _require_costs('message', (self.message,))

    @classmethod
    def uniform(
        cls,
        placement: Placement,
        forward: float = 1.0,
        backward: float = 1.0,
        weight: float = 1.0,
        comm: float = 0.0,
    ) -> Costs:
        """Equal ranks: of the times, ONE FULL RANK's, a stage on a rank of v chunks takes a v-th.

        A stage's activation, all of it retained until W, is a v-th of one full rank's.
        """
        shares = tuple(1 / len(placement.stages(rank)) for rank in placement.ranks)
        forwards, backwards, weights = (
            tuple(time * share for share in shares) for time in (forward, backward, weight)
        )
        return cls(forwards, backwards, weights, comm, activation=shares, retained=shares)

    @property
    def num_stages(self) -> int:
        return len(self.forward)

    @property
    def edge(self) -> float:
        """Time from the end of an F or B to when another rank may start on what it sent."""
        return self.comm + self.message

    def time(self, kind: str, stage: int) -> float:
        """Time of one task of `kind` on `stage`."""
        times = {F: self.forward, B: self.backward, W: self.weight}.get(kind)
        return 0.0 if times is None else times[stage]

    def duration(self, graph: Graph, kind: str, stage: int) -> float:
        """Time of one pass of `kind` on `stage`: of all tasks that it does, of a slice each."""
        tasks = graph.tasks(kind, stage)
        return sum([self.time(task.kind, stage) for task in tasks]) / graph.num_slices

    def amount(self, name: str, stage: int) -> float:
        """How much of the amount that `ir.graph.Hold` calls `name` a task of `stage` takes."""
        amounts = {'activation': self.activation, 'retained': self.retained}.get(name)
        return 0.0 if amounts is None else amounts[stage]

    def changes(self, graph: Graph, pool: str = DEVICE) -> dict[tuple[str, int, int], float]:
        """What each pass adds to `pool`, by its kind, stage and slice."""
        return {
            key: sum([count * self.amount(name, key[1]) for name, count in counts.items()])
            / graph.num_slices
            for key, counts in compiled(graph).changes.get(pool, {}).items()
        }

    def require(self, placement: Placement) -> None:
        """Raises ValueError unless there is one entry for each stage of `placement`."""
        if self.num_stages != placement.num_stages:
            raise ValueError(
                f'costs of {self.num_stages} stages do not fit a placement of '
                f'{placement.num_stages}: give one entry per stage'
            )


def _require_costs(name: str, values: tuple[float, ...]) -> None:
    """Raises ValueError unless all of `values` are finite and not negative."""
    for value in values:
        if not (isfinite(value) and value >= 0):
            raise ValueError(f'{name} = {value} is not a cost: give finite numbers from 0 up')
