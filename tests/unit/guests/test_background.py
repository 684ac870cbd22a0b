"""Searches beside the training: a plan and a partition, from another process and from this one."""

from __future__ import annotations

import json
from functools import partial

import pytest
from instances import P1

from megatron_zbpp import Costs, Devices, Layer, Layers, Placement, Schedule
from megatron_zbpp.analysis.checker import check
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.guests.autotune.background import (
    BackgroundSearch,
    partition_text,
    schedule_text,
)


def searched(search: partial[str]) -> str:
    """The answer of another process."""
    search_process = BackgroundSearch('the search', search, 60, pytest.fail)
    search_process._process.wait()
    assert search_process.ended()
    return search_process.answer()


@pytest.mark.parametrize('objective', ['makespan', 'window'])
def test_a_schedule(monkeypatch, tmp_path, objective):
    """Within the limit, on the placement that was asked for."""
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    placement = Placement.v(2)
    costs = Costs.uniform(placement, 10, 12, 8, comm=1)
    text = searched(partial(schedule_text, placement, costs, 4, 1.5, 0.2, objective))
    found = Schedule.from_json(text)
    check(found)
    assert found.placement == placement and found.num_microbatches == 4
    assert max(peak(found, costs)) <= 1.5


def asked(layers, limit=None, seconds=1.0):
    return partial(partition_text, layers, Devices.alike(4), 4, limit, seconds, 'makespan')


def test_a_plan_that_can_be_loaded():
    plan = json.loads(searched(asked(P1)))
    check(Schedule.from_object(plan['schedule']))
    assert plan['layout'].replace('|', '') == P1.text((8,))
    assert plan['makespan'] <= 67


def test_within_a_limit():
    plan = json.loads(asked(P1, limit=8)())
    assert max(plan['peak_activations']) <= 8
    with pytest.raises(ValueError, match='within its memory'):
        asked(P1, limit=0.5)()


def test_multi_token_prediction_stays_in_a_loop():
    layers = Layers(
        (Layer('E'), *[Layer('t', 1, 1, 1)] * 8, Layer('m', 2, 2, 2), Layer('L', 1, 1, 1))
    )
    plan = json.loads(asked(layers, seconds=0.2)())
    assert Schedule.from_object(plan['schedule']).placement.is_loop
