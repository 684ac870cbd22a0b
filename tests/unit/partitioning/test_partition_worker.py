"""What `auto` asks of the process that looks for a better partition, and what that answers."""

from __future__ import annotations

import json
import subprocess

import pytest
from instances import P1

from megatron_zbpp import Devices, Layer, Layers, Schedule
from megatron_zbpp.analysis.checker import check
from megatron_zbpp.partitioning import worker


def asked(layers, limit=None, seconds=1.0):
    return worker.request(layers, Devices.alike(4), 4, limit, seconds, 'makespan')


def test_a_plan_that_can_be_loaded(tmp_path):
    """By the process, whose file it is."""
    file = tmp_path / 'plan.json'
    done = subprocess.run([*worker.COMMAND, str(file)], input=asked(P1), text=True, timeout=60)
    plan = json.loads(file.read_text())
    assert done.returncode == 0
    check(Schedule.from_object(plan['schedule']))
    assert plan['layout'].replace('|', '') == P1.text((8,))
    assert plan['makespan'] <= 67


def test_within_a_limit():
    plan = json.loads(worker.answer(asked(P1, limit=8)))
    assert max(plan['peak_activations']) <= 8


def test_multi_token_prediction_stays_in_a_loop():
    layers = Layers(
        (Layer('E'), *[Layer('t', 1, 1, 1)] * 8, Layer('m', 2, 2, 2), Layer('L', 1, 1, 1))
    )
    plan = json.loads(worker.answer(asked(layers, seconds=0.2)))
    assert Schedule.from_object(plan['schedule']).placement.is_loop


def test_odd_requests():
    text = json.loads(asked(P1))
    with pytest.raises(ValueError, match='memory_limit'):
        worker.answer(json.dumps(text | {'memory_limit': 'much'}))
    with pytest.raises(ValueError, match='within its memory'):
        worker.answer(asked(P1, limit=0.5))
