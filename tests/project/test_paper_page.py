"""The page that sets the papers' measurements beside our predictions is what its command prints."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from commands import run
from pages import README
from paths import ROOT

from megatron_zbpp.partitioning.advise.prediction import BY_RATES, BY_TIMES

CHANGELOG = ROOT / 'CHANGELOG.md'
PAGE = ROOT / 'docs' / 'benchmarks' / 'paper.md'


def what_is_printed(*flags: str) -> str:
    script = ROOT / 'scripts' / 'compare_with_paper.py'
    done = run([sys.executable, script, *flags], cwd=ROOT, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope='module')
def printed() -> str:
    return what_is_printed()


@pytest.fixture(scope='module')
def of_offload() -> str:
    return what_is_printed('--offload')


def tables_of(page: Path) -> list[str]:
    """What stands in a page behind each mark, up to the end of the page or of the tables."""
    _, *parts = page.read_text().split('compared by a test -->\n\n')
    return [part.partition('\n<!-- end of these tables -->')[0] for part in parts]


def test_page_is_what_the_command_prints(printed: str) -> None:
    assert tables_of(PAGE)[0] == printed


def test_page_of_offload_is_what_the_command_prints(of_offload: str) -> None:
    assert tables_of(PAGE)[1:] == [of_offload]


@pytest.fixture(scope='module')
def of_advise() -> str:
    return what_is_printed('--advise')


def test_page_of_advice_is_what_the_command_prints(of_advise: str) -> None:
    assert tables_of(ROOT / 'docs' / 'advise.md') == [of_advise]


def test_uncertainty_is_that_of_published_runs(of_advise: str) -> None:
    """By rates: of all runs that advice is held against; by times: of the paper's own times."""
    rows = re.findall(r'\| (\d+) \| (\d\.\d+) \| (\d\.\d+) \| (\d\.\d+) \|\n', of_advise)
    numbers, _, least, most = zip(*rows, strict=True)
    assert (min(map(float, least)), max(map(float, most))) == BY_RATES
    assert f'Held against {sum(map(int, numbers))} published runs' in CHANGELOG.read_text()
    ratios = re.findall(r'^\| \S+ \| \d\.\d+ \((\d\.\d+) to (\d\.\d+)', PAGE.read_text(), re.M)
    low, high = zip(*(map(float, pair) for pair in ratios), strict=True)
    assert (round(1 / max(high), 2), round(1 / min(low), 2)) == BY_TIMES


def test_what_the_page_says_of_offload(of_offload: str) -> None:
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


def test_every_cell_has_its_ratio(printed: str) -> None:
    cells = re.findall(r'([\d.]+) / ([\d.]+) = ([\d.]+)', printed)
    assert len(cells) > 200
    for measured, predicted, ratio in cells:
        assert float(measured) / float(predicted) == pytest.approx(float(ratio), abs=0.0105)


def test_what_the_page_says_of_the_ratios(printed: str) -> None:
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
    gains = [float(row.split('|')[6].split()[0]) for row in table.splitlines() if 'B | ' in row]
    assert len(gains) == 12
    assert f'measured ZB-2p {min(gains):.2f} to {max(gains):.2f} times as fast as 1F1B' in readme


def test_computed_rates_are_the_papers(printed: str) -> None:
    """Table 5 to all its digits; of arXiv Table 8 what ZB-V's authors got within .004."""
    table = printed.partition('## Table 5')[2].partition('## ')[0]
    rows = [re.findall(r'(0\.\d{4}) / (0\.\d{4})', row) for row in table.splitlines()]
    rows = [row for row in rows if row]
    assert len(rows) == 12
    for baseline, interleaved, *zero_bubble in rows:
        assert all(published == ours for published, ours in (baseline, *zero_bubble))
        assert len(zero_bubble) == 4
        assert 0 < float(interleaved[1]) - float(interleaved[0]) < 0.004
    table = printed.partition('## arXiv Table 8')[2]
    rates = re.findall(r'(0\.\d{4}) / (0\.\d{4})', table)
    assert len(rates) == 36
    for published, ours in rates:
        assert float(ours) == pytest.approx(float(published), abs=0.004)
