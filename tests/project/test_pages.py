"""The README and the pages in docs/: their length, their links, what they quote."""

import argparse
import ast
import csv
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
from forked import run
from grids import some
from paths import ROOT

import megatron_zbpp
from megatron_zbpp import Costs, build, simulate
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

LINK = re.compile(r'\]\(([^)#\s]+)')
ANCHOR = re.compile(r'\]\(([^)#\s]*\.md|)#([^)\s]+)\)')


def test_readme_is_short():
    text = pages.README.read_text()
    assert len(text.splitlines()) <= 120
    assert 'one H200' in text.partition('\n## ')[0], 'its status is said at the top'


@pytest.mark.parametrize('page', pages.PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    """To pages, and to headings of pages."""
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
    page = (ROOT / 'docs' / 'limits.md').read_text()
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
    defined = pages.section(ROOT / 'docs' / 'architecture.md', '## Glossary')
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
    page = (ROOT / 'docs' / 'flags.md').read_text()
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
    text = (ROOT / 'docs' / 'troubleshooting.md').read_text()
    quoted = re.findall(r'^### `(.+?)`', text, re.M)
    assert len(quoted) > 20
    parts = [part.strip() for message in quoted for part in message.split('…')]
    torchs = 'Torch not compiled with CUDA enabled'
    assert [part for part in parts if part not in said and part != torchs] == []


def test_the_schedule_of_one_s_own_is_zb_h1():
    page = ROOT / 'docs' / 'your-own-schedule.md'
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
    page = pages.section(ROOT / 'docs' / 'flags.md', '## API')
    named = re.findall(r'^::: megatron_zbpp\.(\w+)$', page, re.M)
    assert sorted(named) == sorted(set(megatron_zbpp.__all__) - {'__version__'})


def simulated(name, comm=0.0, chunks=None):
    """Bubble and idle GPU time in percent, and the peak memory, of a row of choosing.md."""
    schedule = build(name, 8, 24, num_chunks=chunks)
    costs = Costs.uniform(schedule.placement, comm=comm)
    timeline = simulate(schedule, costs)
    return (
        f'{100 * timeline.bubble:.1f} %',
        f'{100 * timeline.idle_all_ranks:.1f} %',
        f'{max(peak(schedule, costs)):g}',
    )


def test_what_a_partner_costs(capsys):
    """As `compare` says: the page once had the bubble of 1F1B."""
    words = 'compare --schedules 1f1b,bpipe --pp 8 --microbatches 24 --table csv'
    assert main(words.split()) == 0
    rows = {row['schedule']: row for row in csv.DictReader(capsys.readouterr().out.splitlines())}
    idle = {name: f'{float(row["idle"].strip("%")):.1f} %' for name, row in rows.items()}
    text = ' '.join((ROOT / 'docs' / 'does-not-fit.md').read_text().split())
    assert f'idle for {idle["bpipe"]} instead of {idle["1f1b"]}' in text


def test_numbers_of_the_schedules():
    """The two tables of choosing.md are what the simulator says."""
    text = (ROOT / 'docs' / 'choosing.md').read_text()
    row = re.compile(r'^\| (`.+?) \| ([\d.]+ %) \[([\d.]+ %)\] \| (.+?) \|', re.M)
    rows = row.findall(text)
    assert len(rows) == 10
    for names, window, makespan, memory in rows:
        named = re.findall('`(.+?)`', names)
        found = [simulated(name) for name in named]
        assert {each[:2] for each in found} == {(window, makespan)}, names
        assert ', '.join(each[2] for each in found) == memory, names
    heads = ('1f1b', 'zb-h1', 'zb-v', 'zb-interleaved', 'zb-2p')
    rows = re.findall(r'^\| ([\d.]+)(?: F)? \|((?: [\d.]+ % \|){5})$', text, re.M)
    assert len(rows) == 3
    for comm, cells in rows:
        options = [{'chunks': 4} if name == 'zb-interleaved' else {} for name in heads]
        found = [
            simulated(n, comm=float(comm), **o)[1] for n, o in zip(heads, options, strict=True)
        ]
        assert cells.strip(' |').split(' | ') == found


def test_numbers_of_slices():
    text = (ROOT / 'docs' / 'choosing.md').read_text()
    rows = re.findall(r'^\| `(.+?)` \| ((?:[\d.]+ % \[[\d.]+\](?: \| | \|$)){4})', text, re.M)
    assert len(rows) == 5
    for name, cells in rows:
        for slices, cell in zip((1, 2, 4, 8), cells.strip(' |').split(' | '), strict=True):
            schedule = in_slices(name, 8, 4, slices)
            costs = Costs.uniform(schedule.placement)
            timeline, held = simulate(schedule, costs), max(peak(schedule, costs))
            assert cell == f'{100 * timeline.idle_all_ranks:.1f} % [{held:g}]', (name, slices)


def test_numbers_of_balanced_slices():
    text = (ROOT / 'docs' / 'choosing.md').read_text()
    rows = re.findall(r'^\| (0\.\d) \| (.+ \[[\d.]+\]) \| ([\d, ]+) \|$', text, re.M)
    assert len(rows) == 3
    for share, cells, tokens in rows:
        attention, found = Attention(float(share)), []
        for name in ('zb-h1', 'zb-v'):
            schedule = in_slices(name, 8, 4, 4)
            costs = Costs.uniform(
                schedule.placement, 1, 1 + 1.5 * attention.share, 1 - attention.share
            )
            sizes = balanced(4, 131072, attention, costs)
            for own in ((1,) * 4, sizes):
                cut = in_parts(costs, own, attention)
                bubble, held = simulate(schedule, cut).idle_all_ranks, max(peak(schedule, cut))
                found.append(f'{100 * bubble:.1f} % [{held:.3g}]')
            assert tokens == ', '.join(map(str, sizes))
        assert cells == ' | '.join(found)


def test_numbers_of_long_context():
    """Bubbles and memory by microbatches, and by what messages take."""
    text = (ROOT / 'docs' / 'long-context.md').read_text()
    rows = re.findall(r'^\| (\d+) \| ((?:[\d.]+ % \[[\d.]+\](?: \| | \|$)){5})', text, re.M)
    costs = Costs.uniform(build('zb-v', 8, 1).placement)
    assert [int(m) for m, _ in rows] == [1, 2, 4, 8, 16]
    for m, cells in rows:
        for slices, cell in zip((1, 2, 4, 8, 16), cells.strip(' |').split(' | '), strict=True):
            schedule = in_slices('zb-v', 8, int(m), slices)
            bubble, held = simulate(schedule, costs).idle_all_ranks, max(peak(schedule, costs))
            assert cell == f'{100 * bubble:.1f} % [{held:g}]', (m, slices)
    windows = [max(simulate(in_slices('zb-v', 8, 4, n), costs).windows) for n in (4, 5)]
    assert windows[0] > 12.1 and windows[1] == pytest.approx(12)  # m (F + B + W); n of 14/3
    rows = re.findall(r'^\| ([\d.]+) F,? (.+?) \|((?: [\d.]+ % \|){5})$', text, re.M)
    assert len(rows) == 2
    for comm, how, cells in rows:
        for slices, cell in zip((1, 2, 4, 8, 16), cells.strip(' |').split(' | '), strict=True):
            own = replace(costs, comm=float(comm) / (slices if 'its part' in how else 1))
            bubble = simulate(in_slices('zb-v', 8, 4, slices), own).idle_all_ranks
            assert cell == f'{100 * bubble:.1f} %', (how, slices)
    text = (ROOT / 'docs' / 'choosing.md').read_text()
    bubbles = {}
    for name in ('zb-v', 'interleaved', '1f1b'):
        schedule = build(name, 8, 24)
        timeline = simulate(schedule, Costs.uniform(schedule.placement, weight=0))
        bubbles[name] = f'{100 * timeline.idle_all_ranks:.1f} %'
    assert bubbles['zb-v'] == bubbles['interleaved']
    assert f'{bubbles["zb-v"]} of all GPU time idle' in text and f'has {bubbles["1f1b"]} |' in text


@pytest.mark.parametrize(('command', 'text'), pages.printed(), ids=lambda each: str(each)[-40:])
def test_blocks_of_output_are_what_is_printed(command, text):
    """In a process of its own: that of the tests may have Megatron already."""
    done = run([sys.executable, '-m', 'megatron_zbpp.cli', *shlex.split(command.line)[1:]])
    assert done.returncode == 0, done.stderr
    assert text in done.stdout, command


def held_of(name, p):
    """The most activations of a rank in the long run."""
    schedule = build(name, p, 3 * p)
    return max(peak(schedule, Costs.uniform(schedule.placement)))


def test_memory_in_words():
    """What `v-half` and `v-min` hold of the activations of 1F1B, at the sizes that pages name."""
    found = {}
    for page in (
        pages.README,
        *(ROOT / 'docs' / f'{name}.md' for name in ('choosing', 'does-not-fit')),
    ):
        text = page.read_text()
        for name, rest in re.findall(r'`(v-half|v-min)` (?:\| |holds )?([^|;:]*)', text):
            for held, of, p in re.findall(
                r"(\d+) of (?:1F1B's )?(\d+)(?: activations)? at p = (\d+)", rest
            ):
                assert (float(held), float(of)) == (
                    held_of(name, int(p)),
                    held_of('1f1b', int(p)),
                ), page
                found[page.stem, name, p] = held
    assert {('README', 'v-half', '8'), ('choosing', 'v-half', '4'), ('choosing', 'v-min', '8')} <= {
        *found
    }
    assert ('does-not-fit', 'v-half', '8') in found
    for page in pages.PAGES:
        assert "half of 1F1B's activations" not in page.read_text(), page


def test_few_microbatches():
    """Of the idle GPU time of `zb-h1`, as README and choosing.md say: half or a little more."""
    said = 'half the idle GPU time of `zb-h1`, or a little more'
    assert all(said in page.read_text() for page in (pages.README, ROOT / 'docs' / 'choosing.md'))
    for p in (2, 4, 8, 16):
        for m in range(p, 2 * p):
            idle = {}
            for name in ('zb-h1', 'zb-v'):
                schedule = build(name, p, m)
                idle[name] = simulate(schedule, Costs.uniform(schedule.placement)).idle_all_ranks
            assert 0.5 <= idle['zb-v'] / idle['zb-h1'] < 0.6, (p, m)


VOCABULARY = (ROOT / 'docs' / 'large-vocabulary.md').read_text()


def with_shards(capsys, name, microbatches, share=None):
    """Makespan, bubble and peak of a schedule on 8 ranks."""
    words = ['simulate', '--schedule', name, '--pp', '8', '--microbatches', str(microbatches)]
    assert main([*words, *(['--vocab-parallel', str(share)] if share else []), '--json']) == 0
    found = json.loads(capsys.readouterr().out)
    bubble = found['makespan'] * found['idle_busiest_rank']
    return found['makespan'], bubble, max(found['peak_activations'])


@some('share', ['0.1', '0.5'], '0.05', '0.2', '0.3')
def test_numbers_of_shards(capsys, share):
    """Rows of large-vocabulary.md: makespans with shards."""
    rows = dict(re.findall(r'^\| (0\.\d+) \| [\d.]+ \|(.+)\|$', VOCABULARY, re.M))
    assert [*rows] == ['0.05', '0.1', '0.2', '0.3', '0.5']
    cells = [float(cell.strip('* ')) for cell in rows[share].split('|')]
    for name, shards in zip(('1f1b', 'zb-h1', 'zb-v'), cells[1::2], strict=True):
        assert shards == round(with_shards(capsys, name, 32, share)[0], 1)


SPANS = re.findall(r'^\| `(.+?)` \| ([\d.]+) \| (.+?) \| ([\d.]+) \| (.+?) \|$', VOCABULARY, re.M)


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
    for words, cells in re.findall(r'^\| (\d+)k words \|(.+)\|$', VOCABULARY, re.M):
        shares = (int(words) * 1024 / (12 * hidden) / 4 / 8 for hidden in (2048, 4096, 8192))
        assert cells.strip().split(' | ') == [f'{share:.2f}' for share in shares]


def test_numbers_of_simulated_prose(capsys):
    """Sentences of choosing.md and planning.md."""
    choosing, planning = (
        ' '.join((ROOT / 'docs' / f'{name}.md').read_text().split())
        for name in ('choosing', 'planning')
    )
    stp, zb_v = (build(name, 8, 24) for name in ('stp', 'zb-v'))
    spans = [simulate(made) for made in (stp, zb_v)]
    for share, pays in ((0.94, True), (0.95, False)):
        paired = build('dualpipe-v', 8, 24, together=True)
        costs = replace(Costs.uniform(paired.placement), together=share)
        assert (simulate(paired, costs).makespan < spans[1].makespan) == pays
    assert 'they pay from 0.94 down' in choosing
    words = 'simulate --schedule stp --pp 8 --microbatches 24 --together FB=0.9 --json'
    assert main(words.split()) == 0
    hidden = json.loads(capsys.readouterr().out)['makespan']
    assert (
        f'makespan is {spans[0].makespan:g} where pairs hide nothing, as that of `zb-v`, and '
        f'{hidden:.1f} where' in choosing
    ) and spans[0].makespan == spans[1].makespan
    assert f'With post-validation `zb-v` takes {max(spans[1].windows):g}, in half' in choosing
    ahead = []
    for p in (4, 8):
        late, own = build('pipedream-2bw', p, p), build('zb-v', p, p)
        steady = steady_state(simulate(late, Costs.uniform(late.placement)))
        makespan = simulate(own, Costs.uniform(own.placement)).makespan
        ahead.append(f'{100 * (1 - steady.period / makespan):.0f}')
    assert f'simulated {ahead[0]} to {ahead[1]} % ahead of `zb-v` at m = p' in choosing
    idle = {}
    for name, chunks in (('zb-v', None), ('zb-interleaved', 4)):
        made = build(name, 8, 24, num_chunks=chunks)
        idle[name] = simulate(made, Costs.uniform(made.placement, 1, 1.2, 0.8)).idle_all_ranks
    assert f'{100 * idle["zb-interleaved"]:.1f} % of idle GPU time: that of `zb-int' in planning
    assert f"`zb-v`'s {100 * idle['zb-v']:.1f} %" in planning
    assert len(families()) == 30 and planning.count('thirty') == 2


def test_formulas_of_two_way_pipelines():
    text = (ROOT / 'docs' / 'two-way.md').read_text()
    rows = re.findall(r'^\| `([\w-]+)` \| even D[^|]*\| ([^|]+) \| ([^|]+) \|$', text, re.M)
    assert len(rows) == 6
    for name, *cells in rows:
        for cell, formula in zip(cells, (find(name).bubble, find(name).memory), strict=True):
            ours = (
                re.sub(r' \((?:F[ =]|m ).*', '', formula.text)
                .replace(' ', '')
                .replace('atmost', '')
            )
            assert cell.replace(' ', '').replace('D', 'p').replace('atmost', '') == ours, name


def table(page, row):
    """The cells behind the name of a row."""
    (found,) = re.findall(rf'^\| {re.escape(row)} \| (.+) \|$', page.read_text(), re.M)
    return found


def test_measured_numbers_are_those_of_their_files():
    """README's are those of the page of benchmarks, and of the runs on a GPU."""
    measured = ROOT / 'docs' / 'benchmarks' / 'index.md'
    block = pages.section(pages.README, '## Measured')
    rows = re.findall(r'^\| (.+?) \| (\d.+) \|$', block, re.M)
    assert len(rows) == 6
    for name, cells in rows:
        assert f'\n| {name} | {cells} |\n' in measured.read_text(), name
    file = ROOT / 'docs' / 'results' / '2026-11-27-NVIDIA-H200.json'
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
    file = ROOT / 'docs' / 'results' / '2026-11-28-bench-CPU.json'
    kept = json.loads(file.read_text())
    line = SimpleNamespace(args=None, on_cpu=True)
    job = SimpleNamespace(tokens=kept['tokens'], line=line, own=(), script='pretrain_gpt.py')
    assert {len(runs) for runs in kept['runs'].values()} == {5}
    rows = [benching._row(name, runs, job, 10) for name, runs in kept['runs'].items()]
    benching._judge(rows, job)
    benching._print(rows, job)
    out = capsys.readouterr().out
    page = ROOT / 'docs' / 'benchmarks' / 'index.md'
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
    makespans = {}
    for name in readme_picture.SCHEDULES:
        schedule = build(name, readme_picture.RANKS, readme_picture.MICROBATCHES)
        makespans[name] = simulate(schedule, Costs.uniform(schedule.placement)).makespan
    saved = {name: f'{1 - each / makespans["1f1b"]:.0%}' for name, each in makespans.items()}
    said = f'zb-h1 saves {saved["zb-h1"][:-1]} %, zb-v {saved["zb-v"][:-1]} %'
    for page in (pages.README, ROOT / 'docs' / 'index.md'):
        assert said in page.read_text()


def test_names_of_other_runtimes_are_understood():
    """In the section for those who come from there: schedules, our flags, and flags of forks."""
    head = '## Coming from another pipeline runtime'
    page = pages.section(ROOT / 'docs' / 'getting-started.md', head)
    ours = {option for action in own_flags()._actions for option in action.option_strings}
    named = set(re.findall(r'--(?:pipeline-schedule|pipeline-[a-z]+-?[a-z-]*)', page))
    megatrons = {'--pipeline-model-parallel-layout'}
    assert named - megatrons <= ours
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
    section = pages.section(ROOT / 'docs' / 'planning.md', '## What schedule languages express')
    cells = [line.split('|')[2] for line in section.splitlines() if line.startswith('|')]
    words = re.findall(r'`([\w-]+)`', ''.join(cells))
    no_names = {'placement', 'passes', 'auto', *(word for word in words if word.isupper())}
    named = set(words) - no_names
    assert len(named) > 12 and all(find(name) for name in named)
    assert {word for word in words if word.isupper()} <= {*'FBWROLEK', 'BW'}
    shown = {Path(found).name for page in pages.PAGES for found in LINK.findall(page.read_text())}
    pictures = {picture.name for picture in (ROOT / 'docs' / 'pictures').iterdir()}
    assert pictures <= shown
