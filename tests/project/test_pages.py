"""The README and the pages in docs/: their length, their links, what they quote."""

import argparse
import ast
import json
import re
import shlex
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pages
import pytest
from figures import held, span, timeline
from forked import run
from grids import some
from paths import ROOT

import megatron_zbpp
from megatron_zbpp import Costs, build, compare, simulate
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.cli import benching, main
from megatron_zbpp.launch import flags
from megatron_zbpp.mcore.job import rules
from megatron_zbpp.render.planner_page import families
from megatron_zbpp.schedules import find, own_families
from megatron_zbpp.techniques.slices.balance import Attention, balanced, in_parts
from megatron_zbpp.techniques.slices.place import in_slices
from megatron_zbpp.techniques.updates.versions import steady_state
from scripts import docs_gallery, flags_page, readme_picture, refusals_page

DOCS = ROOT / 'docs'
LINK = re.compile(r'\]\(([^)#\s]+)')
ANCHOR = re.compile(r'\]\(([^)#\s]*\.md|)#([^)\s]+)\)')


def test_readme_is_short():
    text = pages.README.read_text()
    assert len(text.splitlines()) <= 120
    assert 'one H200' in text.partition('\n## ')[0], 'its status is said at the top'


@pytest.mark.parametrize('page', pages.PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in LINK.findall(page.read_text()):
        made = link == docs_gallery.PLANNER  # made while the site is built
        assert made or link.startswith('https://') or (page.parent / link).exists(), link
    for file, anchor in ANCHOR.findall(page.read_text()):
        assert anchor in headings(page.parent / file if file else page), (file, anchor)


def headings(page):
    """Their anchors, as GitHub makes them, and those that the page names itself."""
    named = re.findall(r'<\w+ id="([^"]+)"', page.read_text())
    code = re.sub(r'^```.*?^```', '', page.read_text(), flags=re.M | re.S)
    found = (title.replace('`', '') for title in re.findall(r'^#+ (.+)$', code, re.M))
    return {*named, *(re.sub(r'[^\w\- ]', '', t.lower()).replace(' ', '-') for t in found)}


def test_the_gallery_of_a_checkout():
    """Its links work where no site is built: `python scripts/docs_gallery.py` writes it."""
    assert docs_gallery.PAGE.read_text() == docs_gallery.gallery(with_pictures=False)
    assert {family.name for family in own_families(every=True)} <= headings(docs_gallery.PAGE)
    # each with what was tried, or named below the table as what a GPU can
    page = (DOCS / 'limits.md').read_text()
    assert page == refusals_page.page(), 'run python scripts/refusals_page.py'
    named = set(re.findall(r'`(\w+)`', page.partition('## Refusals left')[2]))
    assert set(rules.settings()) <= named


@pytest.mark.parametrize(
    'words',
    [
        'compare --pp 2 --microbatches 4',
        'simulate --schedule zb-v --pp 2 --microbatches 4',
        'simulate --schedule pipedream --pp 2 --microbatches 2',
    ],
)
def test_glossary_has_the_headings_of_tables(words, capsys):
    assert main([*words.split(), '--table', 'csv']) == 0
    headings = capsys.readouterr().out.partition('\n')[0].split(',')
    defined = pages.section(DOCS / 'architecture.md', '## Glossary')
    assert [name for name in headings if name not in defined] == []


def own_flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    flags.add_arguments(parser)
    return parser


def test_flags_of_ours_exist():
    """Or are Megatron's: `--pipeline-model-parallel-size` and its like."""
    ours = {option for action in own_flags()._actions for option in action.option_strings}
    for page in (*pages.PAGES, pages.README):
        named = set(re.findall(r'--pipeline-[a-z][a-z-]*[a-z]', page.read_text()))
        unknown = {flag for flag in named - ours if not flag.startswith('--pipeline-model-')}
        assert not unknown, page
    page = (DOCS / 'flags.md').read_text()
    assert page == flags_page.page(), 'run python scripts/flags_page.py'
    (ours, _) = own_flags()._action_groups[2:]
    rows = re.findall(r'^\| `(--[a-z0-9-]+)', page, re.M)
    assert rows == [action.option_strings[0] for action in ours._group_actions]


def strings(tree: ast.AST):
    """Each string of a module, one of several parts as one with `…` for what is filled in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (p.value if isinstance(p, ast.Constant) else '…' for p in node.values)
            yield ''.join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_messages_are_those_of_the_code():
    """What troubleshooting quotes is said somewhere, or by torch."""
    sources = (ROOT / 'megatron_zbpp').rglob('*.py')
    said = '\n'.join(s for source in sources for s in strings(ast.parse(source.read_text())))
    quoted = re.findall(r'^### `(.+?)`', (DOCS / 'troubleshooting.md').read_text(), re.M)
    assert len(quoted) > 20
    parts = [part.strip() for message in quoted for part in message.split('…')]
    torchs = 'Torch not compiled with CUDA enabled'
    assert [part for part in parts if part not in said and part != torchs] == []


def test_the_schedule_of_one_s_own_is_zb_h1():
    page = DOCS / 'your-own-schedule.md'
    files = pages.files(page)
    assert len([line for line in files['mine.py'].splitlines() if line.strip()]) <= 15
    for module, sizes in product(('mine', 'table'), ((2, 8), (4, 3), (8, 24))):
        exec(files[f'{module}.py'], names := {'__name__': module})
        assert names['deferred'](*sizes).passes == build('zb-h1', *sizes).passes


def test_the_gallery_has_every_family():
    page = docs_gallery.gallery()
    for family in own_families(every=True):
        assert f'## {family.name} {{ #{family.name} }}' in page
        said = f'Bubble: {family.bubble}. Peak memory: {family.memory}. Source: {family.source}.'
        assert said in page
        assert docs_gallery.picture(family).startswith('<svg')
    assert '| [`1f1b`](#1f1b) | 27.3% | 27.3% | 4 |' in page
    assert '| [`zb-v`](#zb-v) | 0.0% | 5.9% | 4 |' in page
    assert '| [`seq-zb-v`](#seq-zb-v) | 0.0% | 1.5% | 1.75 |' in page
    page = pages.section(DOCS / 'flags.md', '## API')
    named = re.findall(r'^::: megatron_zbpp\.(\w+)$', page, re.M)
    assert sorted(named) == sorted(set(megatron_zbpp.__all__) - {'__version__'})


def words(page: str) -> str:
    return ' '.join((DOCS / f'{page}.md').read_text().split())


def rows(page: str, pattern: str, count: int) -> list:
    """The rows of tables of a page, of which there are so many."""
    found = re.findall(pattern, (DOCS / f'{page}.md').read_text(), re.M)
    assert len(found) == count, page
    return found


def idle(schedule, costs=None, form='g') -> str:
    """The share of GPU time that is idle, and the peak memory."""
    costs = costs or Costs.uniform(schedule.placement)
    share = simulate(schedule, costs).idle_all_ranks
    return f'{100 * share:.1f} % [{max(peak(schedule, costs)):{form}}]'


def simulated(name, comm=0.0, chunks=None):
    """Bubble and idle GPU time in percent, and the peak memory, of a row of choosing.md."""
    found = timeline(schedule := build(name, 8, 24, num_chunks=chunks), comm=comm)
    shares = (f'{100 * share:.1f} %' for share in (found.bubble, found.idle_all_ranks))
    return (*shares, f'{max(held(schedule)):g}')


def test_what_a_partner_costs():
    """As `compare` says: the page once had the bubble of 1F1B."""
    found = {row.name: f'{100 * row.idle:.1f} %' for row in compare(8, 24, ['1f1b', 'bpipe'])}
    assert f'idle for {found["bpipe"]} instead of {found["1f1b"]}' in words('does-not-fit')


def test_numbers_of_the_schedules():
    """The two tables of choosing.md are what the simulator says."""
    row = r'^\| (`.+?) \| ([\d.]+ %) \[([\d.]+ %)\] \| (.+?) \|'
    for names, window, makespan, memory in rows('choosing', row, 10):
        found = [simulated(name) for name in re.findall('`(.+?)`', names)]
        assert {each[:2] for each in found} == {(window, makespan)}, names
        assert ', '.join(each[2] for each in found) == memory, names
    heads = {'1f1b': None, 'zb-h1': None, 'zb-v': None, 'zb-interleaved': 4, 'zb-2p': None}
    row = r'^\| ([\d.]+)(?: F)? \|((?: [\d.]+ % \|){5})$'
    for comm, cells in rows('choosing', row, 3):
        found = [simulated(name, float(comm), chunks)[1] for name, chunks in heads.items()]
        assert cells.strip(' |').split(' | ') == found


CELL = r'[\d.]+ % \[[\d.]+\](?: \| | \|$)'


def test_numbers_of_slices():
    """By schedule, and of long sequences by microbatches; sizes that balance."""
    for page, head, slices, made in (
        ('choosing', '`(.+?)`', (1, 2, 4, 8), lambda name, n: in_slices(name, 8, 4, n)),
        ('long-context', r'(\d+)', LONG, lambda m, n: in_slices('zb-v', 8, int(m), n)),
    ):
        for row, cells in rows(page, rf'^\| {head} \| ((?:{CELL}){{{len(slices)}}})', 5):
            assert cells.strip(' |').split(' | ') == [idle(made(row, n)) for n in slices], row
    row = r'^\| (0\.\d) \| (.+ \[[\d.]+\]) \| ([\d, ]+) \|$'
    for share, cells, tokens in rows('choosing', row, 3):
        attention, found = Attention(float(share)), []
        for schedule in (in_slices(name, 8, 4, 4) for name in ('zb-h1', 'zb-v')):
            own = 1, 1 + 1.5 * attention.share, 1 - attention.share
            costs = Costs.uniform(schedule.placement, *own)
            sizes = balanced(4, 131072, attention, costs)
            ways = (in_parts(costs, each, attention) for each in ((1,) * 4, sizes))
            found += [idle(schedule, each, '.3g') for each in ways]
            assert tokens == ', '.join(map(str, sizes))
        assert cells == ' | '.join(found)


LONG = (1, 2, 4, 8, 16)


def test_numbers_of_long_context():
    """Bubbles by what messages take, and of long attention."""
    costs = Costs.uniform(build('zb-v', 8, 1).placement)
    windows = [max(simulate(in_slices('zb-v', 8, 4, n), costs).windows) for n in (4, 5)]
    assert windows[0] > 12.1 and windows[1] == pytest.approx(12)  # m (F + B + W); n of 14/3
    row = r'^\| ([\d.]+) F,? (.+?) \|((?: [\d.]+ % \|){5})$'
    for comm, how, cells in rows('long-context', row, 2):
        parts = [n if 'its part' in how else 1 for n in LONG]
        own = [replace(costs, comm=float(comm) / part) for part in parts]
        found = [idle(in_slices('zb-v', 8, 4, n), c) for n, c in zip(LONG, own, strict=True)]
        assert cells.strip(' |').split(' | ') == [each.partition(' [')[0] for each in found], how
    text = (DOCS / 'choosing.md').read_text()
    bubbles = {}
    for name in ('zb-v', 'interleaved', '1f1b'):
        schedule = build(name, 8, 24)
        bubbles[name] = idle(schedule, Costs.uniform(schedule.placement, weight=0)).split(' [')[0]
    assert bubbles['zb-v'] == bubbles['interleaved']
    assert f'{bubbles["zb-v"]} of all GPU time idle' in text and f'has {bubbles["1f1b"]} |' in text


@pytest.mark.parametrize(('command', 'text'), pages.printed(), ids=lambda each: str(each)[-40:])
def test_blocks_of_output_are_what_is_printed(command, text):
    """In a process of its own: that of the tests may have Megatron already."""
    done = run([sys.executable, '-m', 'megatron_zbpp.cli', *shlex.split(command.line)[1:]])
    assert done.returncode == 0, done.stderr
    assert text in done.stdout, command


def test_memory_in_words():
    """What `v-half` and `v-min` hold of the activations of 1F1B, at the sizes that pages name."""
    found = set()
    for page in (pages.README, DOCS / 'choosing.md', DOCS / 'does-not-fit.md'):
        text = page.read_text()
        for name, rest in re.findall(r'`(v-half|v-min)` (?:\| |holds )?([^|;:]*)', text):
            said = r"(\d+) of (?:1F1B's )?(\d+)(?: activations)? at p = (\d+)"
            for *numbers, p in re.findall(said, rest):
                most = [max(held(build(each, int(p), 3 * int(p)))) for each in (name, '1f1b')]
                assert list(map(float, numbers)) == most, page
                found.add((page.stem, name, p))
    wanted = {('README', 'v-half', '8'), ('does-not-fit', 'v-half', '8')}
    assert wanted | {('choosing', 'v-half', '4'), ('choosing', 'v-min', '8')} <= found
    for page in pages.PAGES:
        assert "half of 1F1B's activations" not in page.read_text(), page


def test_few_microbatches():
    """Of the idle GPU time of `zb-h1`, as README and choosing.md say: half or a little more."""
    said = 'half the idle GPU time of `zb-h1`, or a little more'
    assert all(said in page.read_text() for page in (pages.README, DOCS / 'choosing.md'))
    for p, m in [(k, k + more) for k in (2, 4, 8, 16) for more in range(k)]:
        own, other = (timeline(build(name, p, m)).idle_all_ranks for name in ('zb-v', 'zb-h1'))
        assert 0.5 <= own / other < 0.6, (p, m)


def with_shards(capsys, name, microbatches, share=None):
    words = ['simulate', '--schedule', name, '--pp', '8', '--microbatches', str(microbatches)]
    assert main([*words, *(['--vocab-parallel', str(share)] if share else []), '--json']) == 0
    found = json.loads(capsys.readouterr().out)
    bubble = found['makespan'] * found['idle_busiest_rank']
    return found['makespan'], bubble, max(found['peak_activations'])


@some('share', ['0.1', '0.5'], '0.05', '0.2', '0.3')
def test_numbers_of_shards(capsys, share):
    """Rows of large-vocabulary.md: makespans with shards."""
    shares = dict(rows('large-vocabulary', r'^\| (0\.\d+) \| [\d.]+ \|(.+)\|$', 5))
    assert [*shares] == ['0.05', '0.1', '0.2', '0.3', '0.5']
    cells = [float(cell.strip('* ')) for cell in shares[share].split('|')]
    for name, shards in zip(('1f1b', 'zb-h1', 'zb-v'), cells[1::2], strict=True):
        assert shards == round(with_shards(capsys, name, 32, share)[0], 1)


SPANS = rows('large-vocabulary', r'^\| `(.+?)` \| ([\d.]+) \| (.+?) \| ([\d.]+) \| (.+?) \|$', 5)


@some('at', [len(SPANS) - 1], *range(5))
def test_spans_of_shards(capsys, at):
    """Rows of that page: bubble and peak without shards, and with shares from 0.1 to 0.8."""
    name, *cells = SPANS[at]
    plain, *shared = (with_shards(capsys, name, 64, share) for share in (None, 0.1, 0.2, 0.4, 0.8))
    spans = []
    for of in (1, 2):
        values = [round(each[of], 1) for each in shared]
        least_and_most = sorted({min(values), max(values)})
        spans += [f'{plain[of]:g}', ' to '.join(f'{each:g}' for each in least_and_most)]
    assert cells == spans


def test_shares_of_vocabularies():
    for many, cells in rows('large-vocabulary', r'^\| (\d+)k words \|(.+)\|$', 3):
        shares = (int(many) * 1024 / (12 * hidden) / 4 / 8 for hidden in (2048, 4096, 8192))
        assert cells.strip().split(' | ') == [f'{share:.2f}' for share in shares]


def test_numbers_of_simulated_prose(capsys):
    """Sentences of choosing.md and planning.md."""
    choosing, planning = words('choosing'), words('planning')
    stp, zb_v = (timeline(build(name, 8, 24)) for name in ('stp', 'zb-v'))
    for share, pays in ((0.94, True), (0.95, False)):
        paired = build('dualpipe-v', 8, 24, together=True)
        costs = replace(Costs.uniform(paired.placement), together=share)
        assert (simulate(paired, costs).makespan < zb_v.makespan) == pays
    assert 'they pay from 0.94 down' in choosing
    line = 'simulate --schedule stp --pp 8 --microbatches 24 --together FB=0.9 --json'
    assert main(line.split()) == 0
    hidden = json.loads(capsys.readouterr().out)['makespan']
    said = f'makespan is {stp.makespan:g} where pairs hide nothing, as that of `zb-v`, and '
    assert f'{said}{hidden:.1f} where' in choosing and stp.makespan == zb_v.makespan
    assert f'With post-validation `zb-v` takes {max(zb_v.windows):g}, in half' in choosing
    ahead = []
    for p in (4, 8):
        steady = steady_state(timeline(build('pipedream-2bw', p, p)))
        ahead.append(f'{100 * (1 - steady.period / span(build("zb-v", p, p))):.0f}')
    assert f'simulated {ahead[0]} to {ahead[1]} % ahead of `zb-v` at m = p' in choosing
    made = build('zb-v', 8, 24), build('zb-interleaved', 8, 24, num_chunks=4)
    own, other = (f'{100 * timeline(each, 1, 1.2, 0.8).idle_all_ranks:.1f} %' for each in made)
    assert f'{other} of idle GPU time: that of `zb-int' in planning
    assert f"`zb-v`'s {own}" in planning
    assert len(families()) == 30 and planning.count('thirty') == 2


def test_formulas_of_two_way_pipelines():
    row = r'^\| `([\w-]+)` \| even D[^|]*\| ([^|]+) \| ([^|]+) \|$'
    for name, *cells in rows('two-way', row, 6):
        for cell, formula in zip(cells, (find(name).bubble, find(name).memory), strict=True):
            term = re.sub(r' \([^()]*(?:=|divides).*', '', formula.text)
            ours, theirs = (re.sub(' |at most', '', each) for each in (term, cell))
            assert theirs.replace('D', 'p') == ours, name


def test_measured_numbers_are_those_of_their_files():
    """README's are those of the page of benchmarks, and of the runs on a GPU."""
    measured = DOCS / 'benchmarks' / 'index.md'
    block = pages.section(pages.README, '## Measured')
    rows = re.findall(r'^\| (.+?) \| (\d.+) \|$', block, re.M)
    assert len(rows) == 6
    for name, cells in rows:
        assert f'\n| {name} | {cells} |\n' in measured.read_text(), name
    file = DOCS / 'results' / '2026-11-27-NVIDIA-H200.json'
    speed = {
        row['schedule']: row['tokens_per_second_per_gpu']
        for row in json.loads(file.read_text())['rows']
        if (row['kind'], row['model'], row.get('p'), row.get('m')) == ('predicted', '6.2b', 8, 24)
    }
    said = f"we predict {speed['zb-v'] / speed['1f1b']:.2f} times 1F1B's tokens for `zb-v`, "
    said += f'{speed["zb-h1"] / speed["1f1b"]:.2f} for `zb-h1`'
    assert said in ' '.join(pages.README.read_text().split())


def test_the_bench_of_the_page_is_its_file(capsys):
    """Of five rounds: the table is what the command prints of these runs."""
    kept = json.loads((DOCS / 'results' / '2026-11-28-bench-CPU.json').read_text())
    line = SimpleNamespace(args=None, on_cpu=True)
    job = SimpleNamespace(tokens=kept['tokens'], line=line, own=(), script='pretrain_gpt.py')
    assert {len(runs) for runs in kept['runs'].values()} == {5}
    rows = [benching._row(name, runs, job, 10) for name, runs in kept['runs'].items()]
    benching._judge(rows, job)
    benching._print(rows, job)
    out = capsys.readouterr().out
    page = DOCS / 'benchmarks' / 'index.md'
    (block,) = (b.text for b in pages.blocks() if (b.page, b.language) == (page, 'text'))
    assert out.startswith(block)


def test_the_install_line_and_the_number_of_schedules():
    """Nothing in it has to be filled in."""
    (line,) = (each for each in pages.lines(pages.README) if each.startswith('pip install'))
    assert line == 'pip install .' and (ROOT / 'pyproject.toml').exists()
    number = sum(1 for _ in own_families(every=True))
    assert f'[{number} schedules](docs/choosing.md)' in pages.README.read_text()


def test_the_first_picture_shows_what_the_text_says(tmp_path):
    """The command beside it draws it, and the simulator saves what its description says."""
    readme_picture.draw(str(tmp_path / 'saving.png'))
    assert (tmp_path / 'saving.png').read_bytes()[:4] == b'\x89PNG'
    sizes = readme_picture.RANKS, readme_picture.MICROBATCHES
    spans = {name: span(build(name, *sizes)) for name in readme_picture.SCHEDULES}
    saved = {name: f'{100 * (1 - each / spans["1f1b"]):.0f} %' for name, each in spans.items()}
    said = f'zb-h1 saves {saved["zb-h1"]}, zb-v {saved["zb-v"]}'
    assert all(said in page.read_text() for page in (pages.README, DOCS / 'index.md'))


def test_names_of_other_runtimes_are_understood():
    """In the section for those who come from there: schedules, our flags, and flags of forks."""
    head = '## Coming from another pipeline runtime'
    page = pages.section(DOCS / 'getting-started.md', head)
    ours = {option for action in own_flags()._actions for option in action.option_strings}
    named = set(re.findall(r'--(?:pipeline-schedule|pipeline-[a-z]+-?[a-z-]*)', page))
    assert named - {'--pipeline-model-parallel-layout'} <= ours
    fork = page.partition('\n### sail-sg')[2].partition('\n### ')[0]
    theirs = re.findall(r'^\| `(--[a-z0-9-]+)', fork, re.M)
    assert len(theirs) > 6 and set(theirs) <= ours
    assert all(alias in page or alias.endswith('-end-iter') for alias in flags._ALIASES)
    schedules = re.findall(r'--pipeline-schedule ([\w-]+)', page)
    schedules += re.findall(r'`(Schedule\w+)`', page)
    assert len(schedules) > 20
    for name in schedules:
        assert name == 'auto' or find(name), name
    assert find('zbv-formatted').name == 'zb-v' and find('zero-bubble').name == 'zb-h1'


def test_schedules_beside_those_of_languages_are_there():
    """On the page of planning: names that one can give, and passes that a file can have."""
    section = pages.section(DOCS / 'planning.md', '## What schedule languages express')
    cells = [line.split('|')[2] for line in section.splitlines() if line.startswith('|')]
    words = re.findall(r'`([\w-]+)`', ''.join(cells))
    no_names = {'placement', 'passes', 'auto', *(word for word in words if word.isupper())}
    named = set(words) - no_names
    assert len(named) > 12 and all(find(name) for name in named)
    assert {word for word in words if word.isupper()} <= {*'FBWROLEK', 'BW'}
    shown = {Path(found).name for page in pages.PAGES for found in LINK.findall(page.read_text())}
    assert {picture.name for picture in (DOCS / 'pictures').iterdir()} <= shown
