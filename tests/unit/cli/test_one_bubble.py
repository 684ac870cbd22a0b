"""The figure called bubble is one figure: whatever command prints or draws a schedule."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from paths import ROOT

from megatron_zbpp.cli import main
from megatron_zbpp.ir.timeline import MEANING

SHAPE = '--pp 4 --microbatches 8 --times'
# by name: flags, and whether makespan and window differ, so that two figures would be told apart
CASES = {
    'zb-v': (f'--schedule zb-v {SHAPE} 1,1.2,0.8', True),
    'gems': (f'--schedule gems {SHAPE} 1,1,1', True),
    'zb-h2': (f'--schedule zb-h2 {SHAPE} 1,2,1 --comm 0.1', False),
    'seq-zb-v': (f'--schedule seq-zb-v {SHAPE} 1,1,1', True),
    'dualpipe': (f'--schedule dualpipe {SHAPE} 1,1.2,0.8', False),
    'pipedream-2bw': (f'--schedule pipedream-2bw {SHAPE} 1,1,1 --comm 0.1', True),
}
TEXTS = 'svg', 'html', 'png', 'pdf'


def bubbles(text: str) -> set[str]:
    """Return what a text has behind the word, with one decimal."""
    found = re.findall(r'bubble(?: of it)? (\d+\.\d+)%', text)
    return {f'{float(share) + 1e-9:.1f}' for share in found}


def by_spans(text: str) -> float:
    """Return the share of the longest window in which the busiest rank idles, from a timeline."""
    ranks = [[(start, end) for _, start, end in rank] for rank in json.loads(text)['timeline']]
    window = max(rank[-1][1] - rank[0][0] for rank in ranks)
    return 1 - max(sum(end - start for start, end in rank) for rank in ranks) / window


@pytest.fixture
def zbpp(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    drawn: list[str] = []
    save = Figure.savefig

    def savefig(self, *args, **how):
        drawn.extend(each.get_text() for each in self.findobj(lambda at: hasattr(at, 'get_text')))
        save(self, *args, **how)

    monkeypatch.setattr(Figure, 'savefig', savefig)

    def run(line: str) -> str:
        drawn.clear()
        assert main(line.split()) == 0, line
        file = Path(line.split(' -o ')[-1])
        own = file.read_text() if ' -o ' in line and file.suffix in ('.svg', '.html') else ''
        return '\n'.join([capsys.readouterr().out, own, *drawn])

    return run


@pytest.mark.parametrize('name', CASES)
def test_every_command_says_the_same(name, zbpp):
    flags, unlike = CASES[name]
    facts = json.loads(zbpp(f'simulate {flags} --json'))
    if 'period' in facts:
        assert facts['bubble'] == facts['bubble_rate_period']
    else:
        spans = zbpp(f'show {flags} --json')
        assert facts['bubble'] == pytest.approx(by_spans(spans), abs=1e-9)
    assert (round(facts['bubble'], 3) != round(facts['idle_busiest_rank'], 3)) == unlike
    said = f'{100 * facts["bubble"] + 1e-9:.1f}'
    texts = {'simulate': zbpp(f'simulate {flags}')}
    texts |= {f'convert {to}': zbpp(f'convert {flags} -o a.{to}') for to in TEXTS}
    several = flags.replace('--schedule', '--schedules')
    texts |= {f'compare {to}': zbpp(f'compare {several} -o b.{to}') for to in TEXTS}
    for command, text in texts.items():
        if 'of makespan' in text or 'of the makespan' in text:
            raise AssertionError(f'{command}: bubble of what?')
        assert bubbles(text) == {said}, command
        assert MEANING.replace(' ', '') in re.sub(r'\s', '', text) or 'period' in facts, command
    (row,) = json.loads(zbpp(f'compare {several} --json'))['schedules']
    assert row['bubble'] == facts['bubble']
    heads, cells = (line.split(',') for line in zbpp(f'compare {several} --table csv').split())
    assert cells[heads.index('bubble')] == f'{facts["bubble"]:.2%}'
    page = zbpp(f'convert {flags} -o a.html')
    head = re.findall(r'<th>([^<]*)</th>', page)
    cells = re.findall(r'<td>([^<]*)</td>', page)
    assert cells[head.index('bubble') - 1] == f'{facts["bubble"]:.2%}'


def test_a_plan_says_the_same(zbpp):
    """Of the plan, and of the frontier, whose picture has the figure that its objective makes."""
    shape = '--pp 2 --microbatches 4 --times 1,1.2,0.8 --seconds 0.02 --no-cache'
    plan = json.loads(zbpp(f'plan {shape} --json'))
    said = f'{100 * plan["bubble"] + 1e-9:.1f}'
    assert bubbles(zbpp(f'plan {shape}')) == {said} == bubbles(zbpp(f'plan {shape} -o a.svg'))
    zbpp(f'plan {shape} -o plan.json')
    for command in ('simulate --file plan.json', 'convert --file plan.json -o b.html'):
        assert bubbles(zbpp(command)) == {said}, command
    for objective, axis in (('makespan', 'idle GPU time'), ('window', 'bubble')):
        frontier = f'plan {shape} --objective {objective} --frontier 2,3'
        assert axis in zbpp(f'{frontier} -o f.png').splitlines()
        of = json.loads(zbpp(f'{frontier} --json'))['frontier']
        column = zbpp(f'{frontier} --table csv').split()
        if objective == 'window':
            at = column[0].split(',').index('bubble')
            shares = [line.split(',')[at] for line in column[1:] if '%' in line]
            assert shares == [f'{each["bubble"]:.2%}' for each in of]


def test_the_glossary_defines_both():
    text = (ROOT / 'docs' / 'architecture.md').read_text()
    assert (
        '| bubble | share of the longest window in which the busiest rank computes nothing' in text
    )
    assert '`idle_busiest_rank`' in text


def test_no_page_has_another_bubble():
    """A bubble of the makespan is named so nowhere: it is idle GPU time, or the busiest rank's."""
    for page in (ROOT / 'README.md', *(ROOT / 'docs').rglob('*.md')):
        text = ' '.join(page.read_text().split())
        assert not re.findall(
            '(?i)bubbles? of the makespan|makespan.s bubble|makespan bubble', text
        ), page
