"""The planner page in a real headless browser: it simulates as Python does, and reacts."""

import itertools
import json
import random
import re
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import chromium
import pages
import pytest
from figures import held, timeline
from paths import ROOT
from test_html_browser import plot

from megatron_zbpp import Costs, Schedule, build, simulate
from megatron_zbpp.analysis.gain import idle_parts
from megatron_zbpp.analysis.memory import live, peak
from megatron_zbpp.cli import main
from megatron_zbpp.ir.formats import load_plan
from megatron_zbpp.ir.plan_costs import stages_file
from megatron_zbpp.render.html import waits
from megatron_zbpp.render.planner_page import Sizes, encoded, families, planner_page
from megatron_zbpp.render.svg import shapes

SIZES = Sizes((2, 4, 6), (4, 8), (1, 2, 4))
NAMES = [family.name for family in families()]


@pytest.fixture(scope='module')
def file(tmp_path_factory):
    file = tmp_path_factory.mktemp('page') / 'planner.html'
    file.write_text(planner_page(SIZES))
    return file


@pytest.fixture(scope='module')
def loaded(browser, file):
    """Somehow used: for what asks its functions alone."""
    load(browser, file)
    return browser


@pytest.fixture
def page(browser, file):
    """Freshly loaded, at p = 4 and m = 8."""
    load(browser, file, '#p=4&m=8')
    return browser


def load(browser: chromium.Page, file: Path, fragment: str = '') -> None:
    browser.call('Page.navigate', url='about:blank')  # else the fragment alone changes
    until(browser, "location.href === 'about:blank'")
    browser.events.clear()
    browser.call('Page.navigate', url=file.as_uri() + fragment)
    until(browser, "document.body && document.body.dataset.ready === 'yes'")


def until(page: chromium.Page, condition: str) -> None:
    end = time.monotonic() + 60
    while not page.evaluate(condition):
        assert time.monotonic() < end, (condition, page.evaluate('document.body.innerText'))
        time.sleep(0.02)


def slide(page: chromium.Page, control: str, value: float) -> None:
    page.evaluate(f"""(input => {{ input.value = {value};
        input.dispatchEvent(new Event('input')); }})(document.getElementById('{control}'))""")


def table(page: chromium.Page) -> dict[str, list[str]]:
    """Makespan, gain, idle GPU time and peak memory of each schedule, by its name."""
    rows = page.evaluate(
        "[...document.querySelectorAll('#rows tr')].map(r => [...r.children].map(c => c.innerText))"
    )
    return {name.split()[0]: cells for name, *cells in rows}


def text(page: chromium.Page, element: str) -> str:
    return page.evaluate(f"document.getElementById('{element}').innerText")


def link(page: chromium.Page) -> str:
    """The fragment of the address, once it is written."""
    page.click('#link')
    return page.evaluate('location.hash')


def upload(page: chromium.Page, *names: Path) -> None:
    root = page.call('DOM.getDocument')['root']['nodeId']
    node = page.call('DOM.querySelector', nodeId=root, selector='#file')['nodeId']
    page.call('DOM.setFileInputFiles', files=[str(name) for name in names], nodeId=node)


def expected(name: str, costs: Costs | None = None, **sizes: int) -> list[str]:
    """The row of the table, by the simulator of Python."""
    p, m = sizes.get('p', 4), sizes.get('m', 8)
    chunks = {'num_chunks': sizes['v']} if 'v' in sizes else {}
    schedule, rival = build(name, p, m, **chunks), build('1f1b', p, m)
    ours, theirs = (
        costs.joined(each.num_stages) if costs else Costs.uniform(each.placement)
        for each in (schedule, rival)
    )
    line, other = simulate(schedule, ours), simulate(rival, theirs)
    held = max(peak(schedule, Costs.uniform(schedule.placement) if costs else ours))
    gain = 1 - line.makespan / other.makespan
    return [f'{line.makespan:.5g}', f'{gain:.1%}', f'{line.idle_all_ranks:.1%}', f'{held:.5g}']


def random_costs(schedule: Schedule, rng: random.Random) -> Costs:
    """Of stages, links and ranks that all differ."""
    stages, ranks = range(schedule.num_stages), schedule.num_ranks

    def each(low: float = 0.1) -> tuple[float, ...]:
        return tuple(rng.uniform(low, 3) for _ in stages)

    return Costs(
        {'F': each(), 'B': each(), 'W': each(0.0)},
        {'activation': each(), 'retained': each()},
        comm=rng.uniform(0, 0.5),
        message=rng.choice([0.0, 0.25]),
        parameters=each(),
        edges=tuple((a, b, rng.random()) for a in range(ranks) for b in range(a)),
        speeds=tuple(rng.uniform(0.5, 2) for _ in range(ranks)),
        hops=rng.choice([(), tuple((rng.random(), rng.random()) for _ in stages[1:])]),
        together=rng.choice([1.0, 0.8]),
        pairs=rng.choice([{}, {'FF': 0.9, 'FW': 0.85}]),
    )


def as_file(costs: Costs) -> str:
    """Return the fields that a page reads."""
    fields = asdict(costs).items()
    return json.dumps({name: own for name, own in fields if name not in ('parts', 'collectives')})


WHOLE = """{starts: run.starts, ends: run.ends, ...figures, parts: idleParts(run, figures),
    waits: waitsOf(run, figures.makespan), live: memory.live, peaks: memory.peaks}"""


def in_browser(page: chromium.Page, schedule: str, costs: Costs, wanted: str = WHOLE) -> Any:
    """What the page says of a schedule that the expression gives, at these costs."""
    return page.evaluate(f"""(() => {{
        const schedule = {schedule}, run = simulate(schedule, readCosts({as_file(costs)}));
        const figures = figuresOf(run), memory = memoryOf(run);
        return {wanted};
    }})()""")


def assert_same(said: dict, schedule: Schedule, costs: Costs) -> None:
    """Times to the bit, and what each pass waited for; sums of times to rounding."""
    line = simulate(schedule, costs)
    for rank, spans in enumerate(line.spans):
        found = zip(said['starts'][rank], said['ends'][rank], strict=True)
        assert list(map(tuple, found)) == list(spans), (schedule.name, rank)
    assert [list(map(tuple, own)) for own in said['waits']] == waits(line)
    assert said['makespan'] == line.makespan
    assert said['idle'] == pytest.approx(line.idle_all_ranks, abs=1e-12)
    assert said['bubble'] == pytest.approx(line.bubble, abs=1e-12)
    assert list(said['parts'].values()) == pytest.approx(idle_parts(line, costs), abs=1e-12)
    assert said['peaks'] == pytest.approx(peak(schedule, costs), abs=2e-9)
    for own, wanted in zip(said['live'], live(schedule, costs), strict=True):
        assert own == pytest.approx(wanted, abs=2e-9)


@pytest.mark.parametrize('name', NAMES)
def test_simulation_is_that_of_python(loaded, name):
    """For random times, in all sizes of the page, whose orders are those of `build`."""
    rng, found = random.Random(name), 0
    for p, m, v in itertools.product(*SIZES):
        try:
            schedule = build(name, p, m, num_chunks=v)
        except ValueError:  # as the page has none, which the count below holds
            continue
        costs = random_costs(schedule, rng)
        said = in_browser(loaded, f"scheduleOf('{name}', {v}, {p}, {m})", costs)
        assert_same(said, schedule, costs)
        found += 1
    line = f"[...schedules.keys()].filter(key => key.startsWith('{name}\\t')).length"
    assert found == loaded.evaluate(line) > 0


@pytest.mark.parametrize('name', ['dualpipe-v', 'stp', 'dualpipe'])
def test_passes_that_run_as_one(loaded, name):
    rng = random.Random(name)
    schedule = build(name, 4, 8, together=True)
    assert schedule.together
    for _ in range(4):
        costs = random_costs(schedule, rng)
        read = f'readPlan({{schedule: {schedule.to_json()}}}).schedule'
        for source in (read, f'decoded({json.dumps(encoded(schedule, name))})'):
            assert_same(in_browser(loaded, source, costs), schedule, costs)


def test_costs_of_other_numbers_of_stages(loaded):
    """Between stages of a file that become one there is no message."""
    costs = random_costs(build('zb-v', 4, 8), random.Random(1))
    costs = replace(costs, hops=tuple((k + 1.0, k + 0.5) for k in range(7)))
    given = as_file(costs)
    for stages in (2, 4, 8, 16, 24):
        said = loaded.evaluate(f'joinedCosts(readCosts({given}), {stages})')
        wanted = costs.joined(stages)
        for kind, own in zip('FBW', said['times'], strict=True):
            assert own == pytest.approx(wanted.times[kind])
        assert said['activation'] == pytest.approx(wanted.amounts['activation'])
        assert said['parameters'] == pytest.approx(wanted.parameters)
        assert said['together'] == wanted.together == 1
        assert [tuple(hop) for hop in said['hops']] == list(wanted.hops)
    assert loaded.evaluate(f'joinedCosts(readCosts({given}), 6)') is costs.joined(6) is None


def test_table_is_what_the_simulator_says(page):
    found = table(page)
    assert len(found) == len(NAMES)
    for name in ('1f1b', 'zb-h1', 'zb-v', 'v-min', 'dualpipe-v', 'chimera'):
        assert found[name] == expected(name)
    assert page.texts('#panels h2') == ['zb-v', 'zb-h1', '1f1b']
    assert page.silent()


def test_sliders_change_numbers(page):
    slide(page, 'W', 0.5)
    slide(page, 'comm', 0.25)
    line = timeline(build('zb-h1', 4, 8), weight=0.5, comm=0.25)
    assert table(page)['zb-h1'][::2] == [f'{line.makespan:.5g}', f'{line.idle_all_ranks:.1%}']
    assert 'messages' in page.texts('#panels .facts')[0]
    slide(page, 'W', 1)
    slide(page, 'comm', 0)
    slide(page, 'p', SIZES.ranks.index(2))
    slide(page, 'm', SIZES.microbatches.index(4))
    assert table(page)['zb-v'] == expected('zb-v', p=2, m=4)
    slide(page, 'v', SIZES.chunks.index(4))
    assert table(page)['interleaved'] == expected('interleaved', p=2, m=4, v=4)
    assert table(page)['zb-v'] == expected('zb-v', p=2, m=4), 'it has two chunks'
    until(page, "location.hash.includes('p=2&m=4&v=4')")
    assert page.silent()


def test_memory_limit_leaves_those_out_that_hold_more(page):
    assert text(page, 'best').startswith('Shortest: zb-v takes')
    enter(page, 'limit', 3)
    assert 'within 3: v-half takes' in text(page, 'best')
    peaks = {name: cells[3] for name, cells in table(page).items()}
    assert peaks['zb-v'] == '4 > limit' and peaks['v-half'] == expected('v-half')[3]
    over = page.evaluate("document.querySelectorAll('#rows tr.over').length")
    assert over == sum('> limit' in cell for cell in peaks.values()) > 10
    slide(page, 'limit', 0.5)
    assert text(page, 'best').startswith('No schedule stays within 0.5')
    slide(page, 'limit', 1e9)
    assert 'limit=&' in link(page)


def test_ticks_draw(page):
    box = "document.querySelector('#rows tr:nth-child({}) input')"
    before = list(table(page))
    for place in (4, 5):
        page.evaluate(box.format(place) + '.click()')
    assert set(page.texts('#panels h2')) == {before[3], before[4]} ^ {'zb-v', 'zb-h1', '1f1b'}
    page.evaluate(
        "state.show.slice().forEach(() => document.querySelector('#rows input:checked').click())"
    )
    assert page.texts('#panels h2') == [] and 'Tick schedules' in text(page, 'panels')
    assert page.silent()


def test_the_tooltip_names_the_pass(page, file):
    load(page, file, '#p=4&m=8&show=zb-v')
    line = timeline(schedule := build('zb-v', 4, 8))
    left, top, width, _ = plot(page)
    for rank in range(4):
        place = len(schedule.passes[rank]) // 2
        start, end = line.spans[rank][place]
        x = left + (start + end) / 2 / line.makespan * width
        page.mouse('mouseMoved', x, top + (rank + 0.3) * 40)
        assert text(page, 'tooltip').startswith(f'{schedule.passes[rank][place]} ')


def test_legend_is_complete(page, file):
    entries = '.legend li:not([hidden])'
    load(page, file, '#p=4&m=8&show=1f1b,zb-h1')
    whole = ['F: forward', 'B: input gradient', 'W: weight gradient', 'BW: whole backward']
    assert page.texts(entries) == [*whole, 'idle', 'activations held']
    load(page, file, '#p=4&m=8&show=zb-v')
    chunks = [text for entry in whole[:3] for text in (entry, f'{entry[0]} of the last chunk')]
    assert page.texts(entries) == [*chunks, 'idle', 'activations held']
    load(page, file, '#p=4&m=8&v=4&show=zb-interleaved')
    of_four = ('F: forward', 'F of chunk 2 of 4', 'F of chunk 3 of 4', 'F of the last chunk')
    assert tuple(page.texts(entries)[:4]) == of_four
    fill = (
        'getComputedStyle(document.querySelector(\'[data-when="chunk 3 of 4"] i\')).backgroundColor'
    )
    fills = "[...document.querySelectorAll('.passes path')].map(p => getComputedStyle(p).fill)"
    assert page.evaluate(fill) in page.evaluate(fills)
    load(page, file, '#p=4&m=8&show=chimera')
    assert 'F, up' in page.texts(entries)


# by the fragment of a link, or the content of a file, how the line about it begins or what it has
REFUSED = json.loads(Path(__file__).with_name('refused_by_page.json').read_text())


@pytest.mark.parametrize(('fragment', 'told'), REFUSED['links'].items())
def test_bad_links_are_told_in_a_line(browser, file, fragment, told):
    load(browser, file, f'#{fragment}')
    assert text(browser, 'trouble').startswith(told)
    assert '\n' not in text(browser, 'trouble') and browser.texts('#panels h2')


@pytest.fixture(scope='module')
def plan(tmp_path_factory):
    """A plan that `zbpp plan` wrote, for stages that differ."""
    folder = tmp_path_factory.mktemp('plan')
    times = {'F': [1, 2, 1.5, 1, 1, 1, 2, 1], 'B': [1, 2, 1.5, 1, 1, 1, 2, 1], 'W': [1] * 8}
    (folder / 'times.json').write_text(json.dumps({**times, 'comm': 0.1}))
    words = f'plan --pp 4 --microbatches 8 --vpp 2 --times {folder}/times.json --seconds 0.3'
    assert main([*words.split(), '-o', str(folder / 'mine.json')]) == 0
    return folder / 'mine.json'


def test_a_plan_is_opened(page, file, plan):
    upload(page, plan)
    until(page, "document.getElementById('opened').innerText.startsWith('mine.json: a plan')")
    made = load_plan(plan)
    line = simulate(made.schedule, made.schedule.costs)
    found = table(page)
    assert found['mine'][0] == f'{line.makespan:.5g}' == f'{made.fields["makespan"]:.5g}'
    assert found['mine'][1] == f'{made.fields["gain"]:.1%}'
    assert found['mine'][3] == f'{max(made.fields["peak_activations"]):.5g}'
    assert found['zb-h1'][0] == expected('zb-h1', made.schedule.costs)[0]
    assert 'mine' in page.texts('#panels h2')
    assert page.evaluate(
        "['p', 'm', 'F', 'B', 'W'].every(id => document.getElementById(id).disabled)"
    )
    address = link(page)
    load(page, file, address)
    assert table(page) == found and link(page) == address
    slide(page, 'comm', 0.4)
    assert float(table(page)['mine'][0]) > line.makespan
    page.click('#close')
    assert 'mine' not in table(page) and 'mine' not in page.texts('#panels h2')
    assert page.silent()


def test_times_of_a_trace_are_opened(page, tmp_path, file):
    """What the tracer writes, and the file of the docs; for p = 4, which is set."""
    costs = Costs.of((2, 1, 1, 1.5), (2, 1, 1, 1), (1, 1, 1, 1), comm=0.125)
    measured = pages.files(ROOT / 'docs' / 'unbalanced.md')['trace/stages.json']
    for written in (stages_file(costs, 'Et|t|t|tL'), measured):
        (tmp_path / 'stages.json').write_text(written)
        load(page, file, '#p=6&m=8')
        upload(page, tmp_path / 'stages.json')
        until(page, "document.getElementById('opened').innerText.includes('times of 4 stages')")
        for name in ('1f1b', 'zb-h1', 'interleaved', 'zb-v'):
            assert table(page)[name] == expected(name, Costs.from_json(written)), name
        address, before = link(page), table(page)
        assert 'p=4' in address
        load(page, file, address)
        assert table(page) == before
    assert page.silent()


def test_bad_files_are_told_in_a_line(page, tmp_path):
    before = table(page)
    for k, (written, told) in enumerate(REFUSED['files'].items()):
        (tmp_path / f'{k}.json').write_text(written)
        upload(page, tmp_path / f'{k}.json')
        until(page, f"document.getElementById('trouble').innerText.startsWith('{k}.json: ')")
        said = text(page, 'trouble')
        assert told in said and '\n' not in said, (written, said)
        assert table(page) == before, 'what was shown stays'
    assert page.silent()


@pytest.mark.parametrize('scheme', ['light', 'dark'])
@pytest.mark.parametrize('width', [1280, 480])
def test_no_horizontal_overflow(browser, file, plan, width, scheme):
    with browser.screen(width, scheme):
        load(browser, file, '#p=6&m=8&F=1.23456&show=1f1b,zb-v,chimera')
        upload(browser, plan)
        until(browser, "document.getElementById('opened').innerText.startsWith('mine.json')")
        for element in ('document.documentElement', "document.querySelector('.listed')"):
            assert browser.evaluate(f'{element}.scrollWidth <= {element}.clientWidth')
        page_colour = browser.evaluate('getComputedStyle(document.body).backgroundColor')
        assert page_colour == {'light': 'rgb(255, 255, 255)', 'dark': 'rgb(20, 24, 31)'}[scheme]
        wide = browser.evaluate("document.querySelector('.stretch').getBoundingClientRect().width")
        assert wide > 250


def test_keys_reach_all(page):
    """Tab goes to each control in order; arrows move a slider, and no timeline with it."""

    def press(key: str) -> None:
        page.call('Input.dispatchKeyEvent', type='keyDown', key=key, code=key, **CODES[key])
        page.call('Input.dispatchKeyEvent', type='keyUp', key=key, code=key, **CODES[key])

    reached = []
    for _ in range(60):
        press('Tab')
        reached.append(page.evaluate('document.activeElement.id || document.activeElement.type'))
        if reached[-1] == 'p':
            press('ArrowLeft')
            assert page.evaluate('state.p') == 2
    controls = ['p', 'm', 'v', 'F-exact', 'F', 'B-exact', 'B', 'W-exact', 'W', 'comm-exact', 'comm']
    wanted = [*controls, 'limit-exact', 'limit', 'file', 'link', 'defaults', 'in', 'out', 'reset']
    assert [each for each in reached if each in wanted][: len(wanted)] == wanted
    assert reached.count('checkbox') == len(table(page))
    assert page.evaluate('view[0]') == 0


CODES = {'Tab': {'windowsVirtualKeyCode': 9}, 'ArrowLeft': {'windowsVirtualKeyCode': 37}}


GIB = 2.0**30


def enter(page, control, value):
    page.evaluate(f"""(input => {{ input.value = '{value}';
        input.dispatchEvent(new Event('change'));
    }})(document.getElementById('{control}-exact'))""")


def exact(page, control):
    return page.evaluate(f"document.getElementById('{control}-exact').value")


def opened(page, path, written, name='mine'):
    """Upload these texts as a file, and wait until the page has it."""
    where = path / f'{name}.json'
    where.write_text(written)
    upload(page, where)
    until(page, f"document.getElementById('opened').innerText.startsWith('{name}.json: ')")


def times(stages, **more):
    """A file of stages that take 1, 2, 1, 2, ..."""
    own = [1.0 + k % 2 for k in range(stages)]
    return json.dumps({'F': own, 'B': own, 'W': own, **more})


def numbers(markup):
    """Numbers of the paths, by their class or their colours."""
    found = {}
    for tag in re.findall(r'<path[^>]*>', markup):
        of = dict(re.findall(r'(\w+)="([^"]*)"', tag))
        own = [] if of.get('class') in ('idle', 'memory') else [of.get('fill', of.get('stroke'))]
        key = (of.get('class', 'passes'), *own)
        found[key] = [float(x) for x in re.findall(r'-?\d+\.?\d*(?:e-?\d+)?', of['d'])]
    return found


@pytest.mark.parametrize('name', ['zb-v', 'zb-h1', 'interleaved', '1f1b', 'stp'])
def test_bars_and_memory_are_those_of_a_picture(loaded, name):
    """Colours of chunks, stripes of kinds, and what is held from F on: by uneven costs."""
    schedule = build(name, 4, 8)
    costs = replace(random_costs(schedule, random.Random(name)), together=1.0, pairs={})
    own = f"scheduleOf('{name}', {schedule.placement.num_chunks}, 4, 8)"
    found = numbers(in_browser(loaded, own, costs, 'shapesOf({run, memory, figures})'))
    wanted = numbers(shapes(simulate(schedule, costs), costs))
    assert found.keys() == wanted.keys() and len(wanted) > 4
    for key, own in wanted.items():
        assert found[key] == pytest.approx(own, rel=1e-5, abs=1e-5), key


def test_facts_and_peaks_of_a_timeline(page, tmp_path, file):
    """Causes of idle time by name; the most that each rank holds; one time axis for all."""
    load(page, file, '#p=4&m=8&show=zb-h1')
    opened(page, tmp_path, times(4, comm=0.25))
    costs = Costs.from_json(times(4, comm=0.25))
    parts = idle_parts(simulate(build('zb-h1', 4, 8), costs), costs)
    shares = [f'{share:.1%}' for share in parts]
    causes = zip(('schedule', 'uneven stages', 'messages'), shares, strict=True)
    assert len(set(shares)) == 3
    assert f'({", ".join(" ".join(cause) for cause in causes)})' in page.texts('#panels .facts')[0]
    load(page, file, '#p=4&m=8&show=zb-h1,1f1b')
    for place, name in enumerate(page.texts('#panels h2')):
        peaks = [f'max {most:.5g}' for most in held(build(name, 4, 8))]
        assert page.texts(f'#panel-{place} .peak') == peaks
        assert len(set(peaks)) == 4 or name != '1f1b'
    widths = "[...document.querySelectorAll('.stretch > rect')].map(r => r.getAttribute('width'))"
    longest = float(expected('1f1b')[0])
    assert list(map(float, page.evaluate(widths))) == [longest, longest]


@pytest.mark.parametrize('limit', ['', 3])
def test_rows_are_in_order(page, limit):
    """The shortest first, of equally short ones that which holds less; those over a limit last."""
    enter(page, 'limit', limit)
    rows = [
        (' > limit' in cells[3], float(cells[0]), float(cells[3].split()[0]))
        for cells in table(page).values()
    ]
    assert rows == sorted(rows)
    equal = [a for a, b in itertools.pairwise(rows) if a[:2] == b[:2] and a < b]
    assert equal, 'some are as short and hold more'


def test_the_shortest_has_one_copy_of_the_weights(loaded, file):
    """Others may be shorter: they are in the table, and a note says so."""
    copies = [family.name for family in families() if family.num_routes > 1]
    shorter = 0
    for p, m in ((2, 4), (4, 4), (4, 8), (6, 8)):
        load(loaded, file, f'#p={p}&m={m}')
        rows = [(float(cells[0]), name) for name, cells in table(loaded).items()]
        best = min(value for value, name in rows if name not in copies)
        (named,) = re.findall(r'Shortest: ([\w-]+) takes ([\d.]+)', text(loaded, 'best'))
        assert named[0] not in copies and float(named[1]) == best
        shorter += min(rows)[0] < best
    assert shorter


def test_the_line_above_the_table(page):
    best, shown = text(page, 'best'), table(page)
    name = next(name for name in shown if name in best.split())
    makespan, gain, idle, most = shown[name]
    said = f'Shortest: {name} takes {makespan}, {gain} less time than 1f1b; idle GPU time {idle}, '
    assert best == f'{said}peak memory {most}'
    one = [family.name for family in families() if family.num_routes == 1]
    least = min(float(cells[3]) for name, cells in shown.items() if name in one)
    enter(page, 'limit', least)
    slide(page, 'comm', 0.5)
    told = rf'within {least:g}: [\w-]+ takes [\d.]+, [\d.]+% more time than 1f1b'
    assert re.search(told, text(page, 'best'))


def test_notes(page, file, tmp_path):
    """Of two copies, of orders that are fitted elsewhere, and of what such sizes have not."""
    notes = text(page, 'notes')
    copies = [family.name for family in families() if family.num_routes > 1]
    fitted = [family.name for family in families() if 'costs' in family.options]
    shown = table(page)
    assert f'on the ranks together: {", ".join(n for n in copies if n in shown)}.' in notes
    assert f'fit to yours: {", ".join(n for n in fitted if n in shown)}.' in notes
    load(page, file, '#p=2&m=4')
    opened(page, tmp_path, times(6))
    without = [name for name in NAMES if name not in table(page)]
    assert without
    assert f'Not for these sizes or stages: {", ".join(without)}.' in text(page, 'notes')
    load(page, file, '#p=4&m=8')
    unlike = times(4, speeds=[1, 2, 1, 1])
    opened(page, tmp_path, unlike, 'speeds')
    assert table(page)['zb-h1'] == expected('zb-h1', Costs.from_json(unlike))
    slide(page, 'p', SIZES.ranks.index(2))
    assert 'The file has speeds of 4 ranks: set p to 4.' in text(page, 'notes')
    assert not table(page)
    assert page.silent()


def test_typed_numbers(page):
    for control, value in (('F', 1.37), ('comm', 0.013)):
        enter(page, control, value)
        assert page.evaluate(f'state.{control}') == value
    slide(page, 'comm', 0.03)
    assert page.evaluate('state.comm') == 0.03, 'steps of a hundredth'
    enter(page, 'limit', 3)
    enter(page, 'limit', '')
    assert page.evaluate('state.limit') is None
    before = table(page)
    for control, value, told in (
        ('F', '2e9', 'F = 2e9: give a number from 0 up to 1e9'),
        ('B', '', 'B = nothing: give a number'),
        ('W', '-1', 'W = -1: give a number'),
    ):
        enter(page, control, value)
        assert text(page, 'trouble').startswith(told) and table(page) == before
    for control in 'FBW':
        enter(page, control, 0)
    assert 'F, B and W are all 0: give a time above 0' in text(page, 'trouble')
    assert page.evaluate('state.W') > 0
    assert page.silent()


def test_what_waits_for_w_is_the_activation_by_default(page, tmp_path):
    for name, more in (('a', {}), ('b', {'retained': [0.5, 1.0, 0.5, 1.0]})):
        written = times(4, activation=[1.0, 2.0, 1.0, 2.0], **more)
        opened(page, tmp_path, written, name)
        costs, schedule = Costs.from_json(written), build('zb-h2', 4, 8)
        assert float(table(page)['zb-h2'][3]) == pytest.approx(max(peak(schedule, costs)), rel=1e-4)


def test_memory_of_files(page, tmp_path, file):
    """A limit is of all that a rank holds, parameters, too; bytes are GiB.

    Those of a plan that says so, and activations that are too many for anything else.
    """
    for name, unit, written, most in (
        ('mine', '', times(4, activation=[1] * 4, parameters=[2] * 4), (4, 6)),
        ('large', ' GiB', times(4, activation=[3 * GIB] * 4), (12, 12)),
    ):
        opened(page, tmp_path, written, name)
        assert table(page)['1f1b'][3] == f'{most[0]}{unit}'
        enter(page, 'limit', most[1] - 1)
        assert table(page)['1f1b'][3] == f'{most[0]}{unit} > limit'
        assert f'within {most[1] - 1}{unit}' in text(page, 'best')
        enter(page, 'limit', most[1])
        assert table(page)['1f1b'][3] == f'{most[0]}{unit}'
    assert page.evaluate('state.limit') == 12 * GIB
    load(page, file, link(page))
    assert exact(page, 'limit') == '12'
    own = {'F': [1, 1], 'B': [1, 1], 'W': [1, 1]}
    costs = {'times': own, 'amounts': {'activation': [512, 512]}}
    schedule = json.loads(build('1f1b', 2, 4).to_json())
    plan = {'schedule': schedule, 'costs': costs, 'units': {'memory': 'bytes'}}
    opened(page, tmp_path, json.dumps(plan), 'small')
    assert table(page)['small'][3].endswith(' GiB')


def test_closing_forgets_all_of_a_file(page, tmp_path):
    opened(page, tmp_path, times(4, comm=0.25, activation=[GIB] * 4))
    enter(page, 'limit', 2)
    assert page.evaluate('state.comm') == 0.25
    page.click('#close')
    assert table(page)['zb-v'] == expected('zb-v') and not text(page, 'opened')
    assert page.evaluate('[state.comm, state.limit, state.file]') == [0, None, None]
    assert page.evaluate("document.getElementById('close').hidden")
    opened(page, tmp_path, times(4, comm=0.25))
    page.click('#defaults')
    assert page.evaluate('state.file') is None and not text(page, 'opened')
    assert page.silent()


def test_a_file_is_dropped(page):
    page.evaluate(f"""(() => {{
        const dropped = new DataTransfer();
        dropped.items.add(new File([{json.dumps(times(4))}], 'dropped.json'));
        document.dispatchEvent(new DragEvent('drop', {{dataTransfer: dropped, cancelable: true}}));
    }})()""")
    until(page, "document.getElementById('opened').innerText.startsWith('dropped.json: times')")
    assert table(page)['zb-h1'] == expected('zb-h1', Costs.from_json(times(4)))


def test_a_plan_with_the_name_of_a_schedule(page, tmp_path):
    before = table(page)['1f1b']
    opened(page, tmp_path, build('zb-h1', 4, 8).to_json(), '1f1b')
    names = page.texts('#rows label')
    assert {'1f1b', '1f1b (file)'} <= {*names} and len(names) == len(NAMES) + 1
    assert '1f1b (file)' in page.texts('#panels h2') and before == expected('1f1b')


@pytest.mark.parametrize(('stages', 'p'), [(2, 2), (8, 4), (12, 6)])
def test_ranks_follow_from_stages(page, tmp_path, file, stages, p):
    """The most of the page's that they go on, where those that are set do not."""
    load(page, file, f'#m=8&p={4 if p == 6 else 6}')
    opened(page, tmp_path, times(stages))
    kept = stages % (4 if p == 6 else 6) == 0
    assert page.evaluate('state.p') == (4 if kept else p)
    line = simulate(build('1f1b', 2, 8), Costs.from_json(times(stages)).joined(2))
    slide(page, 'p', SIZES.ranks.index(2))
    assert table(page)['1f1b'][0] == f'{line.makespan:.5g}'


def test_a_link_restores_the_state(page, file):
    """Each control, and what is ticked."""
    wanted = {'p': 2, 'm': 4, 'v': 4, 'F': 1.5, 'B': 0.75, 'W': 0.5, 'comm': 0.02, 'limit': 3}
    for (control, value), sizes in itertools.zip_longest(wanted.items(), SIZES):
        if sizes:
            slide(page, control, sizes.index(value))
        else:
            enter(page, control, value)
    page.click('#rows tr:nth-child(6) input')
    address, before, shown = link(page), table(page), page.texts('#panels h2')
    said = parse_qs(address[1:])
    assert {name: float(said[name][0]) for name in wanted} == wanted and len(shown) in (2, 4)
    load(page, file, address)
    assert (table(page), page.texts('#panels h2'), link(page)) == (before, shown, address)
    assert page.evaluate(f'[{", ".join(f"state.{name}" for name in wanted)}]') == [*wanted.values()]
    typed = ('F', 'B', 'W', 'comm', 'limit')
    assert [exact(page, name) for name in typed] == [str(wanted[name]) for name in typed]
    page.click('#defaults')
    assert table(page) != before and link(page) != address
    # as typed into the address, while the link of the sliders is still to be written
    page.evaluate(f'location.hash = {json.dumps(address)}; writeLink()')
    until(page, 'state.B === 0.75')
    assert table(page) == before and page.silent()
