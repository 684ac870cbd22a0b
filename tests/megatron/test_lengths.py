"""Microbatches of other lengths each: to the bit as by Megatron's own schedule."""

from __future__ import annotations

from unittest import mock

import pytest
from grids import grid
from models import Job, check, train
from supported import supports

from megatron_zbpp.analysis.program import BY_TAKER
from megatron_zbpp.analysis.simulator import simulate

pytestmark = pytest.mark.shared


@supports('microbatches of any length (`variable_seq_lengths`)')
@grid(
    schedule=('zb-v', 'zb-h1', 'interleaved', '1f1b', 'dualpipe-v', 'zb-2p+post-validation'),
    pp=(4, 2),
    dp=(1, 1, 1, 1, 2),
)
def test_identical_to_megatron(ranks, data, schedule, pp, dp):
    check(ranks, data, schedule, Job('lengths', te=False, pp=pp, dp=dp))


def posted(job, argv):
    """Runs on each rank: when forwards' receives of each program are posted, and its job."""
    from megatron_zbpp.mcore import programs

    found, original = [], programs.check

    def noting(schedule, receives):
        found.append(receives)
        return original(schedule, receives=receives)

    with mock.patch.object(programs, 'check', noting):
        train(job, argv)
    return found


@pytest.mark.parametrize(('kind', 'waits'), [('lengths', True), ('dense', False)])
def test_a_pass_waits_for_its_own_shape(ranks, data, kind, waits):
    """Where shapes vary, and there alone: tests/unit/analysis/test_posting.py counts waits."""
    job = Job(kind, te=False, iterations=1)
    for found in ranks(2).run(posted, job, job.argv('zb-v', False, data)):
        assert found and (BY_TAKER in found) == waits


def planned_for(job, argv):
    """Runs on each rank: the costs that `auto` planned for, and the iteration that it measured."""
    from megatron_zbpp.guests import auto_plan, measurements

    made, measured, fit, planner = [], [], measurements.measured_costs, auto_plan.AutoPlan

    def make(profile_iters=5, *settings, **named):  # without: what nothing is known for
        made.append(planner(1, *settings, **named, seconds=0.1))
        return made[0]

    def noting(timeline):
        measured.append(timeline)
        return fit(timeline)

    with (
        mock.patch.object(auto_plan, 'AutoPlan', make),
        mock.patch.object(measurements, 'measured_costs', noting),
    ):
        train(job, argv)
    return made[0].costs, measured


def test_auto_plans_for_the_mean(ranks, data):
    """Each rank then has in the simulator as much to do as it had in training."""
    job = Job('lengths', te=False)
    for costs, (measured,) in ranks(2).run(planned_for, job, job.argv('auto', False, data)):
        simulated = simulate(measured.schedule, costs)
        for rank in range(job.pp):
            assert simulated.busy(rank) == pytest.approx(measured.busy(rank))
