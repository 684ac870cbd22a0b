"""Gains against another schedule, and the parts of idle GPU time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_zbpp.analysis.gain import gain_text, idle_parts, makespan_of
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import Placement
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.schedules import build

TIMES = st.lists(st.sampled_from((0.5, 1.0, 1.25, 3.0)), min_size=8, max_size=8)


@given(name=st.sampled_from(('zb-v', 'interleaved', 'hanayo')), times=TIMES, comm=st.floats(0, 0.5))
def test_parts_sum_to_the_idle_time(name, times, comm):
    schedule, costs = build(name, 4, 6), Costs.of(times, times, times, comm)
    timeline = simulate(schedule, costs)
    parts = idle_parts(timeline, costs)
    assert sum(parts) == pytest.approx(timeline.idle_all_ranks)
    assert parts.schedule > -1e-12 and parts.uneven_stages > -1e-12


def test_each_cause_is_told_by_itself():
    schedule = build('1f1b', 4, 8)
    even = Costs.uniform(schedule.placement)
    plain = idle_parts(simulate(schedule, even), even)
    assert plain == pytest.approx((3 / 11, 0, 0))
    late = Costs.uniform(schedule.placement, comm=0.25)
    timeline = simulate(schedule, late)
    assert idle_parts(timeline, late).messages == pytest.approx(1 - 33 / timeline.makespan)
    wide = replace(even, hops=((0.25, 0.25),) * 3)
    assert idle_parts(simulate(schedule, wide), wide) == idle_parts(timeline, late)
    heavy = Costs.of((1, 1, 1, 3), (1, 1, 1, 3), (1, 1, 1, 3))
    timeline = simulate(schedule, heavy)
    uneven = idle_parts(timeline, heavy)
    assert uneven.uneven_stages == pytest.approx((8 * 9 - 8 * 18 / 4) / timeline.makespan)
    assert uneven.messages == 0


def test_the_rival_runs_the_same_model():
    """Stages of a V are joined for 1F1B, and those of 1F1B cut for several chunks."""
    times = (1.0, 2.0, 3.0, 4.0)
    schedule = build('zb-v', 2, 6)
    joined = simulate(build('1f1b', 2, 6), Costs.of((3, 7), (3, 7), (3, 7))).makespan
    assert makespan_of('1f1b', schedule, Costs.of(times, times, times)) == joined
    plain = build('1f1b', 4, 8)
    cut = build('interleaved', 4, 8)
    assert makespan_of('interleaved', plain, Costs.uniform(plain.placement)) == pytest.approx(
        simulate(cut, Costs.uniform(cut.placement)).makespan
    )
    assert makespan_of('1f1b', plain, Costs.uniform(plain.placement)) == 33


def test_what_cannot_be_compared_has_no_rival():
    three = build('interleaved', 2, 4, num_chunks=3)
    assert makespan_of('zb-v', three, Costs.uniform(Placement.loop(2, 3))) is None
    alone = build('gpipe', 1, 4)
    assert makespan_of('zb-v', alone, Costs.uniform(alone.placement)) is None
    assert gain_text(2.0, None, 'zb-v') == ''


def test_a_loss_is_no_gain():
    assert gain_text(33.0, 30.0, '1f1b') == ', 10.0% more time than 1f1b'
