"""The planner page in a real headless browser: it simulates as Python does, and reacts."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from urllib.parse import parse_qs

import chromium
import pages
import pytest
from paths import ROOT

from megatron_zbpp.analysis.gain import idle_parts
from megatron_zbpp.analysis.memory import live, peak
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.cli import main
from megatron_zbpp.ir import Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.formats import load_plan
from megatron_zbpp.ir.plan_costs import joined, stages_file
from megatron_zbpp.render.planner_page import Sizes, encoded, families, planner_page
from megatron_zbpp.schedules import build

pytestmark = pytest.mark.skipif(
    chromium.find() is None, reason='no Chromium on PATH (Debian: apt-get install chromium)'
)
SIZES = Sizes((2, 4, 6), (4, 8), (1, 2, 4))
NAMES = [family.name for family in families()]


@pytest.fixture(scope='module')
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Page]:
    page = chromium.Page(tmp_path_factory.mktemp('profile'))
    yield page
    page.close()


@pytest.fixture(scope='module')
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp('page') / 'planner.html'
    file.write_text(planner_page(SIZES))
    return file


@pytest.fixture(scope='module')
def loaded(browser: chromium.Page, file: Path) -> chromium.Page:
    """Somehow used: for what asks its functions alone."""
    load(browser, file)
    return browser


@pytest.fixture
def page(browser: chromium.Page, file: Path) -> chromium.Page:
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


def silent(page: chromium.Page) -> bool:
    """Whether the console said nothing, and nothing but the page itself was asked for."""
    noisy = 'Log.entryAdded', 'Runtime.consoleAPICalled', 'Runtime.exceptionThrown'
    page.evaluate('1')  # events of before come before its answer
    asked = [e for e in page.events if e['method'] == 'Network.requestWillBeSent']
    return len(asked) == 1 and not [e for e in page.events if e['method'] in noisy]


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
    page.evaluate("document.getElementById('link').click()")
    return page.evaluate('location.hash')


def drawn(page: chromium.Page) -> list[str]:
    return page.evaluate("[...document.querySelectorAll('#panels h2')].map(h => h.innerText)")


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
        joined(costs, each.num_stages) if costs else Costs.uniform(each.placement)
        for each in (schedule, rival)
    )
    line, other = simulate(schedule, ours), simulate(rival, theirs)
    cells = (
        f'{line.makespan:.5g}',
        f'{1 - line.makespan / other.makespan:.1%}',
        f'{line.idle_all_ranks:.1%}',
        f'{max(peak(schedule, Costs.uniform(schedule.placement) if costs else ours)):.5g}',
    )
    return list(cells)


# The simulation


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


def in_browser(page: chromium.Page, schedule: str, costs: Costs) -> dict:
    """What the page says of a schedule that the expression gives, at these costs."""
    given = as_file(costs)
    return page.evaluate(f"""(() => {{
        const schedule = {schedule}, run = simulate(schedule, readCosts({given}));
        const figures = figuresOf(run), memory = memoryOf(run);
        return {{starts: run.starts, ends: run.ends, ...figures, parts: idleParts(run, figures),
            live: memory.live, peaks: memory.peaks}};
    }})()""")


def assert_same(said: dict, schedule: Schedule, costs: Costs) -> None:
    """Times to the bit; sums of them to rounding."""
    line = simulate(schedule, costs)
    for rank, spans in enumerate(line.spans):
        found = zip(said['starts'][rank], said['ends'][rank], strict=True)
        assert list(map(tuple, found)) == list(spans), (schedule.name, rank)
    assert said['makespan'] == line.makespan
    assert said['idle'] == pytest.approx(line.idle_all_ranks, abs=1e-12)
    assert said['bubble'] == pytest.approx(line.bubble, abs=1e-12)
    assert list(said['parts'].values()) == pytest.approx(idle_parts(line, costs), abs=1e-12)
    assert said['peaks'] == pytest.approx(peak(schedule, costs), abs=2e-9)
    for held, wanted in zip(said['live'], live(schedule, costs), strict=True):
        assert held == pytest.approx(wanted, abs=2e-9)


@pytest.mark.parametrize('name', NAMES)
def test_simulation_is_that_of_python(loaded, name):
    """For random times, in all sizes of the page, whose orders are those of `build`."""
    rng, found = random.Random(name), 0
    for p in SIZES.ranks:
        for m in SIZES.microbatches:
            for v in SIZES.chunks:
                try:
                    schedule = build(name, p, m, num_chunks=v)
                except ValueError:  # as the page has none, which the count below holds
                    continue
                key = f"scheduleOf('{name}', {v}, {p}, {m})"
                costs = random_costs(schedule, rng)
                assert_same(in_browser(loaded, key, costs), schedule, costs)
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
        packed = f'decoded({json.dumps(encoded(schedule, name))})'
        for source in (read, packed):
            assert_same(in_browser(loaded, source, costs), schedule, costs)


def test_costs_of_other_numbers_of_stages(loaded):
    rng = random.Random(1)
    costs = random_costs(build('zb-v', 4, 8), rng)
    given = as_file(costs)
    for stages in (2, 4, 8, 16, 24):
        said = loaded.evaluate(f'joinedCosts(readCosts({given}), {stages})')
        wanted = joined(costs, stages)
        for kind, own in zip('FBW', said['times'], strict=True):
            assert own == pytest.approx(wanted.times[kind])
        assert said['activation'] == pytest.approx(wanted.amounts['activation'])
        assert said['parameters'] == pytest.approx(wanted.parameters)
        assert said['together'] == wanted.together == 1
    assert loaded.evaluate(f'joinedCosts(readCosts({given}), 6)') is joined(costs, 6) is None


def test_an_order_that_is_no_order_of_microbatches_is_refused():
    schedule = build('1f1b', 2, 2)
    swapped = (schedule.passes[0][::-1], schedule.passes[1])
    other = Schedule('mine', schedule.placement, 2, swapped)
    with pytest.raises(ValueError, match='mine: 0BW1 of rank 0 is not in microbatch order'):
        encoded(other, 'mine')


def test_sizes_are_bounded():
    with pytest.raises(ValueError, match='too many for a page: give fewer or smaller sizes'):
        planner_page(Sizes((64,), (100_000,), (2,)))


# What it shows


def test_table_is_what_the_simulator_says(page):
    found = table(page)
    assert len(found) == len(NAMES)
    for name in ('1f1b', 'zb-h1', 'zb-v', 'v-min', 'dualpipe-v', 'chimera'):
        assert found[name] == expected(name)
    assert drawn(page) == ['zb-v', 'zb-h1', '1f1b']
    assert silent(page)


def test_sliders_change_numbers(page):
    slide(page, 'W', 0.5)
    slide(page, 'comm', 0.25)
    schedule = build('zb-h1', 4, 8)
    line = simulate(schedule, Costs.uniform(schedule.placement, weight=0.5, comm=0.25))
    assert table(page)['zb-h1'][::2] == [f'{line.makespan:.5g}', f'{line.idle_all_ranks:.1%}']
    assert 'messages' in page.evaluate("document.querySelector('#panels .facts').innerText")
    slide(page, 'W', 1)
    slide(page, 'comm', 0)
    slide(page, 'p', SIZES.ranks.index(2))
    slide(page, 'm', SIZES.microbatches.index(4))
    assert table(page)['zb-v'] == expected('zb-v', p=2, m=4)
    slide(page, 'v', SIZES.chunks.index(4))
    assert table(page)['interleaved'] == expected('interleaved', p=2, m=4, v=4)
    assert table(page)['zb-v'] == expected('zb-v', p=2, m=4), 'it has two chunks'
    until(page, "location.hash.includes('p=2&m=4&v=4')")
    assert silent(page)


def test_memory_limit_leaves_those_out_that_hold_more(page):
    assert text(page, 'best').startswith('Shortest: zb-v takes')
    page.evaluate("""(input => { input.value = '3'; input.dispatchEvent(new Event('change')); })(
        document.getElementById('limit-exact'))""")
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
    assert set(drawn(page)) == {before[3], before[4]} ^ {'zb-v', 'zb-h1', '1f1b'}
    page.evaluate(
        "state.show.slice().forEach(() => document.querySelector('#rows input:checked').click())"
    )
    assert drawn(page) == [] and 'Tick schedules' in text(page, 'panels')
    assert silent(page)


def test_bars_are_the_passes(page, file):
    """Widths and places of the bars, by kind, are the simulated spans; the tooltip names them."""
    load(page, file, '#p=4&m=8&show=zb-v')
    schedule = build('zb-v', 4, 8)
    line = simulate(schedule, Costs.uniform(schedule.placement))
    paths = page.evaluate(
        "[...document.querySelectorAll('.passes path')].map(p => p.getAttribute('d'))"
    )
    found = sorted(
        (float(y) - 0.06, float(x), float(width))
        for path in paths
        for x, y, width in (
            (*part.split('h')[0].split(), part.split('h')[1].split('v')[0])
            for part in path.split('M')[1:]
        )
    )
    wanted = sorted(
        (rank, start, end - start) for rank, spans in enumerate(line.spans) for start, end in spans
    )
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours == pytest.approx(theirs)
    said = page.evaluate("""(() => {
        const inner = document.querySelector('.stretch'), outer = document.querySelector('.view');
        const frame = outer.getBoundingClientRect(), size = x => Number(inner.getAttribute(x));
        return [frame.left + size('x'), frame.top, size('width')];
    })()""")
    for rank in range(4):
        place = len(schedule.passes[rank]) // 2
        start, end = line.spans[rank][place]
        x = said[0] + (start + end) / 2 / line.makespan * said[2]
        y = said[1] + (rank + 0.3) * 40
        page.evaluate('scrollTo(0, 0)')
        page.mouse('mouseMoved', x, y)
        assert text(page, 'tooltip').startswith(f'{schedule.passes[rank][place]} ')


def test_legend_is_complete(page, file):
    entries = (
        "[...document.querySelectorAll('.legend li')].filter(l => !l.hidden).map(l => l.innerText)"
    )
    load(page, file, '#p=4&m=8&show=1f1b,zb-h1')
    whole = ['F: forward', 'B: input gradient', 'W: weight gradient', 'BW: whole backward']
    assert page.evaluate(entries) == [*whole, 'idle', 'activations held']
    load(page, file, '#p=4&m=8&show=zb-v')
    chunks = [text for entry in whole[:3] for text in (entry, f'{entry[0]} of the last chunk')]
    assert page.evaluate(entries) == [*chunks, 'idle', 'activations held']
    load(page, file, '#p=4&m=8&v=4&show=zb-interleaved')
    of_four = ('F: forward', 'F of chunk 2 of 4', 'F of chunk 3 of 4', 'F of the last chunk')
    assert tuple(page.evaluate(entries)[:4]) == of_four
    fill = (
        'getComputedStyle(document.querySelector(\'[data-when="chunk 3 of 4"] i\')).backgroundColor'
    )
    fills = "[...document.querySelectorAll('.passes path')].map(p => getComputedStyle(p).fill)"
    assert page.evaluate(fill) in page.evaluate(fills)
    load(page, file, '#p=4&m=8&show=chimera')
    assert 'F, up' in page.evaluate(entries)


# Links


def test_a_link_restores_the_state(page, file):
    slide(page, 'B', 1.5)
    slide(page, 'v', SIZES.chunks.index(4))
    slide(page, 'limit', 6)
    page.evaluate("document.querySelector('#rows tr:nth-child(6) input').click()")
    address, before, shown = link(page), table(page), drawn(page)
    load(page, file, address)
    assert (table(page), drawn(page), link(page)) == (before, shown, address)
    assert parse_qs(address[1:])['B'] == ['1.5'] and len(shown) in (2, 4)
    page.evaluate("document.getElementById('defaults').click()")
    assert table(page) != before and link(page) != address
    # as typed into the address, while the link of the sliders is still to be written
    page.evaluate(f'location.hash = {json.dumps(address)}; writeLink()')
    until(page, 'state.B === 1.5')
    assert table(page) == before
    assert silent(page)


@pytest.mark.parametrize(
    ('fragment', 'told'),
    [
        ('p=5', 'the link has p = 5: this page has 2, 4, 6'),
        ('F=-1', 'the link has F = -1: this page has numbers from 0 up'),
        ('comm=x', 'the link has comm = x'),
        ('F=0&B=0&W=0', 'the link has F, B and W of 0: give a time above 0'),
        ('show=1f1b,nobody', 'the link has nobody: this page has gpipe, 1f1b'),
        ('name=a.json&file=AAAA', 'the file in the link is cut off'),
    ],
)
def test_bad_links_are_told_in_a_line(browser, file, fragment, told):
    load(browser, file, f'#{fragment}')
    assert text(browser, 'trouble').startswith(told)
    assert '\n' not in text(browser, 'trouble') and drawn(browser)


# Files


@pytest.fixture(scope='module')
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
    assert 'mine' in drawn(page)
    assert page.evaluate(
        "['p', 'm', 'F', 'B', 'W'].every(id => document.getElementById(id).disabled)"
    )
    address = link(page)
    load(page, file, address)
    assert table(page) == found and link(page) == address
    slide(page, 'comm', 0.4)
    assert float(table(page)['mine'][0]) > line.makespan
    page.evaluate("document.getElementById('close').click()")
    assert 'mine' not in table(page) and 'mine' not in drawn(page)
    assert silent(page)


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
    assert silent(page)


def plan_with(**fields: object) -> str:
    made = json.loads(build('1f1b', 2, 4).to_json())
    return json.dumps({**made, **fields})


ORDERS = json.loads(plan_with())['passes']
SPLIT = json.loads(build('zb-h1', 2, 4).to_json())
SPLIT['passes'][1] = SPLIT['passes'][1].translate(str.maketrans('BW', 'WB'))
BAD = {
    'not json {': 'not JSON: give the stages.json of a trace, or a plan',
    '[1, 2]': 'not one JSON object',
    '{"layers": []}': 'neither times of stages',
    '{"F": [1, 1], "B": [1, 1]}': 'the times of W are missing: give "W": [...]',
    '{"F": [1, 1], "B": [1], "W": [1, 1]}': 'B has 1 entries and F 2: give one per stage',
    '{"F": [1, -1], "B": [1, 1], "W": [1, 1]}': 'F is not a list of numbers from 0 up',
    '{"F": [0, 0], "B": [0, 0], "W": [0, 0]}': 'all times are 0',
    '{"F": [1], "B": [1], "W": [1], "comm": "x"}': 'comm = x is not a time',
    '{"F": [1], "B": [1], "W": [1], "other": 1}': '"other" is not simulated in this page',
    '{"F": [1], "B": [1], "W": [1], "speeds": [0]}': 'speeds are not a list of numbers above 0',
    '{"times": {"F": [1], "B": [1], "W": [1], "R": [1]}}': 'times of R are not simulated',
    '{"schedule": {"format": "x"}}': 'not a schedule',
    plan_with(num_microbatches=0): 'num_microbatches = 0',
    plan_with(passes=ORDERS[:1]): 'passes: give the order of each of 2 ranks',
    plan_with(passes=[ORDERS[0].replace('0F3', ''), ORDERS[1]]): '0F3 is missing',
    plan_with(passes=[ORDERS[0] + ' 0F1', ORDERS[1]]): '0F1 of rank 0 comes twice',
    plan_with(passes=[ORDERS[0] + ' 1F1', ORDERS[1]]): '1F1 is on rank 0, but its stage on rank 1',
    plan_with(passes=[ORDERS[0] + ' 0X1', ORDERS[1]]): '"0X1" is no pass of this page',
    plan_with(passes=[ORDERS[0], ' '.join(ORDERS[1].split()[::-1])]): 'deadlock: rank ',
    json.dumps(SPLIT): 'deadlock: rank 0 cannot go on after 2 passes; zbpp check says',
    build('po-h', 2, 4).to_json(): 'a schedule with offload: this page simulates F, B and W',
    build('pipedream', 2, 4).to_json(): 'a schedule with updating',
}


def test_bad_files_are_told_in_a_line(page, tmp_path):
    before = table(page)
    for k, (written, told) in enumerate(BAD.items()):
        (tmp_path / f'{k}.json').write_text(written)
        upload(page, tmp_path / f'{k}.json')
        until(page, f"document.getElementById('trouble').innerText.startsWith('{k}.json: ')")
        said = text(page, 'trouble')
        assert told in said and '\n' not in said, (written, said)
        assert table(page) == before, 'what was shown stays'
    assert silent(page)


# Looks


@pytest.mark.parametrize('scheme', ['light', 'dark'])
@pytest.mark.parametrize('width', [1280, 480])
def test_no_horizontal_overflow(browser, file, plan, width, scheme):
    sizes = {'width': width, 'height': 900, 'deviceScaleFactor': 1, 'mobile': False}
    browser.call('Emulation.setDeviceMetricsOverride', **sizes)
    media = [{'name': 'prefers-color-scheme', 'value': scheme}]
    browser.call('Emulation.setEmulatedMedia', features=media)
    try:
        load(browser, file, '#p=6&m=8&F=1.23456&show=1f1b,zb-v,chimera')
        upload(browser, plan)
        until(browser, "document.getElementById('opened').innerText.startsWith('mine.json')")
        root = 'document.documentElement'
        assert browser.evaluate(f'{root}.scrollWidth <= {root}.clientWidth')
        listed = "document.querySelector('.listed')"
        assert browser.evaluate(f'{listed}.scrollWidth <= {listed}.clientWidth')
        page_colour = browser.evaluate('getComputedStyle(document.body).backgroundColor')
        assert page_colour == {'light': 'rgb(255, 255, 255)', 'dark': 'rgb(20, 24, 31)'}[scheme]
        wide = browser.evaluate("document.querySelector('.stretch').getBoundingClientRect().width")
        assert wide > 250
    finally:
        browser.call('Emulation.clearDeviceMetricsOverride')
        browser.call('Emulation.setEmulatedMedia', features=[])


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


CODES = {
    'Tab': {'windowsVirtualKeyCode': 9},
    'ArrowLeft': {'windowsVirtualKeyCode': 37},
}
