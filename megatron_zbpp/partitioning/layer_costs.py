"""Costs of a model's layers on any placement, which gets its even split."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from megatron_zbpp.ir import Placement
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.formats import BYTES, MANY, Units
from megatron_zbpp.partitioning.devices import Devices
from megatron_zbpp.partitioning.layers import Layers
from megatron_zbpp.partitioning.space import Partition, Space, stage_costs
from megatron_zbpp.planner.cost_sources import CostSource, Naming
from megatron_zbpp.planner.limits import Bytes

_UNIT = 'units of the layers'


@dataclass(frozen=True)
class LayerCosts(CostSource):
    """Layers of a model, split evenly on whatever placement."""

    layers: Layers
    file: str

    @property
    def heading(self) -> str:
        return 'layers from a file'

    @property
    def layers_file(self) -> str:
        return self.file

    @property
    def most_stages(self) -> int:
        return len(self.layers.splits()) + 1

    def costs(self, placement: Placement, name: Naming, selective: bool = False) -> Costs:
        even, devices = self._even(placement), Devices.alike(placement.num_ranks)
        parameters = tuple(
            sum(layer.parameters for layer in stage) for stage in self.layers.stages(even.cuts)
        )
        return replace(stage_costs(self.layers, devices, even), parameters=parameters)

    def units(self, in_bytes: bool) -> Units:
        return Units(_UNIT, BYTES if _held(self.layers) >= MANY else _UNIT)

    def require_bytes(self, name: Naming) -> None:
        require_bytes(self.layers, self.file, [Bytes()])

    def layout(self, placement: Placement) -> str:
        return self.layers.text(self._even(placement).cuts)

    def _even(self, placement: Placement) -> Partition:
        devices = Devices.alike(placement.num_ranks)
        return Space.of(self.layers, devices, 1, [placement]).even(placement)


def _held(layers: Layers) -> float:
    return sum(layer.activation + layer.parameters for layer in layers)


def require_bytes(layers: Layers, file: str, limits: Iterable[float | None]) -> None:
    """Raise ValueError for a limit in bytes on layers that have none."""
    if any(isinstance(limit, Bytes) for limit in limits) and _held(layers) < MANY:
        raise ValueError(
            f'a memory limit in bytes, but all layers of {file} hold {_held(layers):g}: give their '
            'activation and parameters in bytes, as zbpp profile writes them, or a limit in the '
            'unit of the file'
        )
