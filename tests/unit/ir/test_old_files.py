"""Files that were written when F, B and W were fields of costs are read to the same values."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from megatron_zbpp.ir import Schedule, strict_json
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.planner import cache

WRITTEN = Path(__file__).with_name('written')
COSTS = Costs(
    {'F': (1.0, 2.0), 'B': (1.5, 2.5), 'W': (0.5, 0.75), 'R': (1.0, 2.0), 'O': (0.5, 0.5)},
    {'activation': (1.0, 2.0), 'retained': (0.5, 1.5), 'input': (0.1, 0.2)},
    0.25,
    0.125,
    parameters=(3.0, 4.0),
    edges=((0, 1, 0.5),),
    speeds=(1.0, 0.5),
    together=0.9,
)
APART = {  # as users write it
    'F': [1.0, 2.0],
    'B': [1.5, 2.5],
    'W': [0.5, 0.75],
    'activation': [1.0, 2.0],
    'retained': [0.5, 1.5],
    'times': {'R': [1.0, 2.0], 'O': [0.5, 0.5]},
    'amounts': {'input': [0.1, 0.2]},
    **{name: asdict(COSTS)[name] for name in ('comm', 'message', 'parameters', 'together')},
    'edges': [[0, 1, 0.5]],
    'speeds': [1.0, 0.5],
}


def text(name: str) -> str:
    return (WRITTEN / name).read_text()


def test_costs():
    assert Costs.from_fields(strict_json.loads(text('costs.json'))) == COSTS
    assert Costs.from_fields(strict_json.loads(json.dumps(asdict(COSTS)))) == COSTS


def test_a_file_of_costs_has_the_plain_kinds_inside_or_apart():
    assert Costs.from_json(json.dumps(APART)) == COSTS
    assert Costs.from_json(json.dumps(asdict(COSTS))) == COSTS


@pytest.mark.parametrize(('field', 'name'), [('times', 'F'), ('amounts', 'activation')])
def test_a_kind_or_amount_that_is_given_twice_is_refused(field, name):
    twice = {**APART, field: {**APART[field], name: [1.0, 1.0]}}
    with pytest.raises(ValueError, match=f'{field} of {name} are given twice'):
        Costs.from_json(json.dumps(twice))


def test_what_selective_recomputation_changes_is_inside_or_apart():
    apart = {**APART, 'selective': {'B': [2.0, 3.0], 'activation': [0.5, 1.0]}}
    inside = {'times': {'B': [2.0, 3.0]}, 'amounts': {'activation': [0.5, 1.0]}}
    found = Costs.from_json(json.dumps(apart), selective=True)
    assert found == Costs.from_json(json.dumps({**asdict(COSTS), 'selective': inside}), True)
    assert found == COSTS.with_times(B=(2.0, 3.0), O=(0.25, 0.25)).with_amounts(
        activation=(0.5, 1.0)
    )


def test_a_plan_and_a_schedule():
    found = cache._load(WRITTEN / 'old.plan')
    assert found is not None and found.costs == COSTS
    assert found.schedule == Schedule.from_json(text('schedule.json'))
