"""Sources of costs: times of a full rank, a file of stages, the costs of a plan or of a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_zbpp.ir import Placement, files, strict_json
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.formats import BYTES, MANY, UNITS, Units
from megatron_zbpp.ir.plan_costs import written

Naming = Callable[[str], str]
"""The name that a user has for an argument, such as `--pp` for `num_ranks`."""

TIMES_FILE = 'F,B,W or a file {"F": [...], "B": [...], "W": [...]}, one entry per stage'


class CostSource:
    """Costs of the stages of whatever placement is asked for."""

    @property
    def stages(self) -> int | None:
        """Number of the stages that have costs; None: those of any placement."""
        return None

    @property
    def most_stages(self) -> int | None:
        """The most stages into which the model can be split; None: any number."""
        return None

    @property
    def layers_file(self) -> str | None:
        """The file of a model's layers; None: the costs are of stages."""
        return None

    @property
    def heading(self) -> str:
        """The costs in a few words, for a picture."""
        raise NotImplementedError

    def costs(self, placement: Placement, name: Naming, selective: bool = False) -> Costs:
        """Return the costs of a placement's stages; `selective`: with selective recomputation."""
        raise NotImplementedError

    def units(self, in_bytes: bool) -> Units:
        """Return the units of the costs; `in_bytes`: a limit of memory is in bytes."""
        return UNITS._replace(memory=BYTES) if in_bytes else UNITS

    def require_bytes(self, name: Naming) -> None:
        """Raise ValueError unless the costs say how many bytes a stage holds."""
        _require_fields({}, name)

    def layout(self, placement: Placement) -> str | None:
        """Return the layers of each stage, in the language of Megatron's layouts; None: unknown."""
        return None

    def chunks(self, num_ranks: int, asked: int | None, default: int, name: Naming) -> int:
        """Return v: the chunks asked for, or those of the stages with costs, or the default."""
        stages = self.stages
        if stages is None:
            return asked or default
        if stages % num_ranks or asked not in (None, stages // num_ranks):
            wanted = f'{num_ranks} ranks' + (f' of {asked} chunks' if asked else '')
            raise ValueError(
                f'{name("costs")} has {stages} stages, which do not make {wanted}: give pp * vpp '
                'entries each'
            )
        return stages // num_ranks


class Overlap(NamedTuple):
    """Time of passes that run as one, over that of its parts."""

    share: float  # of a forward and a backward; of all pairs where `pairs` is empty
    pairs: Mapping[str, float]  # of other pairs, by kinds: FF, FW

    @classmethod
    def of(cls, shares: Mapping[str, float]) -> Overlap:
        """Return the overlap of shares by kinds: FB, FF, FW; of others 1."""
        pairs = {'FF': 1.0, 'FW': 1.0, **shares}
        return cls(pairs.pop('FB', 1.0), pairs)


@dataclass(frozen=True)
class Times(CostSource):
    """Times of one full rank: a chunk of v takes a v-th of each."""

    forward: float
    backward: float
    weight: float

    @property
    def heading(self) -> str:
        times = self.forward, self.backward, self.weight
        return 'F, B, W = ' + ', '.join(f'{time:g}' for time in times)

    def costs(self, placement: Placement, name: Naming, selective: bool = False) -> Costs:
        return Costs.uniform(placement, self.forward, self.backward, self.weight)


NO_TIMES = Times(1.0, 1.0, 1.0)  # where no costs are given


@dataclass(frozen=True)
class StageCosts(CostSource):
    """Costs of each stage in model order, in the text of a file."""

    text: str
    num_stages: int

    @classmethod
    def read(cls, path: str) -> StageCosts:
        """Return the costs of a file."""
        return files.read(
            path, lambda text: cls(text, Costs.from_json(text).num_stages), TIMES_FILE
        )

    @classmethod
    def of(cls, costs: Costs) -> StageCosts:
        """Return the source of costs that a program has."""
        return cls(json.dumps(written(costs)), costs.num_stages)

    @property
    def stages(self) -> int:
        return self.num_stages

    @property
    def heading(self) -> str:
        return 'times of each stage from a file'

    def costs(self, placement: Placement, name: Naming, selective: bool = False) -> Costs:
        if self.num_stages != placement.num_stages:
            raise ValueError(
                f'{name("costs")} has {self.num_stages} stages and the schedule '
                f'{placement.num_stages}: give one entry per stage, in model order'
            )
        shares = Costs.uniform(placement).amounts['activation']
        costs = Costs.from_json(self.text, selective, shares)
        costs.require(placement)
        return costs

    def units(self, in_bytes: bool) -> Units:
        many = max(Costs.from_json(self.text).amounts['activation']) >= MANY
        return super().units(in_bytes or many)

    def require_bytes(self, name: Naming) -> None:
        _require_fields(strict_json.loads(self.text), name)


@dataclass(frozen=True)
class PlanCosts(CostSource):
    """Costs of a plan for named schedules beside it, which join or cut its stages."""

    own: Costs
    own_units: Units

    @property
    def heading(self) -> str:
        return 'times of the plan'

    def costs(self, placement: Placement, name: Naming, selective: bool = False) -> Costs:
        alike = self.own.joined(placement.num_stages)
        if alike is None:
            raise ValueError(
                f'{self.own.num_stages} stages of the plan do not make {placement.num_stages}'
            )
        return alike

    def units(self, in_bytes: bool) -> Units:
        return self.own_units

    def require_bytes(self, name: Naming) -> None:
        if self.own_units.memory != BYTES:
            _require_fields({}, name)


def _require_fields(fields: Any, name: Naming) -> None:
    fields = {**fields, **fields.get('amounts', {})}
    missing = [field for field in ('activation', 'parameters') if field not in fields]
    if missing:
        raise ValueError(
            f'a memory limit in bytes, but {name("costs")} says nothing of '
            f'{" and ".join(missing)}: give a file that has them by stage, in bytes (of parameters '
            'with gradients and optimizer), or a limit in activations'
        )
