"""Devices of a pipeline, and the links between them, from a file or to one.

>>> devices = Devices.from_json('{"devices": [{"name": "a"}, {"name": "b", "factor": {"F": 2}}]}')
>>> devices.devices[1].factors, devices.edge(0, 1, 8.0)
((2, 1.0, 1.0), 0.0)
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

from megatron_zbpp.ir import strict_json

_ALIKE = (1.0, 1.0, 1.0)


@dataclass(frozen=True)
class Device:
    """One rank's machine.

    Attributes:
        name: for people.
        factors: by which it multiplies the times of F, B and W: 2 is half as fast.
        memory: for activations and parameters, in the unit of the layers' `activation`.
    """

    name: str = ''
    factors: tuple[float, float, float] = _ALIKE
    memory: float = inf

    def __post_init__(self) -> None:
        for factor in self.factors:
            if not (isfinite(factor) and factor > 0):
                raise ValueError(f'device {self.name!r}: factor {factor}: give a number above 0')
        if not self.memory > 0:
            raise ValueError(f'device {self.name!r}: memory {self.memory}: give a number above 0')


@dataclass(frozen=True)
class Devices:
    """Devices, and the links between each two; by default links take no time.

    Attributes:
        devices: one a rank, in the order in which they are named.
        latency: from one (row) to another (column), in the unit of the layers' times.
        bandwidth: the same, in the layers' unit of output a unit of time; 0: endless.
    """

    devices: tuple[Device, ...]
    latency: tuple[tuple[float, ...], ...] = ()
    bandwidth: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, 'devices', tuple(self.devices))
        count = len(self.devices)
        if not count:
            raise ValueError('no devices: give at least one')
        for name in ('latency', 'bandwidth'):
            rows = tuple(tuple(row) for row in getattr(self, name))
            object.__setattr__(self, name, rows)
            if rows and (len(rows) != count or any(len(row) != count for row in rows)):
                raise ValueError(f'{name} is not {count} rows of {count}: give one a device')
            for value in (value for row in rows for value in row):
                if not (isfinite(value) and value >= 0):
                    raise ValueError(f'{name} has {value}: give numbers from 0 up')

    @classmethod
    def alike(cls, count: int) -> Devices:
        """Return so many devices that are alike, with links that take no time."""
        return cls(tuple(Device(str(rank)) for rank in range(count)))

    def __len__(self) -> int:
        return len(self.devices)

    def ordered(self, order: Sequence[int]) -> Devices:
        """Return the same devices with their links, named in another order."""
        latency, bandwidth = (
            tuple(tuple(rows[a][b] for b in order) for a in order) if rows else ()
            for rows in (self.latency, self.bandwidth)
        )
        return Devices(tuple(self.devices[d] for d in order), latency, bandwidth)

    def edge(self, sender: int, receiver: int, output: float) -> float:
        """Return the time of a message of `output` from one device to another; 0 on one device."""
        if sender == receiver:
            return 0.0
        latency = self.latency[sender][receiver] if self.latency else 0.0
        bandwidth = self.bandwidth[sender][receiver] if self.bandwidth else 0.0
        return latency + (output / bandwidth if bandwidth else 0.0)

    def signature(self, order: Sequence[int], output: float) -> tuple[object, ...]:
        """Return the facts by which orders of devices differ: factors, memory, links."""
        own = tuple((self.devices[d].factors, self.devices[d].memory) for d in order)
        if not (self.latency or self.bandwidth):
            return own
        pairs = zip(order, (*order[1:], order[0]), strict=True)
        return own, tuple((self.edge(a, b, output), self.edge(b, a, output)) for a, b in pairs)

    def to_json(self) -> str:
        """Return one JSON object."""
        entries = [
            {
                'name': device.name,
                'factor': dict(zip('FBW', device.factors, strict=True)),
                **({'memory': device.memory} if device.memory < inf else {}),
            }
            for device in self.devices
        ]
        links = {'latency': self.latency, 'bandwidth': self.bandwidth}
        return json.dumps(
            {'devices': entries, **{name: rows for name, rows in links.items() if rows}}, indent=1
        )

    @classmethod
    def from_json(cls, text: str) -> Devices:
        """Return the devices that a file says.

        Raises:
            ValueError: it is not JSON, or not a file of devices; the message names the field.
        """
        data: Any = strict_json.loads(text)
        strict_json.require(data, {'devices': _ENTRIES}, {'latency': _ROWS, 'bandwidth': _ROWS})
        found: list[Device] = []
        for entry in data['devices']:
            strict_json.require(entry, {}, _FIELDS)
            factor: Any = entry.get('factor', {})
            strict_json.require(factor, {}, dict.fromkeys('FBW', strict_json.number))
            first, second, third = (factor.get(kind, 1.0) for kind in 'FBW')
            memory = entry.get('memory', inf)
            found.append(Device(entry.get('name', ''), (first, second, third), memory))
        return cls(tuple(found), data.get('latency', ()), data.get('bandwidth', ()))


_ENTRIES = strict_json.list_of(strict_json.anything, 'devices', filled=True)
_ROWS = strict_json.list_of(strict_json.list_of(strict_json.number, ''), 'rows of numbers')
_FIELDS: dict[str, strict_json.Check] = {
    'name': strict_json.text,
    'factor': strict_json.anything,
    'memory': strict_json.number,
}
