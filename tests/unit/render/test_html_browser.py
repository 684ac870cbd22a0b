"""The page in a real headless browser: it reacts, it is silent, it stays offline."""

import io
import re
from base64 import b64decode
from pathlib import Path

import chromium
import pytest
import yaml
from matplotlib.image import imread
from paths import ROOT

from megatron_zbpp import Costs, build, simulate
from megatron_zbpp.render.html import html, waits
from megatron_zbpp.render.svg import svg

MKDOCS = ROOT / 'mkdocs.yml'


SCHEDULE = build('zb-v', 4, 8)
COSTS = Costs.uniform(SCHEDULE.placement, 1.0, 1.2, 0.8, comm=0.25)
SIMULATED = simulate(SCHEDULE, COSTS)
MEASURED = simulate(SCHEDULE, COSTS.with_times(F=(0.6,) * 8))


@pytest.fixture
def page(browser, tmp_path):
    """Simulated against measured, freshly loaded."""
    lines = {'simulated': SIMULATED, 'measured': MEASURED}
    file = tmp_path / 'page.html'
    file.write_text(html(lines, dict.fromkeys(lines, COSTS), title='zb-v', unit='s'))
    browser.events.clear()
    browser.open(file)
    return browser


def plot(page: chromium.Page, panel: int = 0) -> tuple[float, float, float, float]:
    """Left, top, width, height of a panel's plot, in pixels."""
    return page.evaluate(f"""(() => {{
        const svg = document.getElementById('panel-{panel}'), inner = svg.querySelector('.stretch');
        const frame = svg.getBoundingClientRect(), size = name => Number(inner.getAttribute(name));
        return [frame.left + size('x'), frame.top, size('width'), size('height')];
    }})()""")


def place(page: chromium.Page, rank: int, index: int) -> tuple[float, float]:
    """Where the simulated panel shows the middle of a pass, in pixels."""
    left, top, width, height = plot(page)
    first, _, span, ranks = view(page)
    start, end = SIMULATED.spans[rank][index]
    return left + ((start + end) / 2 - first) / span * width, top + (rank + 0.3) / ranks * height


def view(page: chromium.Page, panel: int = 0) -> list[float]:
    box = page.evaluate(
        f"document.querySelector('#panel-{panel} .stretch').getAttribute('viewBox')"
    )
    return list(map(float, box.split()))


def tooltip(page: chromium.Page) -> str | None:
    """What the tooltip says; None while it is hidden."""
    return page.evaluate("(t => t.hidden ? null : t.innerText)(document.getElementById('tooltip'))")


def test_hover_explains_the_pass(page):
    assert tooltip(page) is None
    rank, index = next(
        (rank, i)
        for rank, causes in enumerate(waits(SIMULATED))
        for i, cause in enumerate(causes)
        if cause[0] >= 0 and i > 0
    )
    page.mouse('mouseMoved', *place(page, rank, index))
    said = tooltip(page)
    p = SCHEDULE.passes[rank][index]
    cause_rank, cause = waits(SIMULATED)[rank][index]
    gap = SIMULATED.spans[rank][index][0] - SIMULATED.spans[rank][index - 1][1]
    assert said.startswith(f'{p} ')
    assert f'microbatch {p.microbatch}, stage {p.stage}' in said
    assert f'waited {gap:.5g} for {SCHEDULE.passes[cause_rank][cause]} of rank {cause_rank}' in said
    for name, line in (('simulated', SIMULATED), ('measured', MEASURED)):
        start, end = line.spans[rank][index]
        assert f'{name}\t{start:.5g}\t{end:.5g}\t{end - start:.5g}' in said
    marked = "document.querySelectorAll('#panel-{} .marks rect').length"
    assert page.evaluate(marked.format(0)) == 2  # the pass and its cause
    assert page.evaluate(marked.format(1)) == 1  # the same pass as measured
    left, top, _, _ = plot(page)
    page.mouse('mouseMoved', left, top - 60)
    assert tooltip(page) is None
    assert page.silent()


def test_hover_names_the_phase(page):
    """Of a pass in the middle of each phase, and of its last one."""
    for rank, phases in enumerate(SCHEDULE.phases):
        ends = [first for first, _ in phases[1:]] + [len(SCHEDULE.passes[rank])]
        for (first, label), end in zip(phases, ends, strict=True):
            for index in {(first + end) // 2, end - 1}:
                page.mouse('mouseMoved', *place(page, rank, index))
                assert f'phase: {label}\n' in tooltip(page)
    for rank in range(4):
        for index in range(0, len(SCHEDULE.passes[rank]), 7):
            page.mouse('mouseMoved', *place(page, rank, index))
            assert tooltip(page).startswith(f'{SCHEDULE.passes[rank][index]} ')
    left, top, _, height = plot(page)
    page.mouse('mouseMoved', left + 2, top + 0.9 * height)  # rank 3 starts later
    assert tooltip(page) is None


def test_wheel_zooms_about_the_pointer_and_drag_pans(page):
    whole = view(page)
    x, y = place(page, 1, 20)
    for _ in range(4):
        page.mouse('mouseWheel', x, y, deltaX=0, deltaY=-240)
    zoomed = view(page)
    assert zoomed[2] < whole[2] / 5
    page.mouse('mouseMoved', x + 1, y)
    assert tooltip(page).startswith(f'{SCHEDULE.passes[1][20]} ')
    assert view(page, 1) == [*zoomed]  # both panels show the same stretch of time
    assert str(SCHEDULE.passes[1][20]) in page.texts('#panel-0 .labels text')

    page.mouse('mousePressed', x, y, button='left', clickCount=1)
    page.mouse('mouseMoved', x + 100, y, button='left')
    page.mouse('mouseReleased', x + 100, y, button='left', clickCount=1)
    assert view(page)[0] == pytest.approx(zoomed[0] - 100 / plot(page)[2] * zoomed[2])
    assert view(page)[2] == pytest.approx(zoomed[2])

    for count in (1, 2):
        page.mouse('mousePressed', x, y, button='left', clickCount=count)
        page.mouse('mouseReleased', x, y, button='left', clickCount=count)
    assert view(page) == whole
    assert page.silent()


def test_buttons_keys_and_limits(page):
    whole = view(page)
    page.click('#in')
    assert view(page)[2] == pytest.approx(0.7 * whole[2])
    page.click('#out')
    assert view(page) == pytest.approx(whole)
    page.evaluate("for (let i = 0; i < 99; i++) document.getElementById('in').click()")
    assert view(page)[2] == pytest.approx(1e-5 * whole[2])
    page.click('#reset')
    assert view(page) == whole
    page.call('Input.dispatchKeyEvent', type='keyDown', key='+', text='+')
    assert view(page)[2] == pytest.approx(0.7 * whole[2])
    page.call('Input.dispatchKeyEvent', type='keyDown', key='ArrowRight')
    assert view(page)[0] > 0.15 * whole[2]
    assert page.silent()


def test_side_by_side_or_stacked(page):
    assert plot(page)[1] == plot(page, 1)[1]
    narrow = plot(page)[2]
    page.click('#layout')
    assert plot(page)[1] < plot(page, 1)[1]
    assert plot(page)[2] > 1.5 * narrow


def test_table_and_memory_curves(page):
    rows = page.texts('.summary tr')
    assert f'{SIMULATED.bubble:.2%}' in rows[1] and rows[1].startswith('simulated')
    assert f'{MEASURED.bubble:.2%}' in rows[2] and rows[2].startswith('measured')
    assert page.texts('#panel-0 .peak') == ['max 4'] * 4
    heights = page.evaluate(
        "[...document.querySelectorAll('.memory')].map(m => m.getBoundingClientRect().height)"
    )
    assert len(heights) == 2 and min(heights) > 100


def test_lines_of_a_comparison_are_sorted_and_linked(browser, tmp_path):
    """By a click on a head, and the other way round by the next; unknown values come last."""
    made = {name: build(name, 4, 8) for name in ('zb-h1', '1f1b', 'zb-v', 'gpipe')}
    costs = {name: Costs.uniform(each.placement) for name, each in made.items()}
    lines = {name: simulate(each, costs[name]) for name, each in made.items()}
    del costs['zb-h1']
    file = tmp_path / 'compared.html'
    file.write_text(html(lines, costs))
    browser.events.clear()
    browser.open(file)
    heads = browser.texts('.summary th')

    def cells(column: int) -> list[str]:
        return browser.texts(f'.summary tbody tr > :nth-child({column + 1})')

    def click(head: str) -> list[str]:
        head = f'.summary th:nth-child({heads.index(head) + 1})'
        browser.click(f'{head} > :first-child')
        sorting = browser.evaluate(f"document.querySelector('{head}').getAttribute('aria-sort')")
        assert len(browser.texts('[aria-sort]')) == 1
        return [sorting, *cells(0)]

    assert heads[1:3] == ['makespan', 'gain over 1f1b'] and cells(0) == [*made]
    gains = [f'{1 - line.makespan / lines["1f1b"].makespan:.1%}' for line in lines.values()]
    assert cells(2) == gains and gains[1] == '0.0%' < gains[2]
    rising = sorted(made, key=lambda name: lines[name].makespan)
    assert click('makespan') == ['ascending', *rising] != ['ascending', *made]
    assert click('makespan') == ['descending', *sorted(rising, key=lambda n: -lines[n].makespan)]
    for _ in range(2):
        assert click('peak activations')[-1] == 'zb-h1', 'whose costs are not known'
    for name in made:
        target = browser.evaluate(
            f"[...document.querySelectorAll('.summary a')].find(a => a.innerText === '{name}').hash"
        )
        panel = f"document.querySelector('{target}').closest('section')"
        assert browser.evaluate(f"{panel}.querySelector('h2').innerText") == name
    assert browser.silent()


def test_a_narrow_screen_scrolls_the_table_alone(page):
    with page.screen(480):
        fits = '(x => x.scrollWidth <= x.clientWidth)'
        assert page.evaluate(f'{fits}(document.documentElement)')
        assert not page.evaluate(f"{fits}(document.querySelector('.wide'))")


def docs_page(browser, folder: Path, body: str) -> None:
    """Open a page with the style of the docs."""
    (css,) = yaml.safe_load(re.sub('!!.*', '', MKDOCS.read_text()))['extra_css']
    style = f'<style>{(MKDOCS.parent / "docs" / css).read_text()} body {{margin: 0}}</style>'
    (folder / 'page.html').write_text(style + body)
    browser.open(folder / 'page.html')


@pytest.mark.parametrize(('scheme', 'dark'), [('default', False), ('slate', True)])
def test_pictures_of_the_docs_go_with_the_scheme(browser, tmp_path, scheme, dark):
    """That of Material for MkDocs, which the reader may switch: no white boxes on a dark page."""
    (tmp_path / 'zb-v.svg').write_text(svg({'zb-v': SIMULATED}, {'zb-v': COSTS}, width=600))
    shown = f'<body data-md-color-scheme="{scheme}"><p class="md-content"><img src="zb-v.svg">'
    docs_page(browser, tmp_path, shown)
    clip = {'x': 8, 'y': 20, 'width': 500, 'height': 200, 'scale': 1}
    taken = b64decode(browser.call('Page.captureScreenshot', clip=clip)['data'])
    shown = imread(io.BytesIO(taken))[..., :3]
    background = shown.reshape(-1, 3)[0]
    assert (background.max() < 0.3) == dark and (background.min() > 0.9) != dark
    assert (shown[..., 2] - shown[..., 0]).max() > 0.4, 'forwards stay blue'


@pytest.mark.parametrize('width', [480, 750])
def test_long_commands_of_the_docs_wrap(browser, tmp_path, width):
    """Also words that are longer than the page; short lines stay as they are."""
    lines = 'zbpp list\nzbpp page\nzbpp compare ' + '--flag 1,2 ' * 40 + 'a' * 300
    shown = f'<div class="md-content" style="width: {width}px"><pre><code>{lines}</code></pre>'
    docs_page(browser, tmp_path, shown)
    code = 'document.querySelector("code").getBoundingClientRect()'
    assert browser.evaluate(f'{code}.width') <= width
    assert browser.evaluate('document.querySelector("pre").scrollWidth') <= width
    assert browser.evaluate(f'{code}.height') > 100, 'no line is lost'


def test_thousands_of_passes(browser, tmp_path):
    schedule = build('zb-v', 16, 128)
    costs = Costs.uniform(schedule.placement)
    file = tmp_path / 'large.html'
    file.write_text(html({'zb-v': simulate(schedule, costs)}, {'zb-v': costs}))
    assert sum(map(len, schedule.passes)) > 12_000
    browser.events.clear()
    browser.open(file)
    left, top, width, height = plot(browser)
    browser.evaluate('window.began = performance.now()')
    for step in range(10):
        x, y = left + width * (0.3 + 0.01 * step), top + (step % 8 + 0.3) / 16 * height
        browser.mouse('mouseMoved', x, y)
        browser.mouse('mouseWheel', x, y, deltaX=0, deltaY=-60)
    took = browser.evaluate('performance.now() - window.began')
    assert took < 20_000  # generous: the machine may be busy
    assert tooltip(browser) is not None
    assert browser.silent()
