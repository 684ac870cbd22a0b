"""The `zbpp` command: what it prints, what it writes, how it refuses."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pages
import pytest
from paths import ROOT
from zero_bubble import TABLE_5, paper_costs

from megatron_zbpp.analysis.checker import check
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.cli import main, printing
from megatron_zbpp.cli.parser import _COMMANDS
from megatron_zbpp.ir import formats
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.formats import load, to_torch_csv
from megatron_zbpp.ir.timeline import MEANING
from megatron_zbpp.planner import frontier, plans
from megatron_zbpp.planner.plans import PlanningInterrupted
from megatron_zbpp.schedules import build, names, own_families
from megatron_zbpp.schedules.registry import ASYNCHRONOUS, TIERS
from megatron_zbpp.techniques.slices.sizes import sizes_of

SHAPE = ['--pp', '4', '--microbatches', '8']
ZB_V = ['--schedule', 'zb-v', *SHAPE]


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where plans are kept while a test runs."""
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    return tmp_path / 'cache' / 'megatron_zbpp' / 'plans'


@pytest.fixture
def zbpp(capsys: pytest.CaptureFixture):
    """Runs a command that must succeed; returns what it printed, parsed if that is JSON."""

    def run(*argv: object) -> str | dict:
        assert main(list(map(str, argv))) == 0
        printed = capsys.readouterr()
        assert printed.err == ''
        return json.loads(printed.out) if '--json' in argv else printed.out

    return run


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture):
    """Runs a command that must fail; returns the one line that it says on stderr."""

    def run(*argv: object) -> str:
        try:
            code = main(list(map(str, argv)))
        except SystemExit as stop:  # argparse's own way out
            code = stop.code
        assert code == 2
        said = capsys.readouterr().err
        assert said.endswith('\n') and said.count('\n') == 1, said
        return said

    return run


def times_file(folder: Path, **times: list[float]) -> Path:
    file = folder / 'times.json'
    file.write_text(json.dumps(times))
    return file


# What is printed


def test_list_names_every_schedule(zbpp) -> None:
    listed = zbpp('list', '--json')['schedules']
    every = own_families(every=True)
    assert [entry['name'] for entry in listed] == [family.name for family in every]
    assert {*names(), 'seq1f1b', 'seq-zb-v'} < {family.name for family in every}
    assert listed[0].keys() >= {'aliases', 'summary', 'bubble', 'memory', 'source', 'when'}
    tiers = {entry['name']: entry['tier'] for entry in listed}
    assert {*tiers.values()} == {*TIERS} and tiers['zb-v'] == 'recommended'
    text = ' '.join(zbpp('list', '--all').split())
    assert all(family.summary in text for family in every)


def test_list_tells_gains_of_a_size(zbpp) -> None:
    """As `compare` does, in its words; what cannot be had of that size says why."""
    listed = zbpp('list', '--json')
    assert (listed['ranks'], listed['microbatches'], listed['against']) == (4, 8, '1f1b')
    gains = {entry['name']: entry['gain'] for entry in listed['schedules']}
    assert gains['zb-v'] == pytest.approx(1 - 25.5 / 33) and gains['1f1b'] == 0
    small = '--pp', 3, '--microbatches', 5, '--against', 'interleaved'
    asked = {entry['name']: entry for entry in zbpp('list', *small, '--json')['schedules']}
    every = ','.join(asked)
    compared = zbpp('compare', *small, '--schedules', every, '--json')
    found = {each['name']: each['gain'] for each in compared['schedules']}
    assert {name: each['gain'] for name, each in asked.items() if name in found} == found
    without = {name: each['without'] for name, each in asked.items() if each['without']}
    assert without == {each['name']: each['reason'] for each in compared['skipped']}
    assert without and {name for name, each in asked.items() if each['gain'] is None} == {*without}
    text = ' '.join(zbpp('list', '--all', *small).split())
    assert f'no gain: {without["chimera"]}; Chimera' in text
    assert f'm >= 2p-1); peak memory p gain {found["zb-v"]:.1%}; ' in text
    said = 'gain: time saved against interleaved; p = 3, m = 5, F, B, W = 1, 1, 1; simulated'
    assert text.endswith(said)
    heads, *rows = csv.reader(zbpp('list', *small, '--table', 'csv').splitlines())
    at = heads.index('gain, p = 3, m = 5')
    assert {row[0]: row[at] for row in rows}['zb-v'] == f'{found["zb-v"]:.1%}'


def test_list_begins_with_what_most_take(zbpp, capsys) -> None:
    """On one screen; `--all`, `--json` and `--table` have every one."""
    every, few = own_families(every=True), zbpp('list').splitlines()
    named = [line.split()[0] for line in few if not line.startswith((' ', 'gain:', 'and '))]
    assert len(few) <= 45 and len(named) == 8
    assert {*named} <= _chosen()
    assert named == [family.name for family in every if family.tier == 'recommended']
    assert f'and {len(every) - 8} more: zbpp list --all' in few
    text = ' '.join(zbpp('list', '--all').split())
    assert all(family.summary in text for family in every) and ' more: ' not in text
    assert len(zbpp('list', '--table', 'csv').splitlines()) == len(every) + 1


def _chosen() -> set[str]:
    """Names in the README's table of which schedule when, or Megatron's own."""
    table = pages.README.read_text().partition('## Which schedule when')[2].partition('## ')[0]
    return {*re.findall(r'`([\w-]+)`', table), '1f1b', 'interleaved'}


@pytest.mark.parametrize('width', [40, 80, 120, 0])
@pytest.mark.parametrize('name', ['1f1b', 'zb-v', 'seq-zb-v', 'po'])
def test_the_legend_has_what_the_drawing_has(zbpp, name: str, width: int) -> None:
    """Each form of label: with its stage, with its microbatch, or a letter."""
    text = zbpp('show', '--schedule', name, *ZB_V[2:], '--width', width)
    drawn = ''.join(re.findall(r'^(?:rank \d+|copies) (.*)', text, re.M))
    legend = ' '.join(text.partition('· idle; ')[2].partition('makespan')[0].split())
    examples = re.findall(r'(\S+) is [A-Z]+ (stage|microbatch)', legend)
    assert all(label in drawn for label, _ in examples), (legend, drawn)
    labels = re.findall(r'(\d*)[A-Z]+(\d*)', drawn.replace('…', ''))
    forms = {'stage' if stage else 'microbatch' if m else 'letter' for stage, m in labels}
    told = {form for _, form in examples} | ({'letter'} if 'a letter alone' in legend else set())
    assert told == forms, (legend, drawn)


def test_simulate_gives_the_simulators_numbers(zbpp) -> None:
    found = zbpp('simulate', *ZB_V, '--times', '10,12,8', '--comm', 1, '--json')
    schedule = build('zb-v', 4, 8)
    costs = Costs.uniform(schedule.placement, 10, 12, 8, comm=1)
    timeline = simulate(schedule, costs)
    assert found['makespan'] == timeline.makespan
    assert found['window'] == max(timeline.windows)
    assert found['idle_busiest_rank'] == found['bubble_rate_makespan'] == timeline.bubble_makespan
    assert found['bubble'] == found['bubble_rate_window'] == timeline.bubble_window
    assert found['peak_activations'] == list(peak(schedule, costs))
    assert found['critical_path'][0]['ran'] == '0F0'
    assert found['critical_path'][-1]['end'] == timeline.makespan


def test_two_ways_hold_copies_of_the_weights(zbpp, tmp_path) -> None:
    """Said wherever they are named; a file of one simulates as its name does."""
    sizes, said = ('--pp', 4, '--microbatches', 8), 'copies of the weights'
    listed = {entry['name']: entry['copies'] for entry in zbpp('list', '--json')['schedules']}
    assert (listed['chimera'], listed['zb-v']) == (2, 1)
    text = ' '.join(zbpp('list', '--all').split())
    assert text.count(f'2 {said}') == sum(copies == 2 for copies in listed.values()) > 6
    named = zbpp('simulate', '--schedule', 'chimera', *sizes, '--json')
    assert (named['copies'], named['makespan'], max(named['peak_activations'])) == (2, 30, 4)
    assert f'(two-way, 2 {said}), 8 microbatches by turns down and up' in zbpp(
        'simulate', '--schedule', 'chimera', *sizes
    )
    file = tmp_path / 'chimera.json'
    file.write_text(build('chimera', 4, 8).to_json())
    of_file = zbpp('simulate', '--file', file, '--json')
    assert {**of_file, 'against': named['against'], 'gain': named['gain']} == named
    compared = zbpp('compare', '--schedules', 'zb-v,chimera', *sizes)
    assert f'{said}, of a stage at most: chimera 2' in ' '.join(compared.split())
    rows = zbpp('compare', '--schedules', 'zb-v,chimera', *sizes, '--json')['schedules']
    assert {row['name']: row['copies'] for row in rows} == {'zb-v': 1, 'chimera': 2}


def test_stashed_copies_of_the_weights_are_counted_alike(zbpp) -> None:
    """By list, compare and simulate: of the stage that has most; none at sizes it cannot take."""
    sizes = ('--pp', 4, '--microbatches', 2)
    listed = {each['name']: each['copies'] for each in zbpp('list', '--json', *sizes)['schedules']}
    counted = {name: listed[name] for name in ASYNCHRONOUS}
    assert counted.pop('pipedream-2bw') is None  # fewer than p-1
    compared = zbpp('compare', '--schedules', ','.join(counted), *sizes, '--json')['schedules']
    assert {each['name']: each['copies'] for each in compared} == counted
    for name, most in counted.items():
        found = zbpp('simulate', '--schedule', name, *sizes, '--json')
        assert found['copies'] == max(found['weight_copies']) == most
    assert (counted['pipedream'], counted['paci'], counted['pipemare']) == (3, 1, 2)
    text = zbpp('list', '--table', 'csv')
    (line,) = [each for each in text.splitlines() if each.startswith('pipedream-2bw,')]
    assert line.split(',')[4] == '2'


def test_asynchronous_schedules_have_a_period(zbpp) -> None:
    found = zbpp('simulate', '--schedule', 'pipedream', '--pp', 8, '--microbatches', 2, '--json')
    assert (found['period'], found['bubble_rate_period']) == (6, 0)
    assert found['weight_copies'] == [5, 4, 4, 3, 3, 2, 2, 1]
    assert found['delays'][0] == {'least': 3, 'mean': 3.5, 'most': 4}
    sizes = '--pp', 8, '--microbatches', 8
    text = zbpp('simulate', '--schedule', 'pipedream-2bw', *sizes)
    assert '5 calls of 8 microbatches' in text
    assert 'period 24 of a call of 8 microbatches' in text
    assert 'weight copies of each stage 2 2 2 2 2 2 2 2' in text
    table = zbpp('compare', '--schedules', 'zb-v,pipedream-2bw', *sizes)
    first, second = (line.split() for line in table.splitlines()[1:3])
    assert (first[0], first[-1]) == ('pipedream-2bw', '24')
    assert second[:2] == ['zb-v', '27.5']
    assert 'asynchronous, train another model: pipedream-2bw' in table
    assert 'asynchronous' not in zbpp('compare', '--schedules', 'zb-v,1f1b', *sizes)


def test_simulate_matches_the_papers_formula(zbpp) -> None:
    """ZB-H1 and 1F1B idle for (p-1)(F+B-W) and (p-1)(F+B+W) (arXiv 2401.10241, table 2)."""
    for name, idle in (('zb-h1', 3 * (10 + 12 - 8)), ('1f1b', 3 * 30)):
        case = ['--schedule', name, '--pp', 4, '--microbatches', 12, '--times', '10,12,8']
        found = zbpp('simulate', *case, '--json')
        assert found['window'] == pytest.approx(12 * 30 + idle)
        assert found['bubble_rate_window'] == pytest.approx(idle / (12 * 30 + idle))


REVERSED = 'Megatron wants the loss on its last rank: it runs this with the ranks reversed'


def test_simulate_for_people(zbpp) -> None:
    lines = zbpp('simulate', *ZB_V).splitlines()
    assert lines[0] == 'zb-v: 4 ranks, 8 stages (v), 8 microbatches, 192 passes'
    assert lines[1] == 'makespan 25.5, 22.7% less time than 1f1b'
    assert lines[2] == 'idle GPU time 5.88%: schedule 5.88%'
    assert lines[3] == 'window 24, bubble 0.00%'
    assert lines[5] == MEANING and max(map(len, lines)) <= 80
    assert [line.split() for line in lines[-5:-1]] == [
        [str(r), '24', '24', '0', '4'] for r in range(4)
    ]
    assert lines[-1] == REVERSED
    assert zbpp('show', *ZB_V).splitlines().count(REVERSED) == 1
    assert REVERSED not in zbpp('show', '--schedule', 'zb-h1', *ZB_V[2:])


# The larger ones in full runs: test_simulate has their numbers in every run.
LARGE = [pytest.param(row, marks=pytest.mark.full) for row in range(7, 12)]


@pytest.mark.parametrize('row', [*range(7), *LARGE])
def test_table_5_from_the_command_line(zbpp, tmp_path: Path, row: int) -> None:
    """All 60 cells, to four decimals or better: times and bytes of a stage in one file."""
    p, m, *_, comm = TABLE_5[row][:6]
    costs = paper_costs(row)
    times = {'F': costs.times['F'], 'B': costs.times['B'], 'W': costs.times['W']}
    held = {'activation': costs.amounts['activation'], 'retained': costs.amounts['retained']}
    file = times_file(tmp_path, **times, **held)
    shape = ['--pp', p, '--microbatches', m, '--times', file, '--comm', comm, '--json']
    fixed, automatic = ('1f1b', 'zb-h1', 'zb-h2'), ('zb-1p', 'zb-2p')
    for name, rate in zip((*fixed, *automatic), TABLE_5[row][6:], strict=True):
        found = round(zbpp('simulate', '--schedule', name, *shape)['bubble_rate_window'], 4)
        assert found == rate if name in fixed else found <= rate, name


def test_a_costs_file_is_read_whole(zbpp, refusal, tmp_path: Path) -> None:
    times = {'F': [1, 1], 'B': [1, 1], 'W': [1, 1]}
    case = ['simulate', '--schedule', 'zb-h1', '--pp', 2, '--microbatches', 4, '--times']
    plain = zbpp(*case, times_file(tmp_path, **times), '--json')['makespan']
    slow = times | {'edges': [[0, 1, 0.5]], 'message': 0.25, 'speeds': [1, 0.5]}
    assert zbpp(*case, times_file(tmp_path, **slow), '--json')['makespan'] > 2 * plain - 4
    for field, value, said in (
        ('retaned', [1, 1], "'retaned' is not known (did you mean 'retained'?)"),
        ('activation', [1], 'one entry per stage'),
        ('activation', '11', 'is not a list of numbers'),
        ('speeds', [1, True], 'is not a list of numbers'),
        ('speeds', [1, 0], 'a speed of 0 never ends'),
        ('speeds', [1], '1 speeds do not fit 2 ranks'),
        ('edges', [[0, 2, 1]], 'from rank 0 to rank 2: there are ranks 0 to 1'),
        ('edges', [[0, 1]], 'is not a list of [sender, receiver, latency]'),
        ('hops', [[0.5]], 'is not a list of [forward, back] for each stage'),
        ('hops', [[1, 1], [1, 1]], 'for each of the 1 stages before the last'),
        ('times', {'R': 1}, 'is not an object of lists'),
        ('times', {'F': [1, 1]}, 'given twice'),
        ('comm', '1', 'is not a number'),
    ):
        line = refusal(*case, times_file(tmp_path, **times, **{field: value}))
        assert said in line, line
    line = refusal(*case, times_file(tmp_path, **times, comm=1), '--comm', 2)
    assert '--comm 2.0, but the file of --times has 1: drop one' in line


def test_times_of_stages_fix_the_chunks(zbpp, tmp_path: Path) -> None:
    file = times_file(tmp_path, F=[1, 1, 1, 2], B=[1, 1, 1, 3], W=[1, 1, 1, 1.5])
    shape = ['--pp', 2, '--microbatches', 6, '--times', file, '--json']
    found = zbpp('simulate', '--schedule', 'zb-v', *shape)
    schedule = build('zb-v', 2, 6)
    costs = Costs.of((1, 1, 1, 2), (1, 1, 1, 3), (1, 1, 1, 1.5), activation=(0.5,) * 4)
    assert found['makespan'] == simulate(schedule, costs).makespan
    assert found['peak_activations'] == list(peak(schedule, costs))
    compared = zbpp('compare', *shape)
    assert {entry['stages'] for entry in compared['schedules']} == {4}
    assert '1f1b' in {entry['name'] for entry in compared['skipped']}


def test_show_draws_to_scale(zbpp) -> None:
    lines = zbpp('show', *ZB_V, '--width', 0).splitlines()
    assert lines[1].startswith('rank 0  0F0 0F1 0F2') and lines[1].endswith('0W7')
    fits = zbpp('show', *ZB_V, '--width', 80).splitlines()
    assert '…' not in ''.join(fits) and max(map(len, fits)) <= 80, 'letters are dropped first'
    assert re.findall('[FBW]', fits[1]) == [p.kind for p in build('zb-v', 4, 8).passes[0]]
    assert fits[-2] == 'makespan 25.5, 22.7% less time than 1f1b, peak activations 4'
    assert fits[-1] == 'idle GPU time 5.88%: schedule 5.88%'
    cut = zbpp('show', *ZB_V, '--width', 40).splitlines()
    assert cut[1].endswith('…')
    assert cut[5] == '… 3.88 of 25.5 time units shown: --width 0 shows all'
    data = zbpp('show', *ZB_V, '--json')
    assert data['timeline'][0][0] == ['0F0', 0.0, 0.5]
    assert data['schedule']['name'] == 'zb-v'


def test_show_draws_orders_of_an_invalid_file(zbpp, tmp_path: Path) -> None:
    file = tmp_path / 'torn.csv'
    file.write_text('0B0,0F0\n1F0,1B0\n')
    assert zbpp('show', '--file', file, '--order') == 'rank 0   0BW0  0F0\nrank 1   1F0   1BW0\n'
    assert len(zbpp('show', *ZB_V, '--order', '--json')['order']) == 4


def test_compare_sorts_and_draws(zbpp, tmp_path: Path) -> None:
    shape = ['--pp', 4, '--microbatches', 8]
    some = ['--schedules', '1f1b,zb-h1,zb-v']
    for suffix, start in (('svg', b'<svg'), ('png', b'\x89PNG')):
        picture = tmp_path / f'some.{suffix}'
        assert zbpp('compare', *shape, *some, '-o', picture, '--json')['picture'] == str(picture)
        assert picture.read_bytes().startswith(start)
    picture = tmp_path / 'all.html'
    found = zbpp('compare', *shape, '-o', picture, '--json')
    assert picture.read_text().startswith('<!doctype html>')
    spans = [entry['makespan'] for entry in found['schedules']]
    assert spans == sorted(spans)
    done = {entry['name'] for entry in found['schedules'] + found['skipped']}
    assert done == set(names())
    *table, meaning, _ = zbpp('compare', *shape, *some).splitlines()
    assert meaning.startswith('gain: time saved against 1f1b; idle: share of all GPU time')
    assert [line.split()[0] for line in table] == ['schedule', 'zb-v', 'zb-h1', '1f1b']


def test_compare_leaves_out_what_needs_more_memory(zbpp) -> None:
    found = zbpp('compare', '--pp', 4, '--microbatches', 8, '--memory-limit', 4, '--json')
    assert all(max(entry['peak_activations']) <= 4 for entry in found['schedules'])
    assert (
        'above the limit of 4'
        in {entry['name']: entry['reason'] for entry in found['skipped']}['zb-h2']
    )


def test_plan_beats_the_named_and_reaches_the_bound(zbpp, tmp_path: Path) -> None:
    case = ['--pp', 4, '--microbatches', 8, '--times', '10,12,8', '--memory-limit', 4]
    found = zbpp('plan', *case, '--placements', 'v', '--seconds', 20, '--json')
    assert found['objective'] == 'makespan' and found['gap'] >= 0
    assert found['lower_bound'] <= found['makespan'] <= found['best_named']['makespan']
    assert found['makespan'] == 258  # the optimum of this case, which an exact solver proved
    assert max(found['peak_activations']) <= 4

    file = tmp_path / 'plan.json'
    file.write_text(json.dumps(found))
    again = zbpp('simulate', '--file', file, '--times', '10,12,8', '--memory-limit', 4, '--json')
    keys = ('makespan', 'window', 'bubble_rate_makespan', 'bubble_rate_window', 'peak_activations')
    assert [again[key] for key in keys] == [found[key] for key in keys]


def test_plan_for_people_and_the_window(zbpp) -> None:
    text = zbpp('plan', *SHAPE, '--objective', 'window', '--seconds', 1)
    assert text.startswith('planned: 4 ranks')
    assert 'window 24, bubble 0.00%' in text
    assert 'lower bound of the window 24, gap 0.00%' in text
    assert 'no better than a named schedule: zb-h2 has the same window' in text


def test_plans_are_kept_on_disk(zbpp, cache_folder: Path, tmp_path: Path) -> None:
    case = ['plan', '--pp', 2, '--microbatches', 3, '--seconds', 0.2]
    first = zbpp(*case, '--json')
    again = zbpp(*case, '--json')
    assert (first.pop('cached'), again.pop('cached')) == (False, True)
    assert again == first and len(list(cache_folder.iterdir())) == 1
    assert 'planned before' in zbpp(*case)
    assert zbpp(*case, '--no-cache', '--json')['cached'] is False
    assert zbpp(*case, '--cache', tmp_path / 'other', '--json')['cached'] is False
    assert zbpp(*case, '--seed', 1, '--json')['cached'] is False
    assert len(list(cache_folder.iterdir())) == 2


def test_frontier_is_drawn(zbpp, tmp_path) -> None:
    case = ['plan', *SHAPE, '--seconds', 0.3, '--frontier', '2,4', '-o', tmp_path / 'frontier.svg']
    zbpp(*case)
    drawn = (tmp_path / 'frontier.svg').read_text()
    assert '<svg' in drawn and 'planned' in drawn
    for said in (
        'zb-interleaved v=4 = planned',
        'p = 4, m = 8, F, B, W = 1, 1, 1; simulated',
        MEANING,
    ):
        assert f'<!-- {said} -->' in drawn, 'of every number of chunks that plans may have'
    assert 'interleaved v=1' not in drawn and 'v=3' not in drawn


def test_plan_frontier(zbpp) -> None:
    case = ['plan', '--pp', 4, '--microbatches', 6, '--times', '1,1.2,0.8', '--seconds', 0.3]
    points = zbpp(*case, '--frontier', '4,2,3', '--json')['frontier']
    assert [point['memory_limit'] for point in points] == [2, 3, 4]
    spans = [point['makespan'] for point in points]
    assert spans == sorted(spans, reverse=True) and spans[0] > spans[-1]
    assert all(max(point['peak_activations']) <= point['memory_limit'] for point in points)
    *table, meaning, _ = zbpp(*case, '--frontier', '4,2,3').splitlines()
    assert meaning.startswith('gain: time saved against 1f1b; idle: ')
    assert [line.split()[0] for line in table] == ['limit', '2', '3', '4']


def test_plan_keeps_to_what_is_allowed(zbpp, tmp_path: Path) -> None:
    case = ['--pp', 2, '--microbatches', 4, '--seconds', 1, '--json']
    found = zbpp('plan', *case, '--placements', 'loop', '--vpp', 3)
    assert (found['placement'], found['stages']) == ('loop', 6)
    found = zbpp('plan', *case, '--placements', 'wave,loop', '--vpp', '4,5')
    assert found['stages'] in (8, 10)
    file = times_file(tmp_path, F=[1, 1, 1, 2], B=[1, 1, 1, 3], W=[1, 1, 1, 1.5])
    assert zbpp('plan', *case, '--times', file)['stages'] == 4


# What is written


@pytest.mark.parametrize('dialect', ['new', 'old'])
def test_convert_there_and_back(zbpp, tmp_path: Path, dialect: str) -> None:
    first, table, second = (tmp_path / name for name in ('a.json', 'zb-v.csv', 'b.json'))
    zbpp('convert', *ZB_V, '--to', 'json', '-o', first)
    zbpp('convert', '--file', first, '--to', 'torch-csv', '--dialect', dialect, '-o', table)
    zbpp('convert', '--file', table, '--to', 'json', '-o', second)
    assert load(second) == load(table) == build('zb-v', 4, 8)
    assert table.read_text() == to_torch_csv(build('zb-v', 4, 8), dialect)
    assert zbpp('check', second, '--json')['valid'] is True


@pytest.mark.parametrize(
    ('to', 'start'),
    [
        ('html', b'<!doctype'),
        ('svg', b'<svg'),
        ('png', b'\x89PNG'),
        ('perfetto', b'{"traceEvents"'),
    ],
)
def test_convert_to_pictures(zbpp, tmp_path: Path, to: str, start: bytes) -> None:
    file = tmp_path / 'picture'
    found = zbpp('convert', *ZB_V, '--times', '1,1,1', '--to', to, '-o', file, '--json')
    assert found['written'] == str(file)
    assert file.read_bytes().startswith(start)


@pytest.mark.parametrize(
    ('name', 'to'), [('a.json', 'json'), ('a.csv', 'torch-csv'), ('a.SVG', 'svg')]
)
def test_convert_as_the_name_says(zbpp, tmp_path: Path, name: str, to: str) -> None:
    assert zbpp('convert', *ZB_V, '-o', tmp_path / name, '--json')['to'] == to
    asked = zbpp('convert', *ZB_V, '-o', tmp_path / 'b', '--to', to, '--json')
    assert asked['to'] == to and (tmp_path / 'b').read_bytes() == (tmp_path / name).read_bytes()


def test_show_says_what_letters_mean(zbpp) -> None:
    text = ' '.join(zbpp('show', *ZB_V, '--width', 0).split())
    said = 'F forward, B input gradient, W weight gradient, · idle; 0F0 is F stage 0 microbatch 0'
    assert said in text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ('variable', 'value'), [('NO_COLOR', '1'), ('TERM', 'dumb'), ('NO_COLOR', '')]
)
def test_colours_are_for_who_wants_them(monkeypatch, variable: str, value: str) -> None:
    monkeypatch.setenv('TERM', 'xterm')
    monkeypatch.delenv('NO_COLOR', raising=False)
    assert printing.takes_colours(Terminal()) and not printing.takes_colours(io.StringIO())
    monkeypatch.setenv(variable, value)
    assert printing.takes_colours(Terminal()) == (not value)


def test_check_prints_the_shape(zbpp, tmp_path: Path) -> None:
    file = tmp_path / 'h1.json'
    file.write_text(build('zb-h1', 2, 3).to_json())
    text = zbpp('check', file)
    assert text == 'valid: zb-h1: 2 ranks, 2 stages (loop), 3 microbatches, 18 passes\n'


# What is refused


def test_refused_schedule_is_drawn(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    file = tmp_path / 'bad.csv'
    file.write_text('0F0,0F1,0B0\n1F0,1B0,1F1,1B1\n')
    assert main(['check', str(file)]) == 2
    said = capsys.readouterr()
    assert said.err.count('\n') == 1 and 'microbatch 1 on stage 0' in said.err
    assert said.out.startswith('rank 0') and '[' in said.out
    assert main(['check', str(file), '--json']) == 2
    said = capsys.readouterr()
    data = json.loads(said.out)
    assert data['valid'] is False and data['error'] in said.err
    assert '\n'.join(data['grid']).count('[') == 1


@pytest.mark.parametrize(
    ('argv', 'said'),
    [
        (['draw'], ["'draw'", 'simulate']),
        (['simulate', '--schedule', 'zb-w', *SHAPE], ["'zb-w'", "'zb-v'", 'zb-h1']),
        (['simulate', '--schedule', 'zb-v'], ['--pp']),
        (['simulate', '--schedule', 'zb-v', '--pp', '4'], ['--microbatches']),
        (['simulate', *SHAPE], ['--schedule']),
        (['simulate', '--schedule', 'zb-v', '--file', 'x', *SHAPE], ['--file', 'not allowed']),
        (['simulate', '--schedule', 'zb-v', '--pp', '0', '--microbatches', '8'], ["'0'", 'from 1']),
        (['simulate', '--schedule', 'zb-v', '--pp', '2.5', '--microbatches', '8'], ["'2.5'"]),
        (['simulate', '--schedule', 'zb-v', '--pp', '1', '--microbatches', '8'], ['not 1']),
        (['simulate', '--schedule', 'zb-v', '--pp', '4', '--microbatches', '-1'], ["'-1'"]),
        (['simulate', '--schedule', '1f1b', '--pp', '4000', '--microbatches', '9' * 9], ['less']),
        (['show', '--schedule', 'zb-v', '--pp', '5000', '--microbatches', '1'], ['5000', '4096']),
        (['lst'], ["'lst'", "did you mean 'list'"]),
        (['--schedule', 'zb-v'], ["'--schedule'", 'zbpp show --schedule']),
        (['compare', *SHAPE, '--schedules', ''], ["''", 'names']),
        (['compare', *SHAPE, '--schedules', 'zb-v,,1f1b'], ["'zb-v,,1f1b'", 'names']),
        (['show', *ZB_V, '--width', '-5'], ["'-5'", 'from 0']),
        (['simulate', *ZB_V, '--times', '0,0,0'], ["'0,0,0'", 'above 0']),
        (['simulate', *ZB_V, '--times', '1e308,1,1'], ["'1e308'", 'up to']),
        (['simulate', '--schedule', 'dualpipe-v', *SHAPE, '--together', '5'], ["'5'", 'up to 2']),
        (['simulate', '--schedule', 'dualpipe-v', *SHAPE, '--together', '0'], ["'0'", 'above 0']),
        (['simulate', '--schedule', 'stp', *SHAPE, '--together', 'FB=.9,BB=.8'], ['FB=0.9,FF=']),
        (['simulate', '--schedule', 'stp', *SHAPE, '--together', 'FF='], ["''", 'from 0 up']),
        (['plan', *SHAPE, '--seconds', '0'], ["'0'", 'above 0']),
        (['partition', os.devnull, *SHAPE], [os.devnull, 'empty']),
        (['simulate', *ZB_V, '--vpp', '3'], ['3 chunks']),
        (['simulate', *ZB_V, '--times', '1,2'], ["'1,2'", 'three']),
        (['simulate', *ZB_V, '--times', '1,2,x'], ["'x'"]),
        (['simulate', *ZB_V, '--times', '1,2,-3'], ["'-3'", 'from 0']),
        (['simulate', *ZB_V, '--times', '1,nan,3'], ["'nan'"]),
        (['simulate', *ZB_V, '--times', 'none.json'], ["'none.json'", '"F"']),
        (['simulate', *ZB_V, '--comm', 'fast'], ["'fast'"]),
        (['simulate', *ZB_V, '--memory-limit', 'inf'], ["'inf'"]),
        (['simulate', *ZB_V, '--memory-limit', '2'], ['limit of 2', 'raise']),
        (['simulate', '--file', 'none.json', '--times', '1,1,1'], ['none.json', 'No such file']),
        (['check', 'none.json'], ['none.json', 'No such file']),
        (['check', '.'], ['directory']),
        (['compare', *SHAPE, '--schedules', '1f1b,zb-w'], ["'zb-w'"]),
        (['compare', *SHAPE, '-o', 'all.gif'], ['all.gif', '.html']),
        (['compare', *SHAPE, '--memory-limit', '0.1'], ['no schedule fits', 'limit of 0.1']),
        (['plan', '--pp', '4'], ['--microbatches']),
        (['plan', *SHAPE, '--placements', 'loop,w'], ["'w'", 'loop, v, wave']),
        (['plan', *SHAPE, '--placements', 'v', '--vpp', '3,4'], ['[3, 4]', 'v takes 2']),
        (['plan', *SHAPE, '--vpp', '2,0'], ["'0'"]),
        (['plan', *SHAPE, '--objective', 'speed'], ["'speed'", 'window']),
        (['plan', *SHAPE, '--seconds', '-1'], ["'-1'"]),
        (['plan', *SHAPE, '--memory-limit', '0.5'], ['limit 0.5', 'at least 1']),
        (['plan', *SHAPE, '--frontier', '0.5,2'], ['limit 0.5', 'at least 1']),
        (['plan', *SHAPE, '--frontier', '2,x'], ["'x'"]),
        (['plan', *SHAPE, '--frontier', '2', '--memory-limit', '2'], ['leave --memory-limit out']),
        (['plan', *SHAPE, '-o', 'a.txt'], ['a.txt', '.json for the plan']),
        (['plan', *SHAPE, '--num-layers', '1'], ['--num-layers 1', 'use fewer ranks or chunks']),
        (['plan', *SHAPE, '--frontier', '2', '-o', 'b/a.png'], ['there is no folder b']),
        (['plan', *SHAPE, '--frontier', '2', '-o', 'a.txt'], ['a.txt', '.png, .svg or .pdf']),
        (['plan', *SHAPE, '--cache', 'here', '--no-cache'], ['not allowed']),
        (['plan', *SHAPE, '--seed', 'x'], ["'x'"]),
        (['convert', *ZB_V, '--to', 'gif', '-o', 'x'], ["'gif'", 'torch-csv']),
        (['convert', *ZB_V, '--to', 'json'], ['-o']),
        (['convert', *ZB_V, '-o', 'x.gif'], ['x.gif', '.html', '--to']),
        (['convert', *ZB_V, '--to', 'json', '-o', 'x.html'], ['x.html', '--to json', '.json']),
        (['convert', *ZB_V, '--to', 'json', '-o', 'none/x.json'], ['none/x.json', 'another path']),
    ],
)
def test_bad_input_takes_one_line(refusal, argv: list[str], said: list[str]) -> None:
    line = refusal(*argv)
    assert all(part in line for part in said), line


@pytest.mark.parametrize(
    ('times', 'said'),
    [
        ({'F': [1, 1, 1], 'B': [1, 1, 1], 'W': [1, 1, 1]}, '3 stages'),
        ({'F': [1, 1], 'B': [1, 1], 'W': [1]}, 'one entry per stage'),
        ({'F': [], 'B': [], 'W': []}, 'one entry per stage'),
        ({'F': [1, 1], 'B': [1, 1]}, 'one entry per stage'),
        ({'F': [1, 1], 'B': [1, -1], 'W': [1, 1]}, 'one entry per stage'),
        ({'F': 1, 'B': 1, 'W': 1}, 'one entry per stage'),
    ],
)
def test_bad_times_files(refusal, tmp_path: Path, times: dict, said: str) -> None:
    file = times_file(tmp_path, **times)
    line = refusal(
        'simulate', '--schedule', '1f1b', '--pp', 2, '--microbatches', 2, '--times', file
    )
    assert said in line


def test_file_with_another_shape(refusal, tmp_path: Path) -> None:
    file = tmp_path / 'a.json'
    file.write_text(build('zb-v', 2, 4).to_json())
    assert '--pp 4' in refusal('simulate', '--file', file, '--pp', 4)
    assert '--microbatches 5' in refusal('show', '--file', file, '--microbatches', 5)
    times = times_file(tmp_path, F=[1], B=[1], W=[1])
    assert 'has 1 stages' in refusal('simulate', '--file', file, '--times', times)


def test_garbage_files(refusal, tmp_path: Path) -> None:
    file = tmp_path / 'garbage'
    for content in (
        b'',
        b'\x00\xff' * 99,
        b'{"a": ',
        b'{}',
        b'[]',
        b'[{"a": 1',
        b'0F0,zebra',
        b'{"schedule": 3}',
    ):
        file.write_bytes(content)
        said = refusal('check', file)
        assert str(file) in said and 'codec' not in said
    assert 'not text: give a schedule or a plan' in refuse_bytes(refusal, file, b'\xff\xfe')
    assert 'torch' not in refuse_bytes(refusal, file, b'[{"format": ')
    nine = build('1f1b', 2, 2).to_json().replace('schedule/2', 'schedule/9')
    assert "'megatron_zbpp.schedule/9' is not one of" in refuse_bytes(refusal, file, nine.encode())


def refuse_bytes(refusal, file: Path, content: bytes) -> str:
    """What is said of a file of `content`."""
    file.write_bytes(content)
    return refusal('check', file)


# The command itself


def test_notes_go_to_stderr(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    file = tmp_path / 'lowered.csv'
    file.write_text('0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n')
    assert main(['check', str(file), '--json']) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)['passes'] == 4
    assert said.err == 'zbpp: note: lowered: dropped 4 sends, receives and the like\n'


def test_help_teaches(capsys: pytest.CaptureFixture) -> None:
    for argv in ([], *([name] for name, *_ in _COMMANDS)):
        with pytest.raises(SystemExit) as stop:
            main([*argv, '--help'])
        assert stop.value.code == 0
        text = capsys.readouterr().out
        assert f'zbpp {" ".join(argv)}' in text.split('examples:')[1]
        timed = {*argv} & {'simulate', 'plan', 'convert', 'show', 'compare', 'bubbles', 'freeze'}
        assert ('Times are of one full rank' in text) == bool(timed), 'where there are times'


def test_needs_neither_torch_nor_matplotlib() -> None:
    code = (
        "import sys; from megatron_zbpp.cli import main; main(['list', '--json']); "
        "sys.exit(any(m in sys.modules for m in ('torch', 'megatron', 'matplotlib', 'numpy')))"
    )
    subprocess.run([sys.executable, '-c', code], check=True, stdout=subprocess.DEVNULL)


def test_closed_pipe_is_no_error() -> None:
    command = f'"{sys.executable}" -m megatron_zbpp.cli show --schedule zb-v --pp 8 --microbatches'
    done = subprocess.run(
        ['bash', '-c', f'{command} 200 --width 0 | head -c 10'], capture_output=True, text=True
    )
    assert done.stdout == 'zb-v: 8 ra' and done.stderr == ''


@pytest.mark.parametrize('name', names(plain=True))
def test_every_schedule_is_drawn_and_checked(zbpp, tmp_path: Path, name: str) -> None:
    file = tmp_path / 'schedule.csv'
    zbpp('convert', '--schedule', name, *SHAPE, '--to', 'torch-csv', '-o', file)
    check(load(file))
    assert zbpp('show', '--file', file).count('\nrank ') == 4


def test_a_plan_has_the_fields_that_are_taken(zbpp) -> None:
    """What `--pipeline-schedule-file` reads of it, and no other."""
    printed = zbpp('plan', '--pp', 2, '--microbatches', 2, '--seconds', 0.1, '--json')
    of_partitions = {'cuts', 'device_order', 'layout', 'layers', 'devices'}
    of_shards = {'share', 'ways'}
    others = {'timeline', 'spans'} | of_partitions | of_shards
    assert set(printed) == set(formats.PLAN_FIELDS) - others
    shown = zbpp('show', *ZB_V, '--json')
    assert formats.from_json(json.dumps(shown)).name == 'zb-v'
    assert formats.from_json(json.dumps(printed)).num_ranks == 2
    with pytest.raises(ValueError, match="field 'memory_limt' is not known"):
        formats.from_json(json.dumps({**printed, 'memory_limt': 3}))


def test_without_a_command(capsys: pytest.CaptureFixture) -> None:
    """What a newcomer needs comes first, and examples are few."""
    assert main([]) == 0
    text = capsys.readouterr().out
    listed = re.findall(r'^    (\w+)  ', text, re.M)
    assert listed == [name for name, *_ in _COMMANDS] and listed[:3] == [
        'doctor',
        'bench',
        'advise',
    ]
    headings = re.findall(r'^  (\w[\w, ]+):$', text, re.M)
    assert headings[0] == 'your training job' and len(headings) == 4
    assert 3 <= len(re.findall('^  zbpp ', text, re.M)) <= 6
    assert 'zbpp COMMAND --help' in text
    with pytest.raises(SystemExit, match='0'):
        main(['--version'])
    assert capsys.readouterr().out.startswith('zbpp 0.')


def test_a_plan_for_a_model(zbpp, tmp_path: Path) -> None:
    """It has no more stages than the model has layers, and is saved where -o says."""
    case = ['plan', '--pp', 4, '--microbatches', 8, '--seconds', 0.5, '--no-cache']
    for layers, most in ((4, 4), (8, 8), (15, 8), (16, 16)):
        file = tmp_path / f'{layers}.json'
        printed = zbpp(*case, '--num-layers', layers, '-o', file)
        stages = load(file).num_stages
        assert stages <= most and f'needs {stages} layers or more' in printed
    picture = tmp_path / 'plan.svg'
    zbpp(*case, '-o', picture)
    assert picture.read_text().startswith('<svg')


def test_idle_time_of_all_ranks(zbpp) -> None:
    """Where ranks differ, the busiest one's bubble hides what the others lose."""
    found = zbpp('simulate', *ZB_V, '--json')
    timeline = simulate(build('zb-v', 4, 8), Costs.uniform(build('zb-v', 4, 8).placement))
    work = sum(timeline.busy(rank) for rank in range(4))
    assert found['idle_all_ranks'] == pytest.approx(1 - work / (4 * timeline.makespan))
    assert zbpp('simulate', *ZB_V, '--against', 'interleaved').splitlines()[1:3] == [
        'makespan 25.5, 10.5% less time than interleaved',
        'idle GPU time 5.88%: schedule 5.88%',
    ]


def test_compare_leaves_out_what_does_not_fit(zbpp) -> None:
    """With a note, whether it was named or not; a misspelt name is an error."""
    some = ['--schedules', 'zb-v,1f1b', '--pp', 4, '--microbatches', 8]
    assert 'without 1f1b: 1f1b cannot have 2 chunks per rank' in zbpp('compare', *some, '--vpp', 2)
    assert main(['compare', '--schedules', 'zb-v,zb-w', '--pp', '4', '--microbatches', '8']) == 2


def test_an_interrupted_plan(monkeypatch, capsys: pytest.CaptureFixture, cache_folder) -> None:
    """Ctrl-C ends with the best by then, which is not kept."""

    @contextlib.contextmanager
    def interrupted(*_: object):
        def done(share: float) -> None:
            raise KeyboardInterrupt

        yield done

    monkeypatch.setattr(printing, 'progress', interrupted)
    shape = ['--pp', '8', '--microbatches', '24', '--times', '1,1.2,0.8', '--memory-limit', '6']
    assert main(['plan', *shape, '--seconds', '60', '--json']) == 130
    printed = capsys.readouterr()
    assert printed.err == 'zbpp: interrupted: this is the best plan by then\n'
    check(formats.from_json(printed.out), memory_limit=None)
    assert not cache_folder.exists()


def test_an_interrupted_frontier(monkeypatch, capsys: pytest.CaptureFixture) -> None:
    """Ctrl-C in the second of three limits keeps the first, and the best of the second by then."""
    original, limits = frontier.planned, []

    def planned(*args: object, **inputs: object):
        found = original(*args, **inputs)
        limits.append(inputs['memory_limit'])
        if len(limits) == 2:
            raise PlanningInterrupted(found[0])
        return found

    monkeypatch.setattr(frontier, 'planned', planned)
    argv = ['plan', '--pp', '2', '--microbatches', '4', '--frontier', '1,2,3', '--seconds', '0.3']
    assert main([*argv, '--json']) == 130
    printed = capsys.readouterr()
    assert printed.err == 'zbpp: interrupted: these are the best plans by then\n'
    assert [each['memory_limit'] for each in json.loads(printed.out)['frontier']] == [1, 2]


def test_an_interrupted_solver(monkeypatch, capsys: pytest.CaptureFixture) -> None:
    """Ctrl-C while the exact solver runs, which would take a minute, ends all at once."""
    pytest.importorskip('ortools')
    original = plans.cp_sat.solve

    def solve(*args: object, **options: object):
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        return original(*args, **options)

    monkeypatch.setattr(plans.cp_sat, 'solve', solve)
    # what runs in the background of a shell ignores it
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    case = ['--pp', '4', '--microbatches', '8', '--vpp', '2', '--times', '10,12,8', '--no-cache']
    start = time.monotonic()
    try:
        assert main(['plan', *case, '--memory-limit', '2', '--seconds', '100', '--json']) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - start < 50
    check(formats.from_json(capsys.readouterr().out), memory_limit=None)


def test_cells_are_simulated(zbpp, refusal, tmp_path: Path) -> None:
    """By the flag or by the file; the page says from where on they pay."""
    shape = ('--pp', 8, '--microbatches', 24)
    least = zbpp('simulate', '--schedule', 'zb-v', *shape, '--json')['makespan']
    for share, pays in ((0.94, True), (0.95, False)):
        facts = zbpp('simulate', '--schedule', 'dualpipe-v', *shape, '--together', share, '--json')
        assert (facts['makespan'] < least) == pays
    assert '`--together`' in (page := (ROOT / 'docs' / 'choosing.md').read_text())
    assert 'they pay from 0.94 down' in page
    file = tmp_path / 'costs.json'
    file.write_text(json.dumps({kind: [1 / 2] * 16 for kind in 'FBW'} | {'together': 0.95}))
    of_file = zbpp('simulate', '--schedule', 'dualpipe-v', *shape, '--times', file, '--json')
    assert of_file['makespan'] == pytest.approx(facts['makespan'])
    twice = ('--schedule', 'dualpipe-v', *shape, '--times', file, '--together', 0.9)
    assert '--together 0.9, but the file of --times has 0.95' in refusal('simulate', *twice)
    line = refusal('simulate', '--schedule', 'zb-v', *shape, '--together', 0.9)
    assert 'zb-v has no forwards and backwards that run as one: take dualpipe-v' in line
    assert 'zb-v' in zbpp('compare', '--schedules', 'zb-v,dualpipe-v', *shape, '--together', 0.9)


def test_pairs_are_simulated_kind_by_kind(zbpp, refusal, tmp_path: Path) -> None:
    """As the page has it; by the flag as by the file."""
    shape = ('--pp', 8, '--microbatches', 24)
    page = (ROOT / 'docs' / 'choosing.md').read_text()

    def makespan(*given) -> float:
        return zbpp('simulate', '--schedule', 'stp', *shape, *given, '--json')['makespan']

    assert makespan() == makespan('--together', 1) == 75.5
    assert makespan('--together', 'FB=0.9') == pytest.approx(72.6)
    assert '75.5 where pairs hide nothing' in page and '72.6 where' in page
    assert zbpp('simulate', '--schedule', 'zb-v', *shape, '--json')['window'] == 72
    file, times = tmp_path / 'costs.json', {kind: [1 / 2] * 16 for kind in 'FBW'}
    file.write_text(json.dumps({**times, 'together': 0.5, 'pairs': {'FF': 1.5, 'FW': 1.5}}))
    of_file = makespan('--times', file)
    assert of_file == pytest.approx(makespan('--together', 'FB=0.5,FF=1.5,FW=1.5'))
    assert of_file > makespan('--together', 'FB=0.5')
    twice = ('--schedule', 'stp', *shape, '--times', file, '--together', 0.9)
    assert '--together 0.9, but the file of --times has 0.5: drop one' in refusal(
        'simulate', *twice
    )


def test_offload_is_simulated(zbpp) -> None:
    """The rows of the page: less on the device, the rest on the host."""
    page = (ROOT / 'docs' / 'does-not-fit.md').read_text()
    found = re.findall(r'^\| `([\w-]+)`.*? \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$', page, re.M)
    assert len(found) == 6
    shape = ('--pp', 8, '--microbatches', 24)
    for name, *expected in found:
        for flags, most in zip(([], ['--offload', 'half'], ['--offload', 'all']), expected):  # noqa: B905
            facts = zbpp('simulate', '--schedule', name, *shape, *flags, '--json')
            assert f'{max(facts["peak_activations"]):g}' == most, (name, flags)
    text = zbpp('simulate', '--schedule', 'po', *shape, '--offload', 'half', '--copy-ratio', 0.5)
    assert 'on the host' in text and text.startswith('po + offload half: 8 ranks')


def test_recomputation_is_simulated(zbpp) -> None:
    """GPipe as its paper has it: m (F + R + B + W) behind its bubble, one activation at once."""
    shape = ['--schedule', 'gpipe', '--pp', 4, '--microbatches', 8]
    plain = zbpp('simulate', *shape, '--json')
    again = zbpp('simulate', *shape, '--recompute', 'all', '--json')
    assert again['makespan'] == plain['makespan'] + 8
    assert max(plain['peak_activations']) == 8 and max(again['peak_activations']) == 1
    shape = ['--schedule', 'interleaved', '--pp', 8, '--vpp', 4, '--microbatches', 24]
    both = zbpp('simulate', *shape, '--recompute', 1, '--offload', 'all', '--json')
    for flags in (['--recompute', 1], ['--offload', 'all']):
        one = zbpp('simulate', *shape, *flags, '--json')
        assert max(both['peak_activations']) < max(one['peak_activations'])


def test_copies_of_a_schedule_take_time(zbpp) -> None:
    shape = ['--schedule', 'po-f', '--pp', 4, '--microbatches', 8]
    fast, slow = (
        zbpp('simulate', *shape, '--copy-ratio', k, '--json')['makespan'] for k in (0.5, 4)
    )
    assert fast < slow
    assert zbpp('show', *shape, '--width', 0).count('copies') == 4


def test_a_copy_ratio_that_nothing_asks_for(tmp_path, capsys) -> None:
    """Refused, not ignored; a file may have told the times already."""
    file = tmp_path / 'times.json'
    file.write_text('{"F": [1, 1], "B": [1, 1], "W": [1, 1], "times": {"O": [1, 1], "L": [1, 1]}}')
    sizes = ['--pp', '2', '--microbatches', '4', '--copy-ratio', '2']
    plan = ['plan', *sizes, '--memory-limit', '1', '--no-cache', '--seconds', '0.1']
    for words, said in (
        (['simulate', '--schedule', '1f1b', *sizes], '1f1b copies nothing: give --offload'),
        ([*plan, '--actions', 'recompute'], 'nothing is copied: give --actions offload or evict'),
        ([*plan, '--times', str(file), '--actions', 'offload'], '--times has its own: drop one'),
    ):
        assert main(words) == 2
        assert said in capsys.readouterr().err


# Slices of sequences


def test_slices_of_any_schedule(zbpp, tmp_path) -> None:
    """Simulated, written, checked and read: each command knows how many."""
    file, shape = tmp_path / 'sliced.json', ('--pp', 8, '--microbatches', 4)
    found = zbpp('simulate', '--schedule', 'seq-zb-v', *shape, '--slices', 4, '--json')
    assert (found['name'], found['slices']) == ('seq-zb-v', 4)
    assert found['makespan'] == 12.875 and max(found['peak_activations']) == 2.75
    again = zbpp('simulate', '--schedule', 'zb-v', *shape, '--slices', 4, '--json')
    assert again['name'] == 'zb-v + slices 4' and again['makespan'] == found['makespan']
    zbpp('convert', '--schedule', 'zb-v', *shape, '--slices', 4, '--to', 'json', '-o', file)
    assert '4 microbatches of 4 slices' in zbpp('check', file, '--slices', 4)
    assert '7F0.1' in zbpp('show', '--file', file, '--order', '--width', 0)
    rows = zbpp('compare', *shape, '--slices', 4, '--schedules', '1f1b,zb-v,po-h', '--json')
    found = [row['name'] for row in rows['schedules']]
    assert found == ['zb-v + slices 4', 'po-h + slices 4', '1f1b + slices 4']


@pytest.mark.parametrize(
    ('words', 'says'),
    [
        ('check FILE --slices 3', '--slices 3, but FILE has 2: leave --slices out'),
        ('show --file FILE --slices 3', '--slices 3, but FILE has 2: leave --slices out'),
        ('show --schedule 1f1b --pp 2 --microbatches 2 --slices 0', "'0' is not possible"),
        (
            'simulate --schedule dualpipe-v --pp 2 --microbatches 4 --slices 2 --together 0.8',
            'passes of slices run one by one',
        ),
    ],
)
def test_what_slices_do_not_go_with(refusal, zbpp, tmp_path, words, says) -> None:
    file = tmp_path / 'sliced.json'
    schedule = ('--schedule', '1f1b', '--pp', 2, '--microbatches', 2, '--slices', 2)
    zbpp('convert', *schedule, '--to', 'json', '-o', file)
    said = refusal(*(str(file) if word == 'FILE' else word for word in words.split()))
    assert says in said.replace(str(file), 'FILE')


LONG = ('--seq-length', 131072, '--times', '1,1.9,0.4')


def test_slices_that_take_equal_times(zbpp, tmp_path) -> None:
    """A cell of the specification's table; written, read and simulated they take the same."""
    file, shape = tmp_path / 'own.json', ('--pp', 8, '--microbatches', 16)
    asked = ('--schedule', 'seq1f1b', *shape, *LONG, '--attention', 0.6)
    equal = zbpp('simulate', *asked, '--slices', 4, '--json')
    found = zbpp('simulate', *asked, '--slices', 'balanced:4', '--json')
    rates = [each['bubble_rate_makespan'] for each in (equal, found)]
    assert rates == pytest.approx([0.379, 0.112], abs=0.001)
    assert max(found['peak_activations']) == pytest.approx(3.05, abs=0.005)
    zbpp('convert', *asked, '--slices', 'balanced:4', '--to', 'json', '-o', file)
    given = ('--slices', '52864,31744,25088,21376')
    for source in (('--file', file), (*asked[:6], *given)):
        again = zbpp('simulate', *source, *LONG, '--attention', 0.6, '--json')
        assert again['makespan'] == found['makespan']


def test_attention_as_measured(zbpp) -> None:
    """F of 8 + L + L^2 / 8 thousand tokens: at L = 64, 8 / 584 is fixed and 512 / 584 of pairs."""
    shape = ('--schedule', 'zb-h1', '--pp', 2, '--microbatches', 2, '--slices', 4, '--json')
    measured = ','.join(f'{k}000={8 + k + k * k / 8}' for k in (8, 16, 32, 64))
    told = zbpp('simulate', *shape, '--attention', measured, '--seq-length', 64000)['makespan']
    share = zbpp('simulate', *shape, '--attention', 512 / 584)['makespan']
    # each slice of the twelve passes on a rank has what is fixed again
    assert 1 < told / share < 1.1
    two = zbpp('simulate', *shape, '--attention', '8000=16,64000=576', '--seq-length', 64000)
    assert two['makespan'] == pytest.approx(
        zbpp('simulate', *shape, '--attention', 8 / 9)['makespan']
    )


def test_a_plan_of_as_many_slices_as_pay(zbpp, tmp_path) -> None:
    file, shape = tmp_path / 'plan.json', ('--pp', 4, '--vpp', 1, '--microbatches', 2, *LONG)
    asked = (*shape, '--attention', 0.6, '--seconds', 0.2, '--no-cache')
    words = zbpp('plan', *asked, '--slices', 'auto', '--least-slice', 16384, '-o', file)
    found = json.loads(file.read_text())
    assert [len(each['sizes']) for each in found['slice_counts']] == [1, 2, 4, 8]
    least = [each['value'] for each in found['slice_counts']]
    assert least == sorted(least, reverse=True) and found['makespan'] <= least[-1]
    assert found['slices'] == 8 and sum(found['slice_sizes']) == 131072
    assert f'in slices: {1 - found["makespan"] / least[0]:.1%} less than the best of whole' in words
    assert sizes_of(load(file).graph) == tuple(found['slice_sizes'])
    words = zbpp('plan', *asked, '--slices', 'auto', '--least-slice', 131072)
    assert 'whole sequences: more slices gain less than 1 %' in words
    # what each pass takes by itself eats up what short slices gain
    fixed = ('--attention', '32768=1.3,65536=1.6,131072=2.2', '--slices', 'auto', '--json')
    found = zbpp('plan', *asked, *fixed, '--least-slice', 16384)
    assert found['slices'] < len(found['slice_counts'][-1]['sizes']) == 8


def test_the_share_of_attention_by_shape(zbpp) -> None:
    """Of a layer with 12 h^2 weights, s tokens: s over s + 12 h, pairs halved by the mask."""
    shape = ('--num-layers', 2, '--hidden', 512, '--heads', 8, '--vocab', 1000, '--tflops', 100)
    words = zbpp('profile', '--model', 'gpt', *shape, '--seq', 6144)
    assert 'attention over pairs of tokens: 0.5 of F' in words.replace('\n', ' ')


@pytest.mark.parametrize(
    ('words', 'says'),
    [
        ('plan --slices auto', '--slices auto needs --seq-length'),
        ('plan --slices balanced:3', '--slices balanced:3 needs --seq-length'),
        ('plan --slices 3:4', 'or balanced:4, or auto'),
        ('plan --slices 3 --attention 8=2,9=3', '--attention by lengths needs --seq-length'),
        ('plan --slices 3 --attention 8=2 --seq-length 8', 'by two lengths or more'),
        ('plan --slices 3 --attention 1.5', "'1.5' is not possible"),
        (
            'plan --slices 8,8 --seq-length 20',
            '--slices of 16 tokens in all, but --seq-length is 20',
        ),
        ('plan --slices balanced:9 --seq-length 1024', '9 are too many for balanced slices'),
        ('plan --slices auto --frontier 2,3', '--slices auto is for one memory limit'),
        ('simulate --schedule zb-v --slices auto', 'give how many, or balanced:N'),
        ('plan --slices auto:2048', 'give auto, and --least-slice TOKENS'),
    ],
)
def test_sizes_of_slices_that_are_refused(refusal, words, says) -> None:
    command, *others = words.split()
    assert says in refusal(command, '--pp', 2, '--microbatches', 2, *others)


def test_who_does_not_suit_slices_is_made_with_a_note(capsys) -> None:
    shape = ['--pp', '8', '--microbatches', '8', '--slices', '8']
    assert main(['simulate', '--schedule', 'v-half', *shape]) == 0
    assert 'note: v-half does not suit slices' in capsys.readouterr().err


def test_a_plan_of_slices(zbpp, tmp_path) -> None:
    """Its file is checked like any other, and no named schedule of as many slices is better."""
    file, shape = tmp_path / 'plan.json', ('--pp', 4, '--microbatches', 2)
    found = zbpp('plan', *shape, '--slices', 4, '--seconds', 1, '--no-cache', '-o', file, '--json')
    assert found['slices'] == 4 and found['best_named']['makespan'] >= found['makespan']
    assert zbpp('check', file, '--json')['slices'] == 4
