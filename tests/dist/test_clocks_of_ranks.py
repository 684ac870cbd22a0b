"""Ranks whose clocks are hours apart are measured on one."""

import pytest
import torch.distributed as dist
from timed import Pipeline, ShiftedClock

from megatron_zbpp.schedules import build

AHEAD = (1000.0, -5.0, 7200.0, 0.25)
EXACT = 0.05  # seconds: round trips on one host take far less, even where it is busy


def measure(schedule):
    """The iteration of all ranks as put together, this rank's own times, and two numbers of it."""
    ahead = AHEAD[dist.get_rank()]
    iteration = Pipeline(schedule, ShiftedClock(ahead)).run()
    own = [(start - ahead, end - ahead) for start, end in iteration.spans()]
    return iteration.gather(), own, iteration.figures()


@pytest.mark.parametrize(('name', 'p'), [('zb-v', 4), ('1f1b', 3), ('zb-h1', 2)])
def test_one_clock(ranks, name, p):
    results = ranks(p).run(measure, build(name, p, 6))
    measurement = results[0][0]
    timeline = measurement.timeline
    assert min(timeline.lags().values()) > -1e-6
    for found, (same, true, figures) in zip(timeline.spans, results, strict=True):
        assert same == measurement
        assert [end - start for start, end in found] == pytest.approx(
            [end - start for start, end in true], abs=1e-6
        )
        assert found[0][0] - AHEAD[0] == pytest.approx(true[0][0], abs=EXACT)
        assert figures.bubble == pytest.approx(timeline.bubble, abs=1e-6)
        assert 0 < figures.bubble < 1
        assert figures.live == max(measurement.peak_activations)
