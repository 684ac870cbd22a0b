"""`auto` measures, plans and switches while it trains, and the bits stay Megatron's."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import pytest
from nvidia import needs_training, run
from supported import supports

pytestmark = needs_training


@contextmanager
def told(training, switching=False, seconds=30.0):
    """What auto says, waiting for the planner: a test is shorter than a plan takes.

    Args:
        training: not asked.
        switching: whether the plan is taken for better, whatever was measured.
        seconds: to plan in, at most.
    """
    from unittest import mock

    from megatron_zbpp.mcore import session
    from megatron_zbpp.runtime.autotune import AutoPlan

    said, poll, simulated = [], AutoPlan._poll, AutoPlan._simulated

    def wait(self, schedule):
        self._planner.wait()
        self.say = said.append
        return poll(self, schedule)

    def halved(self, schedule, costs):
        return simulated(self, schedule, costs) / (2 if schedule.name == 'planned' else 1)

    taken = mock.patch.object(AutoPlan, '_simulated', halved if switching else simulated)
    hurried = mock.patch.object(session, 'AutoPlan', partial(AutoPlan, seconds=seconds))
    with mock.patch.object(AutoPlan, '_poll', wait), taken, hurried:
        yield said


@supports("NVIDIA's loop: measures, plans and switches", 'auto')
@pytest.mark.parametrize('chunks', [[], ['--num-virtual-stages-per-pipeline-rank', 1]])
def test_auto(ranks, tmp_path, chunks):
    """With two chunks a rank it switches for sure, with one if that is better."""
    flags = ['--pipeline-model-parallel-size', 2, '--global-batch-size', 6, '--clip-grad', 1e9]
    flags += ['--train-iters', 14]
    stock = run(ranks(2), *flags, '--save', tmp_path, '--save-interval', 1)
    loading = ['--load', tmp_path, '--ckpt-step', 1, '--pipeline-schedule', 'auto', *chunks]
    auto = ['--pipeline-schedule-profile-iters', 3, '--pipeline-trace-dir', tmp_path / 'trace']
    ours = run(ranks(2), *flags, *loading, *auto, event=partial(told, switching=not chunks))
    assert ours.losses == {i: loss for i, loss in stock.losses.items() if i > 1}
    assert ours.parameters == stock.parameters
    first, *rest = ours.reported[0]
    assert chunks or 'switches' in first
    if 'switches' in first:
        (measured,) = rest
        assert 'ms with the planned schedule' in measured
    else:
        assert 'nothing better' in first and not rest
    page = (tmp_path / 'trace' / 'pipeline.html').read_text()
    assert '"name":"planned"' in page and '"name":"measured"' in page
    assert ('"name":"measured before, zb-' in page) == ('switches' in first)
    assert (tmp_path / 'trace' / 'pipeline.perfetto.json').exists()
