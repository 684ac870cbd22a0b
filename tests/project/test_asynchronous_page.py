"""Numbers of the page on asynchronous pipelines are those of the simulator."""

from __future__ import annotations

import re

from paths import ROOT

from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.schedules import build
from megatron_zbpp.techniques.composition import TRAINED_BY
from megatron_zbpp.techniques.updates.versions import SteadyState, steady_state
from scripts.benchmark_asynchronous import METHODS, SAME, STOCK, period

PAGE = (ROOT / 'docs' / 'asynchronous.md').read_text()


def simulated(name: str, p: int, m: int):
    schedule = build(name, p, m)
    return simulate(schedule, Costs.uniform(schedule.placement))


def steady(name: str, p: int, m: int) -> SteadyState:
    found = steady_state(simulated(name, p, m))
    assert found is not None
    return found


def numbers(values) -> str:
    return ' '.join(f'{value:g}' for value in values)


def test_times_of_a_call():
    rows = re.findall(r'^\| (\d), (\d+) \| (.*) \|$', PAGE, re.M)
    assert len(rows) == 4
    for p, m, cells in rows:
        sizes = int(p), int(m)
        zb_v = simulated('zb-v', *sizes)
        assert cells.split(' | ') == [
            f'{3 * sizes[1]}',
            *(f'{simulated(name, *sizes).makespan:g}' for name in ('1f1b', 'zb-h1')),
            f'{zb_v.makespan:g} [{max(zb_v.windows):g}]',
            *(
                f'{steady(name, *sizes).period:.5g}'
                for name in ('pipedream-2bw', 'wpipe', 'wpipe-joint')
            ),
        ]


def test_times_of_trained_methods():
    """Each method that is trained has a row, with its simulated time, and its steps in the same."""
    rows = re.findall(
        r'^\| `([\w-]+)`(.*) \| ([\d.]+) \| [\d.]+ \| (\d+) \| [\d.]+ \|$', PAGE, re.M
    )
    assert [row[0] for row in rows] == [STOCK, SAME, *METHODS]
    for name, more, time, steps in rows:
        own = period(name, 4, 4)
        assert TRAINED_BY.get(name, '') in more
        assert (time, steps) == (f'{own:g}', f'{int(200 * 12 / own)}')


def test_copies_and_delays():
    rows = re.findall(r'^\| (\d) \| ([\d ]+) \| ([\d. ]+) \|$', PAGE, re.M)
    assert len(rows) == 4
    for m, copies, delays in rows:
        found = steady('pipedream', 8, int(m))
        assert copies == numbers(found.weight_copies)
        assert delays == numbers(each.mean for each in found.delays)
