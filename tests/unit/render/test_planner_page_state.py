"""The planner page: what it draws and notes, what files bring, what closing takes away, links."""

from __future__ import annotations

import itertools
import json
import random
import re
from dataclasses import replace
from urllib.parse import parse_qs

import chromium
import pytest
from test_planner_page import (  # noqa: F401
    NAMES,
    SIZES,
    as_file,
    browser,
    drawn,
    expected,
    file,
    link,
    load,
    loaded,
    page,
    plan_with,
    random_costs,
    silent,
    slide,
    table,
    text,
    until,
    upload,
)

from megatron_zbpp.analysis.gain import idle_parts
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.plan_costs import joined
from megatron_zbpp.render.html import waits
from megatron_zbpp.render.planner_page import families
from megatron_zbpp.render.svg import shapes
from megatron_zbpp.schedules import build

# pyright: reportUnknownParameterType=false
pytestmark = pytest.mark.skipif(
    chromium.find() is None, reason='no Chromium on PATH (Debian: apt-get install chromium)'
)
GIB = 2.0**30


def enter(page, control, value):  # noqa: F811
    """Type a number beside a slider."""
    page.evaluate(f"""(input => {{ input.value = '{value}';
        input.dispatchEvent(new Event('change'));
    }})(document.getElementById('{control}-exact'))""")


def exact(page, control):  # noqa: F811
    """The number beside a slider."""
    return page.evaluate(f"document.getElementById('{control}-exact').value")


def opened(page, path, written, name='mine'):  # noqa: F811
    """Upload these texts as a file, and wait until the page has it."""
    where = path / f'{name}.json'
    where.write_text(written)
    upload(page, where)
    until(page, f"document.getElementById('opened').innerText.startsWith('{name}.json: ')")


def times(stages, **more):
    """A file of stages that take 1, 2, 1, 2, ..."""
    own = [1.0 + k % 2 for k in range(stages)]
    return json.dumps({'F': own, 'B': own, 'W': own, **more})


# What it draws


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
def test_bars_and_memory_are_those_of_a_picture(loaded, name):  # noqa: F811
    """Colours of chunks, stripes of kinds, and what is held from F on: by uneven costs."""
    schedule = build(name, 4, 8)
    costs = replace(random_costs(schedule, random.Random(name)), together=1.0, pairs={})
    said = loaded.evaluate(f"""(() => {{
        const schedule = scheduleOf('{name}', {schedule.placement.num_chunks}, 4, 8);
        const run = simulate(schedule, readCosts({as_file(costs)}));
        return shapesOf({{run, memory: memoryOf(run), figures: figuresOf(run)}});
    }})()""")
    found, wanted = numbers(said), numbers(shapes(simulate(schedule, costs), costs))
    assert found.keys() == wanted.keys() and len(wanted) > 4
    for key, own in wanted.items():
        assert found[key] == pytest.approx(own, rel=1e-5, abs=1e-5), key


@pytest.mark.parametrize('name', ['zb-v', 'interleaved'])
def test_what_a_pass_waited_for(loaded, name):  # noqa: F811
    schedule = build(name, 4, 8)
    costs = random_costs(schedule, random.Random(name))
    said = loaded.evaluate(f"""(() => {{
        const schedule = scheduleOf('{name}', 2, 4, 8);
        const run = simulate(schedule, readCosts({as_file(costs)}));
        return waitsOf(run, figuresOf(run).makespan);
    }})()""")
    wanted = waits(simulate(schedule, costs))
    assert [list(map(tuple, own)) for own in said] == wanted
    assert sum(rank >= 0 for own in wanted for rank, _ in own) > 10


def test_facts_and_peaks_of_a_timeline(page, tmp_path, file):  # noqa: F811
    """Causes of idle time by name; the most that each rank holds; one time axis for all."""
    load(page, file, '#p=4&m=8&show=zb-h1')
    opened(page, tmp_path, times(4, comm=0.25))
    schedule, costs = build('zb-h1', 4, 8), Costs.from_json(times(4, comm=0.25))
    line = simulate(schedule, costs)
    shares = [f'{share:.1%}' for share in idle_parts(line, costs)]
    causes = zip(('schedule', 'uneven stages', 'messages'), shares, strict=True)
    assert len(set(shares)) == 3
    told = page.evaluate("document.querySelector('#panels .facts').innerText")
    assert f'({", ".join(" ".join(cause) for cause in causes)})' in told
    load(page, file, '#p=4&m=8&show=zb-h1,1f1b')
    peaks = {
        name: [f'max {most:.5g}' for most in peak(made, Costs.uniform(made.placement))]
        for name, made in ((each, build(each, 4, 8)) for each in ('zb-h1', '1f1b'))
    }
    assert len(set(peaks['1f1b'])) == 4
    for place, name in enumerate(drawn(page)):
        found = f"[...document.querySelectorAll('#panel-{place} .peak')].map(t => t.textContent)"
        assert page.evaluate(found) == peaks[name]
    widths = "[...document.querySelectorAll('.stretch > rect')].map(r => r.getAttribute('width'))"
    longest = float(expected('1f1b')[0])
    assert list(map(float, page.evaluate(widths))) == [longest, longest]


# The table, and what is said above and below it


def test_rows_are_in_order(page):  # noqa: F811
    """The shortest first, of equally short ones that which holds less; those over a limit last."""
    for limit in (None, 3):
        if limit:
            enter(page, 'limit', limit)
        rows = [
            (' > limit' in cells[3], float(cells[0]), float(cells[3].split()[0]))
            for cells in table(page).values()
        ]
        assert rows == sorted(rows)
        equal = [a for a, b in itertools.pairwise(rows) if a[:2] == b[:2] and a < b]
        assert equal, 'some are as short and hold more'


def test_the_shortest_has_one_copy_of_the_weights(loaded, file):  # noqa: F811
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


def test_the_line_above_the_table(page):  # noqa: F811
    name, cells = next(
        (name, cells) for name, cells in table(page).items() if name in text(page, 'best').split()
    )
    makespan, gain, idle, held = cells
    assert text(page, 'best') == (
        f'Shortest: {name} takes {makespan}, {gain} less time than 1f1b; idle GPU time {idle}, '
        f'peak memory {held}'
    )
    one = [family.name for family in families() if family.num_routes == 1]
    least = min(float(cells[3]) for name, cells in table(page).items() if name in one)
    enter(page, 'limit', least)
    slide(page, 'comm', 0.5)
    told = rf'within {least:g}: [\w-]+ takes [\d.]+, [\d.]+% more time than 1f1b'
    assert re.search(told, text(page, 'best'))


def test_notes(page, file, tmp_path):  # noqa: F811
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
    assert silent(page)


# Numbers that are typed


def test_typed_numbers(page):  # noqa: F811
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
    assert silent(page)


# Memory of files


def test_parameters_count_for_a_limit(page, tmp_path):  # noqa: F811
    """The table has activations; a limit is of all that a rank holds."""
    opened(page, tmp_path, times(4, activation=[1] * 4, parameters=[2] * 4))
    assert table(page)['1f1b'][3] == '4'
    enter(page, 'limit', 5)
    assert table(page)['1f1b'][3] == '4 > limit'
    enter(page, 'limit', 6)
    assert table(page)['1f1b'][3] == '4'


def test_what_waits_for_w_is_the_activation_by_default(page, tmp_path):  # noqa: F811
    for name, more in (('a', {}), ('b', {'retained': [0.5, 1.0, 0.5, 1.0]})):
        written = times(4, activation=[1.0, 2.0, 1.0, 2.0], **more)
        opened(page, tmp_path, written, name)
        costs, schedule = Costs.from_json(written), build('zb-h2', 4, 8)
        assert float(table(page)['zb-h2'][3]) == pytest.approx(max(peak(schedule, costs)), rel=1e-4)


def test_bytes_are_gib(page, tmp_path, file):  # noqa: F811
    """Those of a plan that says so, and activations that are too many for anything else."""
    opened(page, tmp_path, times(4, activation=[3 * GIB] * 4), 'large')
    assert table(page)['1f1b'][3] == '12 GiB'
    enter(page, 'limit', 11)
    assert table(page)['1f1b'][3] == '12 GiB > limit' and 'within 11 GiB' in text(page, 'best')
    enter(page, 'limit', 12)
    assert table(page)['1f1b'][3] == '12 GiB' and page.evaluate('state.limit') == 12 * GIB
    address = link(page)
    load(page, file, address)
    assert exact(page, 'limit') == '12'
    own = {'F': [1, 1], 'B': [1, 1], 'W': [1, 1]}
    costs = {'times': own, 'amounts': {'activation': [512, 512]}}
    plan = {'schedule': json.loads(plan_with()), 'costs': costs, 'units': {'memory': 'bytes'}}
    opened(page, tmp_path, json.dumps(plan), 'small')
    assert table(page)['small'][3].endswith(' GiB')


# What closing takes away


def test_closing_forgets_all_of_a_file(page, tmp_path):  # noqa: F811
    opened(page, tmp_path, times(4, comm=0.25, activation=[GIB] * 4))
    enter(page, 'limit', 2)
    assert page.evaluate('state.comm') == 0.25
    page.evaluate("document.getElementById('close').click()")
    assert table(page)['zb-v'] == expected('zb-v') and not text(page, 'opened')
    assert page.evaluate('[state.comm, state.limit, state.file]') == [0, None, None]
    assert page.evaluate("document.getElementById('close').hidden")
    opened(page, tmp_path, times(4, comm=0.25))
    page.evaluate("document.getElementById('defaults').click()")
    assert page.evaluate('state.file') is None and not text(page, 'opened')
    assert silent(page)


def test_a_file_is_dropped(page):  # noqa: F811
    page.evaluate(f"""(() => {{
        const dropped = new DataTransfer();
        dropped.items.add(new File([{json.dumps(times(4))}], 'dropped.json'));
        document.dispatchEvent(new DragEvent('drop', {{dataTransfer: dropped, cancelable: true}}));
    }})()""")
    until(page, "document.getElementById('opened').innerText.startsWith('dropped.json: times')")
    assert table(page)['zb-h1'] == expected('zb-h1', Costs.from_json(times(4)))


def test_a_plan_with_the_name_of_a_schedule(page, tmp_path):  # noqa: F811
    before = table(page)['1f1b']
    opened(page, tmp_path, build('zb-h1', 4, 8).to_json(), '1f1b')
    names = page.evaluate("[...document.querySelectorAll('#rows label')].map(l => l.innerText)")
    assert {'1f1b', '1f1b (file)'} <= {*names} and len(names) == len(NAMES) + 1
    assert '1f1b (file)' in drawn(page) and before == expected('1f1b')


@pytest.mark.parametrize(('stages', 'p'), [(2, 2), (8, 4), (12, 6)])
def test_ranks_follow_from_stages(page, tmp_path, file, stages, p):  # noqa: F811
    """The most of the page's that they go on, where those that are set do not."""
    load(page, file, f'#m=8&p={4 if p == 6 else 6}')
    opened(page, tmp_path, times(stages))
    kept = stages % (4 if p == 6 else 6) == 0
    assert page.evaluate('state.p') == (4 if kept else p)
    line = simulate(build('1f1b', 2, 8), joined(Costs.from_json(times(stages)), 2))
    slide(page, 'p', SIZES.ranks.index(2))
    assert table(page)['1f1b'][0] == f'{line.makespan:.5g}'


def test_hops_of_joined_stages(loaded):  # noqa: F811
    """Between stages of a file that become one there is no message."""
    costs = random_costs(build('zb-v', 4, 8), random.Random(3))
    costs = replace(costs, hops=tuple((k + 1.0, k + 0.5) for k in range(7)))
    for stages in (2, 4, 8, 16):
        said = loaded.evaluate(f'joinedCosts(readCosts({as_file(costs)}), {stages}).hops')
        assert [tuple(hop) for hop in said] == list(joined(costs, stages).hops)


# Links


def test_a_link_has_each_control(page, tmp_path, file):  # noqa: F811
    wanted = {'p': 2, 'm': 4, 'v': 4, 'F': 1.5, 'B': 0.75, 'W': 0.5, 'comm': 0.02, 'limit': 3}
    for control, value in wanted.items():
        if control in SIZES_OF:
            slide(page, control, SIZES_OF[control].index(value))
        else:
            enter(page, control, value)
    address = link(page)
    said = parse_qs(address[1:])
    assert {name: float(said[name][0]) for name in wanted} == wanted
    before = table(page)
    load(page, file, address)
    assert page.evaluate(f'[{", ".join(f"state.{name}" for name in wanted)}]') == [*wanted.values()]
    assert table(page) == before
    typed = ('F', 'B', 'W', 'comm', 'limit')
    assert [exact(page, name) for name in typed] == [str(wanted[name]) for name in typed]
    opened(page, tmp_path, times(4), 'mine')
    address = link(page)
    load(page, file, address)
    assert text(page, 'opened') == 'mine.json: times of 4 stages'


SIZES_OF = {'p': SIZES.ranks, 'm': SIZES.microbatches, 'v': SIZES.chunks}
