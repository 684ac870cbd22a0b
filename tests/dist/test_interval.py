"""A line of the log tells the mean of all iterations since the line before."""

from dataclasses import asdict
from statistics import fmean

import pytest
from timed import Pipeline, ShiftedClock

from megatron_zbpp.runtime.measure import Interval
from megatron_zbpp.schedules import build


def interval(schedules):
    """Figures of each iteration, of the first three together, and of the others."""
    each, found, interval = [], [], Interval()
    assert interval.figures() is None
    for at, schedule in enumerate(schedules):
        iteration = Pipeline(schedule, ShiftedClock(0.0)).run()
        each.append(iteration.figures())
        interval.add(iteration)
        if at in (2, len(schedules) - 1):
            found.append(interval.figures((at, at // 3)))
    assert interval.figures() is None
    return each, found


def test_mean_of_the_interval(ranks):
    """One iteration of the three has three times as many microbatches as the others."""
    schedules = [build('1f1b', 2, m) for m in (6, 2, 2, 2, 2)]
    for each, found in ranks(2).run(interval, schedules):
        for some, figures in ((each[:3], found[0]), (each[3:], found[1])):
            for name in ('bubble', 'idle'):
                mean = fmean(asdict(one)[name] for one in some)
                assert asdict(figures)[name] == pytest.approx(mean, abs=1e-9)
            assert figures.live == max(one.live for one in some)
            assert figures.iterations == len(some)
        means = (found[0], each[:3]), (found[1], each[3:])
        assert all(mean.bubble != one.bubble for mean, some in means for one in some), (
            'of one iteration'
        )
        assert str(found[1]).endswith('early steps: 2/2, taken back: 1 |')
