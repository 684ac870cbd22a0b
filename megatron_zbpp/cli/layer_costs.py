"""Files of layers and devices, and the costs of layers on any placement: `--layers-file`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

from megatron_zbpp.ir import Placement, files, strict_json
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.formats import BYTES, MANY, Units
from megatron_zbpp.partitioning.devices import Devices
from megatron_zbpp.partitioning.layers import Layers
from megatron_zbpp.partitioning.space import Space
from megatron_zbpp.partitioning.stages import Partition, stage_costs
from megatron_zbpp.planner.limits import Bytes

_UNIT = 'units of the layers'


class LayerCosts(NamedTuple):
    """`--layers-file`: layers of a model, split evenly on whatever placement."""

    layers: Layers
    file: str

    @property
    def units(self) -> Units:
        """Units of its numbers."""
        return Units(_UNIT, BYTES if in_bytes(self.layers) else _UNIT)

    def costs(self, placement: Placement) -> Costs:
        """Return what the stages cost, parameters included.

        Raises:
            ValueError: too few layers.
        """
        even, devices = self._even(placement), Devices.alike(placement.num_ranks)
        held = self.layers.stages(even.cuts)
        taken = tuple(sum(layer.parameters for layer in own) for own in held)
        return replace(stage_costs(self.layers, devices, even), parameters=taken)

    def layout(self, placement: Placement) -> str:
        """Return the layers of each stage, in the language of Megatron's layouts."""
        return self.layers.text(self._even(placement).cuts)

    def _even(self, placement: Placement) -> Partition:
        devices = Devices.alike(placement.num_ranks)
        return Space.of(self.layers, devices, 1, [placement]).even(placement)


def in_bytes(layers: Layers) -> bool:
    """Return whether memory in a file of layers is counted in bytes."""
    return _held(layers) >= MANY


def _held(layers: Layers) -> float:
    return sum(layer.activation + layer.parameters for layer in layers)


def require_bytes(layers: Layers, file: str, limits: Iterable[float | None]) -> None:
    """Raise ValueError for a limit in bytes on layers that have none."""
    if any(isinstance(limit, Bytes) for limit in limits) and not in_bytes(layers):
        raise ValueError(
            f'a memory limit in bytes, but all layers of {file} hold {_held(layers):g}: give their '
            'activation and parameters in bytes, as zbpp profile writes them, or a limit in the '
            'unit of the file'
        )


def load_layers(path: str) -> Layers:
    """Return the layers in a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it has none; the message names the file.
    """
    return _read(path, Layers.from_json, 'layers')


def load_devices(path: str | None, ranks: int | None) -> Devices:
    """Return the devices in a file, or so many that are alike.

    Raises:
        OSError: it cannot be read.
        ValueError: neither is given, or they contradict each other.
    """
    if path is None:
        if ranks is None:
            raise ValueError('--pp or --devices: say how many ranks there are')
        return Devices.alike(ranks)
    devices = _read(path, Devices.from_json, 'devices')
    if ranks not in (None, len(devices)):
        raise ValueError(f'--pp {ranks}, but {path} has {len(devices)} devices: leave --pp out')
    return devices


def _read(path: str, reader: Callable, name: str):
    def parse(text: str):
        data = strict_json.loads(text)
        fields = data if strict_json.is_object(data) else {}
        kept = fields.get(name) if 'schedule' in fields else None
        try:
            return reader(text if kept is None else json.dumps(kept))
        except ValueError as error:
            other = '' if name in fields else strict_json.other_kind(data, '', ': ')
            raise ValueError(f'{error}{other}') from error

    return files.read(path, parse, f'a file of {name}, as JSON or YAML')
