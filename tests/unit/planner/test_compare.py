"""Schedules beside each other, in Python: the numbers of `zbpp compare`."""

from __future__ import annotations

import json

import pytest

from megatron_zbpp import Costs, Placement, compare
from megatron_zbpp.cli import main

NAMES = ['1f1b', 'zb-h1', 'zb-v', 'interleaved']


def test_rows_are_those_of_zbpp(capsys):
    assert main(['compare', '--pp', '4', '--microbatches', '8', '--json']) == 0
    printed = {row['name']: row for row in json.loads(capsys.readouterr().out)['schedules']}
    rows = compare(4, 8)
    assert {row.name for row in rows} <= {*printed} and len(rows) > 25
    for row in rows:
        told = printed[row.name]
        assert row.makespan == told['makespan'] and row.gain == told['gain']
        assert row.idle == told['idle_all_ranks'] and row.bubble == told['bubble']
        assert row.peak == max(told['peak_activations'])
    assert [row.makespan for row in rows] == sorted(row.makespan for row in rows)


def test_costs_of_a_model_are_joined_and_cut():
    uneven = Costs.of([1.0] * 7 + [2.0], [1.0] * 8, [1.0] * 8)
    rows = {row.name: row for row in compare(4, 8, NAMES, uneven)}
    assert rows['1f1b'].gain == 0 and rows['zb-h1'].gain > 0
    plain = {row.name: row for row in compare(4, 8, NAMES)}
    assert rows['1f1b'].makespan > 2 * plain['1f1b'].makespan - 8
    against = {row.name: row.gain for row in compare(4, 8, NAMES, uneven, against='zb-v')}
    assert against['zb-v'] == 0 and against['1f1b'] < 0


@pytest.mark.parametrize(
    ('given', 'said'),
    [
        ((4, 8, ['zb-w']), 'zb-w'),
        ((4, 6, ['zb-v'], Costs.uniform(Placement.loop(3))), 'give costs of a multiple'),
        ((4, 6, ['zb-v'], None, 'zb-w'), 'zb-w'),
        ((3, 6, ['zb-h1'], None, 'chimera'), 'compare against another schedule'),
    ],
)
def test_what_does_not_fit_is_named(given, said):
    with pytest.raises(ValueError, match=said):
        compare(*given)
