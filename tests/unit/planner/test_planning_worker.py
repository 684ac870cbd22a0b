"""The process that plans: what it is asked for, and what it leaves for who asked."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from megatron_zbpp.analysis.checker import check
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.ir import Placement, Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.planner import worker


@pytest.mark.parametrize('objective', ['makespan', 'window'])
def test_a_request_is_answered_by_a_schedule(monkeypatch, tmp_path: Path, objective: str) -> None:
    """Within the limit, on the placement that was asked for."""
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    placement = Placement.v(2)
    costs = Costs.uniform(placement, 10, 12, 8, comm=1)
    text = worker.request(placement, costs, 4, 1.5, 0.2, objective)
    monkeypatch.setattr(sys, 'stdin', io.StringIO(text))
    monkeypatch.setattr(sys, 'argv', ['worker', str(tmp_path / 'plan.json')])
    worker.main()
    found = Schedule.from_json((tmp_path / 'plan.json').read_text(encoding='utf-8'))
    check(found)
    assert found.placement == placement and found.num_microbatches == 4
    assert max(peak(found, costs)) <= 1.5
