"""Pages that set the papers' measurements beside our predictions show what their commands print."""

import re
import sys
from pathlib import Path

import pytest
from commands import run
from figures import span, timeline
from pages import README
from paths import ROOT

from megatron_zbpp import build
from megatron_zbpp.partitioning.setup_prediction import BY_RATES, BY_TIMES
from megatron_zbpp.techniques.composition import TRAINED_BY
from megatron_zbpp.techniques.updates.versions import SteadyState, steady_state
from scripts.benchmark_asynchronous import METHODS, SAME, STOCK, period

CHANGELOG = ROOT / 'CHANGELOG.md'
PAGE = ROOT / 'docs' / 'benchmarks' / 'paper.md'


def fixture(*flags: str):
    """What the command prints with these flags."""

    def printed() -> str:
        script = ROOT / 'scripts' / 'compare_with_paper.py'
        done = run([sys.executable, script, *flags], cwd=ROOT, timeout=200)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return pytest.fixture(scope='module')(printed)


printed, of_offload, of_advise = fixture(), fixture('--offload'), fixture('--advise')


def tables_of(page: Path) -> list[list[str]]:
    """Tables that stand in a page behind each mark, up to the end of the page or of the tables."""
    _, *parts = page.read_text().split('compared by a test -->\n\n')
    return [tables(part.partition('\n<!-- end of these tables -->')[0]) for part in parts]


def tables(text: str) -> list[str]:
    return [each.strip() for each in re.split('^(?=##)', text, flags=re.M)[1:]]


def test_pages_have_what_the_command_prints(printed, of_offload, of_advise):
    """The summary of all tables, and some of them."""
    shown, offload = tables_of(PAGE)
    (advice,) = tables_of(ROOT / 'docs' / 'advise.md')
    every, of_advice = tables(printed), tables(of_advise)
    assert shown == [each for each in every if each in shown] and shown[0] == every[0]
    assert (len(shown), len(every), len(of_advice)) == (5, 13, 5)
    assert offload == tables(of_offload) and advice == [of_advice[0], of_advice[-1]]
    cells = re.findall(r'([\d.]+)/([\d.]+)=([\d.]+)', printed)
    assert len(cells) > 200
    for measured, predicted, ratio in cells:
        assert float(measured) / float(predicted) == pytest.approx(float(ratio), abs=0.0105)


def test_uncertainty_is_that_of_published_runs(of_advise):
    """By rates: of all runs that advice is held against; by times: of the paper's own times."""
    rows = re.findall(r'\| (\d+) \| (\d\.\d+) \| (\d\.\d+) \| (\d\.\d+) \|\n', of_advise)
    numbers, _, least, most = zip(*rows, strict=True)
    assert (min(map(float, least)), max(map(float, most))) == BY_RATES
    assert f'Held against {sum(map(int, numbers))} published runs' in CHANGELOG.read_text()
    ratios = re.findall(r'^\| \S+ \| \d\.\d+ \((\d\.\d+) to (\d\.\d+)', PAGE.read_text(), re.M)
    low, high = zip(*(map(float, pair) for pair in ratios), strict=True)
    assert (round(1 / max(high), 2), round(1 / min(low), 2)) == BY_TIMES


def test_what_the_page_says_of_offload(of_offload):
    """All but the rows in which GIS-H itself was slow; memory without what is in transit."""
    speed, memory = [], []
    for line in of_offload.splitlines():
        for k, cell in enumerate(line.split('|')[3:-1]):
            found = re.findall(r'\d\.\d\d', cell)
            if found:
                measured, predicted = map(float, found)
                (memory if k % 2 else speed).append(measured - predicted)
    assert len(speed) == len(memory) == 28
    assert sorted(map(abs, speed))[len(speed) // 2] <= 0.03
    assert sum(abs(d) <= 0.08 for d in speed) == len(speed) - 2
    assert all(-0.18 <= d <= 0.13 for d in memory)


def test_what_the_page_says_of_the_ratios(printed):
    summary = printed.partition('\n\n## ')[0]
    rows = [line.strip('| ').split(' | ') for line in summary.splitlines() if 'cells' in line]
    # of each schedule: the median, and the least of its cells
    speedup = {name: re.findall(r'\d\.\d+', cell)[:2] for name, _, cell, *_ in rows if cell.strip()}
    medians, least = zip(*(speedup[name] for name in ('ZB-1p', 'ZB-2p', 'ZB-V')), strict=True)
    assert speedup['1F1B-I'][0] < min(medians)
    said = f'reached {min(medians)} to {max(medians)} of them in the median, {min(least)} at worst'
    readme = ' '.join(README.read_text().split())
    assert said in readme
    table = printed.partition('## Table 4: speed-up over 1F1B')[2].partition('## ')[0]
    gains = [float(row.split('|')[6].split('/')[0]) for row in table.splitlines() if 'B | ' in row]
    assert len(gains) == 12
    assert f'measured ZB-2p {min(gains):.2f} to {max(gains):.2f} times as fast as 1F1B' in readme


def test_computed_rates_are_the_papers(printed):
    """Table 5 to all its digits; of arXiv Table 8 what ZB-V's authors got within .004."""
    table = printed.partition('## Table 5')[2].partition('## ')[0]
    rows = [re.findall(r'(0\.\d{4})/(0\.\d{4})', row) for row in table.splitlines()]
    rows = [row for row in rows if row]
    assert len(rows) == 12
    for baseline, interleaved, *zero_bubble in rows:
        assert all(published == ours for published, ours in (baseline, *zero_bubble))
        assert len(zero_bubble) == 4
        assert 0 < float(interleaved[1]) - float(interleaved[0]) < 0.004
    table = printed.partition('## arXiv Table 8')[2]
    rates = re.findall(r'(0\.\d{4})/(0\.\d{4})', table)
    assert len(rates) == 36
    for published, ours in rates:
        assert float(ours) == pytest.approx(float(published), abs=0.004)


# ---- Numbers of the page on asynchronous pipelines are those of the simulator.


ASYNCHRONOUS = (ROOT / 'docs' / 'asynchronous.md').read_text()


def steady(name: str, p: int, m: int) -> SteadyState:
    found = steady_state(timeline(build(name, p, m)))
    assert found is not None
    return found


def numbers(values) -> str:
    return ' '.join(f'{value:g}' for value in values)


def test_times_of_a_call():
    rows = re.findall(r'^\| (\d), (\d+) \| (.*) \|$', ASYNCHRONOUS, re.M)
    assert len(rows) == 4
    for p, m, cells in rows:
        sizes = int(p), int(m)
        zb_v = timeline(build('zb-v', *sizes))
        spans = [f'{span(build(name, *sizes)):g}' for name in ('1f1b', 'zb-h1')]
        endless = ('pipedream-2bw', 'wpipe', 'wpipe-joint')
        periods = [f'{steady(name, *sizes).period:.5g}' for name in endless]
        own = f'{zb_v.makespan:g} [{max(zb_v.windows):g}]'
        assert cells.split(' | ') == [f'{3 * sizes[1]}', *spans, own, *periods]


def test_times_of_trained_methods():
    """Each method that is trained has a row, with its simulated time, and its steps in the same."""
    rows = re.findall(
        r'^\| `([\w-]+)`(.*) \| ([\d.]+) \| [\d.]+ \| (\d+) \| [\d.]+ \|$', ASYNCHRONOUS, re.M
    )
    assert [row[0] for row in rows] == [STOCK, SAME, *METHODS]
    for name, more, time, steps in rows:
        own = period(name, 4, 4)
        assert TRAINED_BY.get(name, '') in more
        assert (time, steps) == (f'{own:g}', f'{int(200 * 12 / own)}')
    rows = re.findall(r'^\| (\d) \| ([\d ]+) \| ([\d. ]+) \|$', ASYNCHRONOUS, re.M)
    assert len(rows) == 4
    for m, copies, delays in rows:
        found = steady('pipedream', 8, int(m))
        assert copies == numbers(found.weight_copies)
        assert delays == numbers(each.mean for each in found.delays)
