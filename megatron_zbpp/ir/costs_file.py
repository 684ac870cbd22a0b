"""Files of costs: what they may have, and the fields of `Costs` that they say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_zbpp.ir import B, F, W, strict_json
from megatron_zbpp.ir.graph import TRANSFERS

SELECTIVE = 'selective'  # what differs with Megatron's selective recomputation
LAYOUT = 'layout'  # layers of the stages, as `Ett|ttL`: for `zbpp profile`
ROUTES = 'routes'  # ranks of the stages, one list a route: for its --write-devices
_COPIES = frozenset(kind for copies in TRANSFERS.values() for kind in copies)
_OWN = {'times': (F, B, W), 'amounts': ('activation', 'retained')}  # may stand outside of them


def read(text: str, selective: bool, activation: Sequence[float]) -> dict[str, Any]:
    """Return the fields of a file: see `Costs.from_json`."""
    data: Any = strict_json.loads(text)
    if not strict_json.is_object(data):
        raise ValueError('costs are one JSON object: {"F": [...], "B": [...], "W": [...]}')
    own = {SELECTIVE: strict_json.anything, LAYOUT: strict_json.text, ROUTES: _ROUTES}
    strict_json.require(data, {}, {**_BY_STAGE, **_FIELDS, **own})
    within = data.pop(SELECTIVE, None)
    layout = data.pop(LAYOUT, None)
    routes = data.pop(ROUTES, ())
    if selective and within is None:
        raise ValueError(
            'nothing is said of what passes take with selective recomputation: give '
            f'"{SELECTIVE}": {{"B": [...], "activation": [...]}}'
        )
    data = _by_kind(data)
    if layout is not None and len(layout.split('|')) != len(data['times'].get(F, ())):
        raise ValueError(
            f'layout {layout} has {len(layout.split("|"))} stages and F '
            f'{len(data["times"].get(F, ()))} entries: give one entry per stage'
        )
    for route in routes:
        if len(route) != len(data['times'].get(F, ())):
            raise ValueError(
                f'route {route} has {len(route)} stages and F {len(data["times"].get(F, ()))} '
                'entries: give one rank per stage'
            )
    if within is not None:
        strict_json.require(within, {}, _SELECTED)
        data = _within(data, _by_kind(within)) if selective else data
    data['amounts'].setdefault('activation', activation)
    return data


def fields(data: Any) -> dict[str, Any]:
    """Return the fields, whatever release gave them: see `Costs.from_fields`."""
    if strict_json.is_object(data) and 'forward' in data:
        strict_json.require(data, _OLD_TIMES, {**_BY_STAGE, **_FIELDS})
        data = _by_kind({_OLD_NAMES.get(name, name): value for name, value in data.items()})
    else:
        strict_json.require(data, {'times': _BY_NAME}, _FIELDS)
    return data


def _by_kind(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of a file with F, B and W among `times`, activations among `amounts`."""
    apart_of_all = {name for own in _OWN.values() for name in own}
    fields = {name: value for name, value in data.items() if name not in apart_of_all}
    for field_name, own in _OWN.items():
        apart = {name: data[name] for name in own if name in data}
        inside = data.get(field_name, {})
        for name in apart.keys() & inside.keys():
            raise ValueError(f'{field_name} of {name} are given twice: leave them out of one')
        fields[field_name] = {**apart, **inside}
    return fields


def _within(data: dict[str, Any], within: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of selective recomputation; copies that it is silent of take less."""
    kinds = dict(data['times'])
    before, after = data['amounts'].get('activation'), within['amounts'].get('activation')
    if before and after and len(before) == len(after):
        shares = [new / old if old else 1.0 for new, old in zip(after, before, strict=True)]
        for kind in _COPIES & set(kinds):
            kinds[kind] = [time * share for time, share in zip(kinds[kind], shares, strict=False)]
    amounts = {**data['amounts'], **within['amounts']}
    return {**data, 'times': {**kinds, **within['times']}, 'amounts': amounts}


_PER_STAGE = strict_json.list_of(strict_json.number, 'numbers, one per stage', filled=True)
_NUMBERS = strict_json.list_of(strict_json.number, 'numbers')
_ROUTES = strict_json.list_of(
    strict_json.list_of(strict_json.integer, ''), 'lists, each with the rank of each stage'
)
_BY_NAME = strict_json.object_of(_PER_STAGE, 'lists of numbers, such as {"R": [1, 1]}')
_FIELDS: dict[str, strict_json.Check] = {
    **dict.fromkeys(('comm', 'message', 'together'), strict_json.number),
    'parameters': _PER_STAGE,
    'speeds': _NUMBERS,
    **dict.fromkeys(('times', 'amounts'), _BY_NAME),
    'parts': strict_json.object_of(
        strict_json.list_of(_PER_STAGE, ''),
        'a list a stage, such as {"F": [[0.6, 0.4], [0.6, 0.4]]}',
    ),
    'edges': strict_json.list_of(
        strict_json.tuple_of(strict_json.integer, strict_json.integer, strict_json.number),
        '[sender, receiver, latency]',
    ),
    'hops': strict_json.list_of(
        strict_json.tuple_of(strict_json.number, strict_json.number),
        '[forward, back] for each stage before the last',
    ),
    **dict.fromkeys(
        ('collectives', 'pairs'),
        strict_json.object_of(strict_json.number, 'numbers, such as {"hidden": 0.1}'),
    ),
}
_BY_STAGE: dict[str, strict_json.Check] = {
    **dict.fromkeys((F, B, W), _NUMBERS),
    **dict.fromkeys(('activation', 'retained'), _PER_STAGE),
}
_SELECTED = {**_BY_STAGE, 'times': _BY_NAME, 'amounts': _BY_NAME}
_OLD_NAMES = {'forward': F, 'backward': B, 'weight': W}
_OLD_TIMES: dict[str, strict_json.Check] = dict.fromkeys(_OLD_NAMES, _NUMBERS)
