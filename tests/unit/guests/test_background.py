"""Searches beside the training: a plan and a partition, from another process and from this one."""

from __future__ import annotations

import json
from functools import partial

import pytest
from instances import P1

from megatron_zbpp import Costs, Devices, Layer, Layers, Placement, Schedule
from megatron_zbpp.analysis.checker import check
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.guests.background_search import BackgroundSearch, partition_text, schedule_text
from megatron_zbpp.schedules import build
from megatron_zbpp.techniques.vocabulary.place import (
    hosts_like,
    with_embedding,
    with_shard_times,
    with_shards,
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
    start = build('zb-v', 2, 4)
    text = searched(partial(schedule_text, start, costs, 1.5, 0.2, objective))
    found = Schedule.from_json(text)
    check(found)
    assert found.placement == placement and found.num_microbatches == 4
    assert max(peak(found, costs)) <= 1.5


@pytest.mark.parametrize('both', [False, True])
def test_a_schedule_with_shards(both):
    """Of the same passes, and as good as each named schedule for these times and this limit."""
    start = with_shards(build('zb-v', 4, 8))
    start = with_embedding(start) if both else start
    plain = Costs.uniform(start.placement, 10, 12, 8, comm=1)
    costs = with_shard_times(plain, start.placement, 0.6)
    found = Schedule.from_json(searched(partial(schedule_text, start, costs, 3.5, 0.2, 'makespan')))
    check(found)
    assert found.graph == start.graph and found.placement == start.placement
    assert max(peak(found, costs)) <= 3.5 < max(peak(start, costs))
    named = [*hosts_like(start, costs, 3.5)]
    assert [each.name.partition(' ')[0] for each in named] == ['v-half', 'v-min']
    assert len([*hosts_like(start, costs)]) == 3
    least = min(simulate(each, costs).makespan for each in named)
    assert simulate(found, costs).makespan <= least


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
