"""The figure called bubble is one figure: whatever command prints or draws a schedule."""

import re
from pathlib import Path

import pytest
from command_lines import MODEL
from matplotlib.figure import Figure
from paths import ROOT

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


def by_spans(timeline: list) -> float:
    """Return the share of the longest window in which the busiest rank idles, from a timeline."""
    ranks = [[(start, end) for _, start, end in rank] for rank in timeline]
    window = max(rank[-1][1] - rank[0][0] for rank in ranks)
    return 1 - max(sum(end - start for start, end in rank) for rank in ranks) / window


@pytest.fixture
def said(zbpp, monkeypatch):
    """Runs a line; returns what it prints and draws."""
    drawn: list[str] = []
    save = Figure.savefig

    def savefig(self, *args, **how):
        drawn.extend(each.get_text() for each in self.findobj(lambda at: hasattr(at, 'get_text')))
        save(self, *args, **how)

    monkeypatch.setattr(Figure, 'savefig', savefig)

    def run(line: str) -> str:
        drawn.clear()
        out, file = zbpp(line), Path(line.split(' -o ')[-1])
        own = file.read_text() if file.suffix in ('.svg', '.html') and file.exists() else ''
        return '\n'.join([out, own, *drawn])

    return run


@pytest.mark.parametrize('name', CASES)
def test_every_command_says_the_same(name, zbpp, said):
    flags, unlike = CASES[name]
    facts = zbpp(f'simulate {flags} --json')
    if 'period' in facts:
        assert facts['bubble'] == facts['bubble_rate_period']
    else:
        spans = zbpp(f'show {flags} --json')['timeline']
        assert facts['bubble'] == pytest.approx(by_spans(spans), abs=1e-9)
    assert (round(facts['bubble'], 3) != round(facts['idle_busiest_rank'], 3)) == unlike
    share = f'{100 * facts["bubble"] + 1e-9:.1f}'
    texts = {'simulate': zbpp(f'simulate {flags}')}
    texts |= {f'convert {to}': said(f'convert {flags} -o a.{to}') for to in TEXTS}
    several = flags.replace('--schedule', '--schedules')
    texts |= {f'compare {to}': said(f'compare {several} -o b.{to}') for to in TEXTS}
    for command, text in texts.items():
        if 'of makespan' in text or 'of the makespan' in text:
            raise AssertionError(f'{command}: bubble of what?')
        assert bubbles(text) == {share}, command
        assert MEANING.replace(' ', '') in re.sub(r'\s', '', text) or 'period' in facts, command
    (row,) = zbpp(f'compare {several} --json')['schedules']
    assert row['bubble'] == facts['bubble']
    heads, cells = (line.split(',') for line in zbpp(f'compare {several} --table csv').split())
    assert cells[heads.index('bubble')] == f'{facts["bubble"]:.2%}'
    head, cells = (
        re.findall(f'<{tag}>([^<]*)</{tag}>', texts['convert html']) for tag in ('th', 'td')
    )
    assert cells[head.index('bubble') - 1] == f'{facts["bubble"]:.2%}'


def test_a_plan_says_the_same(zbpp, said):
    """Of the plan, and of the frontier, whose picture has the figure that its objective makes."""
    shape = '--pp 2 --microbatches 4 --times 1,1.2,0.8 --seconds 0.02 --no-cache'
    share = f'{100 * zbpp(f"plan {shape} --json")["bubble"] + 1e-9:.1f}'
    zbpp(f'plan {shape} -o plan.json')
    for command in (
        *(f'plan {shape}', f'plan {shape} -o a.svg', 'simulate --file plan.json'),
        'convert --file plan.json -o b.html',
    ):
        assert bubbles(said(command)) == {share}, command
    for objective, axis in (('makespan', 'idle GPU time'), ('window', 'bubble')):
        frontier = f'plan {shape} --objective {objective} --frontier 2,3'
        assert axis in said(f'{frontier} -o f.png').splitlines()
        of = zbpp(f'{frontier} --json')['frontier']
        column = zbpp(f'{frontier} --table csv').split()
        if objective == 'window':
            at = column[0].split(',').index('bubble')
            shares = [line.split(',')[at] for line in column[1:] if '%' in line]
            assert shares == [f'{each["bubble"]:.2%}' for each in of]


def test_pages_have_no_other_bubble():
    """A bubble of the makespan is named so nowhere: it is idle GPU time, or the busiest rank's."""
    text = (ROOT / 'docs' / 'architecture.md').read_text()
    meaning = 'share of the longest window in which the busiest rank computes nothing'
    assert f'| bubble | {meaning}' in text and '`idle_busiest_rank`' in text
    others = '(?i)bubbles? of the makespan|makespan.s bubble|makespan bubble'
    for page in (ROOT / 'README.md', *(ROOT / 'docs').rglob('*.md')):
        assert not re.findall(others, ' '.join(page.read_text().split())), page


COMMANDS = {
    'convert': 'convert --schedule zb-v --pp 2 --microbatches 4',
    'compare': 'compare --schedules zb-v,1f1b --pp 2 --microbatches 4',
    'plan': 'plan --pp 2 --microbatches 4 --seconds 0.02',
    'partition': 'partition layers.json --pp 2 --microbatches 4 --placements loop --exact',
}
BEGINS = {'a.svg': b'<svg', 'b.html': b'<!', 'c.png': b'\x89PNG', 'd.pdf': b'%PDF'}


@pytest.mark.parametrize('command', COMMANDS)
def test_every_command_draws_every_format_under_a_title(command, monkeypatch, zbpp):
    zbpp(f'profile {MODEL} -o layers.json')
    heads, written_on = [], Figure.text

    def text(self, x, y, said, *rest, **how):
        heads.append(said)
        return written_on(self, x, y, said, *rest, **how)

    monkeypatch.setattr(Figure, 'text', text)
    for name, begins in BEGINS.items():
        zbpp(f'{COMMANDS[command]} -o {name} --title', 'Ours & theirs')
        written = Path(name).read_bytes()
        assert written.startswith(begins)
        assert name > 'c' or b'Ours &amp; theirs' in written
    assert heads.count('Ours & theirs') == 2
