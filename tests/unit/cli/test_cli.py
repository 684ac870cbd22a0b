"""The `zbpp` command: what it prints, what it writes, how it refuses."""

import contextlib
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

from megatron_zbpp import Costs, build, check, load, simulate
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.cli import printing
from megatron_zbpp.cli.parser import _COMMANDS
from megatron_zbpp.ir import formats
from megatron_zbpp.ir.formats import to_torch_csv
from megatron_zbpp.ir.timeline import MEANING
from megatron_zbpp.planner import plan_requests, plans
from megatron_zbpp.planner.plans import PlanningInterrupted
from megatron_zbpp.schedules import names, own_families
from megatron_zbpp.schedules.registry import ASYNCHRONOUS, TIERS
from megatron_zbpp.techniques.slices.graph import sizes_of

SHAPE = '--pp 4 --microbatches 8'
ZB_V = f'--schedule zb-v {SHAPE}'
UNEVEN = '{"F": [1, 1, 1, 2], "B": [1, 1, 1, 3], "W": [1, 1, 1, 1.5]}'


def test_list_tells_gains_of_a_size(zbpp):
    """As `compare` does, in its words; what cannot be had of that size says why."""
    listed = zbpp('list --json')
    assert (listed['ranks'], listed['microbatches'], listed['against']) == (4, 8, '1f1b')
    gains = {entry['name']: entry['gain'] for entry in listed['schedules']}
    assert gains['zb-v'] == pytest.approx(1 - 25.5 / 33) and gains['1f1b'] == 0
    small = '--pp 3 --microbatches 5 --against interleaved'
    asked = {entry['name']: entry for entry in zbpp(f'list {small} --json')['schedules']}
    compared = zbpp(f'compare {small} --schedules {",".join(asked)} --json')
    found = {each['name']: each['gain'] for each in compared['schedules']}
    assert {name: each['gain'] for name, each in asked.items() if name in found} == found
    without = {name: each['without'] for name, each in asked.items() if each['without']}
    assert without == {each['name']: each['reason'] for each in compared['skipped']}
    assert without and {name for name, each in asked.items() if each['gain'] is None} == {*without}
    assert zbpp(f'list {small} --table csv').count(f'{found["zb-v"]:.1%}')


def test_list_begins_with_what_most_take(zbpp):
    """On one screen; `--all`, `--json` and `--table` have every one."""
    every, few = own_families(every=True), zbpp('list').splitlines()
    assert {*names(), 'seq1f1b', 'seq-zb-v'} < {family.name for family in every}
    named = [line.split()[0] for line in few if not line.startswith((' ', 'gain:', 'and '))]
    assert len(few) <= 45 and len(named) == 8
    assert {*named} <= _chosen()
    assert named == [family.name for family in every if family.tier == 'recommended']
    assert f'and {len(every) - 8} more: zbpp list --all' in few
    text = ' '.join(zbpp('list --all').split())
    assert all(family.summary in text for family in every) and ' more: ' not in text
    assert len(zbpp('list --table csv').splitlines()) == len(every) + 1
    listed = zbpp('list --json')['schedules']
    assert [entry['name'] for entry in listed] == [family.name for family in every]
    assert listed[0].keys() >= {'aliases', 'summary', 'bubble', 'memory', 'source', 'when'}
    assert {entry['tier'] for entry in listed} == {*TIERS}


def _chosen() -> set[str]:
    """Names in the README's table of which schedule when, or Megatron's own."""
    table = pages.README.read_text().partition('## Which schedule when')[2].partition('## ')[0]
    return {*re.findall(r'`([\w-]+)`', table), '1f1b', 'interleaved'}


@pytest.mark.parametrize('width', [40, 80, 120, 0])
@pytest.mark.parametrize('name', ['1f1b', 'zb-v', 'seq-zb-v', 'po'])
def test_the_legend_has_what_the_drawing_has(zbpp, name, width):
    """Each form of label: with its stage, with its microbatch, or a letter."""
    text = zbpp(f'show --schedule {name} {SHAPE} --width {width}')
    drawn = ''.join(re.findall(r'^(?:rank \d+|copies) (.*)', text, re.M))
    legend = ' '.join(text.partition('· idle; ')[2].partition('makespan')[0].split())
    examples = re.findall(r'(\S+) is [A-Z]+ (stage|microbatch)', legend)
    assert all(label in drawn for label, _ in examples), (legend, drawn)
    labels = re.findall(r'(\d*)[A-Z]+(\d*)', drawn.replace('…', ''))
    forms = {'stage' if stage else 'microbatch' if m else 'letter' for stage, m in labels}
    told = {form for _, form in examples} | ({'letter'} if 'a letter alone' in legend else set())
    assert told == forms, (legend, drawn)


def test_simulate_gives_the_simulators_numbers(zbpp):
    found = zbpp(f'simulate {ZB_V} --times 10,12,8 --comm 1 --json')
    schedule = build('zb-v', 4, 8)
    costs = Costs.uniform(schedule.placement, 10, 12, 8, comm=1)
    line = simulate(schedule, costs)
    wanted = {'makespan': line.makespan, 'window': max(line.windows)}
    wanted |= dict.fromkeys(('idle_busiest_rank', 'bubble_rate_makespan'), line.bubble_makespan)
    wanted |= dict.fromkeys(('bubble', 'bubble_rate_window'), line.bubble)
    wanted |= {'idle_all_ranks': line.idle_all_ranks, 'peak_activations': [*peak(schedule, costs)]}
    assert {name: found[name] for name in wanted} == wanted
    first, *_, last = found['critical_path']
    assert first['ran'] == '0F0' and last['end'] == line.makespan


def test_copies_of_the_weights_are_counted_alike(zbpp):
    """By list, compare and simulate: of the stage that has most; none at sizes it cannot take."""
    sizes = '--pp 4 --microbatches 2'
    listed = {each['name']: each['copies'] for each in zbpp(f'list --json {sizes}')['schedules']}
    assert (listed['chimera'], listed['zb-v']) == (2, 1)
    assert sum(copies == 2 for copies in listed.values()) > 6
    counted = {name: listed[name] for name in ASYNCHRONOUS}
    assert counted.pop('pipedream-2bw') is None  # fewer than p-1
    compared = zbpp(f'compare --schedules {",".join(counted)} {sizes} --json')['schedules']
    assert {each['name']: each['copies'] for each in compared} == counted
    for name, most in counted.items():
        found = zbpp(f'simulate --schedule {name} {sizes} --json')
        assert found['copies'] == max(found['weight_copies']) == most
    assert (counted['pipedream'], counted['paci'], counted['pipemare']) == (3, 1, 2)
    text = zbpp('list --table csv')
    (line,) = [each for each in text.splitlines() if each.startswith('pipedream-2bw,')]
    assert line.split(',')[4] == '2'


def test_times_of_stages_fix_the_chunks(zbpp):
    Path('times.json').write_text(UNEVEN)
    shape = '--pp 2 --microbatches 6 --times times.json --json'
    found = zbpp(f'simulate --schedule zb-v {shape}')
    schedule = build('zb-v', 2, 6)
    costs = Costs.of((1, 1, 1, 2), (1, 1, 1, 3), (1, 1, 1, 1.5), activation=(0.5,) * 4)
    assert found['makespan'] == simulate(schedule, costs).makespan
    assert found['peak_activations'] == list(peak(schedule, costs))
    compared = zbpp(f'compare {shape}')
    assert {entry['stages'] for entry in compared['schedules']} == {4}
    assert '1f1b' in {entry['name'] for entry in compared['skipped']}


def test_a_plan_that_is_no_better_than_a_named_schedule_says_so(zbpp):
    text = zbpp(f'plan {SHAPE} --objective window --seconds 1')
    assert text.startswith('planned: 4 ranks')
    assert 'window 24, bubble 0.00%' in text
    assert 'lower bound of the window 24, gap 0.00%' in text
    assert 'no better than a named schedule: zb-h2 has the same window' in text


def test_plans_are_kept_on_disk(zbpp, tmp_path):
    case = 'plan --pp 2 --microbatches 3 --seconds 0.2'
    first, again = zbpp(f'{case} --json'), zbpp(f'{case} --json')
    assert (first.pop('cached'), again.pop('cached')) == (False, True)
    kept = tmp_path / 'cache' / 'megatron_zbpp' / 'plans'
    assert again == first and len(list(kept.iterdir())) == 1
    assert 'planned before' in zbpp(case)
    for more in ('--no-cache', '--cache other', '--seed 1'):
        assert zbpp(f'{case} {more} --json')['cached'] is False
    assert len(list(kept.iterdir())) == 2


def test_plan_frontier(zbpp):
    case = 'plan --pp 4 --microbatches 6 --times 1,1.2,0.8 --seconds 0.3 --frontier 4,2,3'
    points = zbpp(f'{case} --json')['frontier']
    assert [point['memory_limit'] for point in points] == [2, 3, 4]
    spans = [point['makespan'] for point in points]
    assert spans == sorted(spans, reverse=True) and spans[0] > spans[-1]
    assert all(max(point['peak_activations']) <= point['memory_limit'] for point in points)
    *table, meaning, _ = zbpp(case).splitlines()
    assert meaning.startswith('gain: time saved against 1f1b; idle: ')
    assert [line.split()[0] for line in table] == ['limit', '2', '3', '4']
    zbpp(f'plan {SHAPE} --seconds 0.3 --frontier 2,4 -o frontier.svg')
    drawn = Path('frontier.svg').read_text()
    assert '<svg' in drawn and 'planned' in drawn
    facts = 'p = 4, m = 8, F, B, W = 1, 1, 1; simulated'
    for said in ('zb-interleaved v=4 = planned', facts, MEANING):
        assert f'<!-- {said} -->' in drawn, 'of every number of chunks that plans may have'
    assert 'interleaved v=1' not in drawn and 'v=3' not in drawn


def test_plan_keeps_to_what_is_allowed(zbpp):
    case = 'plan --pp 2 --microbatches 4 --seconds 1 --json'
    found = zbpp(f'{case} --placements loop --vpp 3')
    assert (found['placement'], found['stages']) == ('loop', 6)
    assert zbpp(f'{case} --placements wave,loop --vpp 4,5')['stages'] in (8, 10)
    Path('times.json').write_text(UNEVEN)
    assert zbpp(f'{case} --times times.json')['stages'] == 4


@pytest.mark.parametrize('dialect', ['new', 'old'])
def test_convert_there_and_back(zbpp, dialect):
    zbpp(f'convert {ZB_V} --to json -o a.json')
    zbpp(f'convert --file a.json --to torch-csv --dialect {dialect} -o zb-v.csv')
    zbpp('convert --file zb-v.csv --to json -o b.json')
    assert load('b.json') == load('zb-v.csv') == build('zb-v', 4, 8)
    assert Path('zb-v.csv').read_text() == to_torch_csv(build('zb-v', 4, 8), dialect)
    assert zbpp('check b.json --json')['valid'] is True


@pytest.mark.parametrize(
    ('name', 'to', 'begins'),
    [
        ('a.json', 'json', '{'),
        ('a.csv', 'torch-csv', '0F0'),
        ('a.SVG', 'svg', '<svg'),
        ('a', 'perfetto', '{"traceEvents"'),
    ],
)
def test_convert_as_the_name_says(zbpp, name, to, begins):
    asked = zbpp(f'convert {ZB_V} -o b --to {to} --json')
    written = Path('b').read_text()
    assert asked['to'] == to and written.startswith(begins)
    if '.' in name:
        assert zbpp(f'convert {ZB_V} -o {name} --json')['to'] == to
        assert Path(name).read_text() == written


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ('variable', 'value'), [('NO_COLOR', '1'), ('TERM', 'dumb'), ('NO_COLOR', '')]
)
def test_colours_are_for_who_wants_them(monkeypatch, variable, value):
    monkeypatch.setenv('TERM', 'xterm')
    monkeypatch.delenv('NO_COLOR', raising=False)
    assert printing.takes_colours(Terminal()) and not printing.takes_colours(io.StringIO())
    monkeypatch.setenv(variable, value)
    assert printing.takes_colours(Terminal()) == (not value)


def test_help_teaches(zbpp):
    timed = {'simulate', 'plan', 'convert', 'show', 'compare', 'bubbles', 'freeze'}
    for name in ('', *(name for name, *_ in _COMMANDS)):
        text = zbpp(f'{name} --help')
        assert f'zbpp {name}' in text.split('examples:')[1]
        assert ('Times are of one full rank' in text) == (name in timed), 'where there are times'


def test_closed_pipe_is_no_error():
    command = f'"{sys.executable}" -m megatron_zbpp.cli show --schedule zb-v --pp 8 --microbatches'
    done = subprocess.run(
        ['bash', '-c', f'{command} 200 --width 0 | head -c 10'], capture_output=True, text=True
    )
    assert done.stdout == 'zb-v: 8 ra' and done.stderr == ''


def test_a_plan_has_the_fields_that_are_taken(zbpp):
    """What `--pipeline-schedule-file` reads of it, and no other."""
    printed = zbpp('plan --pp 2 --microbatches 2 --seconds 0.1 --json')
    of_partitions = {'cuts', 'device_order', 'layout', 'layers', 'devices'}
    others = {'timeline', 'spans', 'share', 'ways'} | of_partitions
    assert set(printed) == set(formats.PLAN_FIELDS) - others
    assert formats.from_json(json.dumps(zbpp(f'show {ZB_V} --json'))).name == 'zb-v'
    assert formats.from_json(json.dumps(printed)).num_ranks == 2
    with pytest.raises(ValueError, match="field 'memory_limt' is not known"):
        formats.from_json(json.dumps({**printed, 'memory_limt': 3}))


def test_without_a_command(zbpp):
    """All commands are listed; what a newcomer needs comes first: see transcripts.txt."""
    assert re.findall(r'^    (\w+)  ', zbpp(''), re.M) == [name for name, *_ in _COMMANDS]
    assert zbpp('--version').startswith('zbpp 0.')


def test_a_plan_for_a_model(zbpp):
    """It has no more stages than the model has layers, and is saved where -o says."""
    case = f'plan {SHAPE} --seconds 0.5 --no-cache'
    for layers, most in ((4, 4), (8, 8), (15, 8), (16, 16)):
        printed = zbpp(f'{case} --num-layers {layers} -o plan.json')
        stages = load('plan.json').num_stages
        assert stages <= most and f'needs {stages} layers or more' in printed
    zbpp(f'{case} -o plan.svg')
    assert Path('plan.svg').read_text().startswith('<svg')


def test_an_interrupted_plan(monkeypatch, zbpp):
    """Ctrl-C ends with the best by then, which is not kept."""

    @contextlib.contextmanager
    def interrupted(*_: object):
        def done(share: float) -> None:
            raise KeyboardInterrupt

        yield done

    monkeypatch.setattr(printing, 'progress', interrupted)
    shape = '--pp 8 --microbatches 24 --times 1,1.2,0.8 --memory-limit 6 --seconds 60'
    made = zbpp(f'plan {shape} --json', code=130)
    assert zbpp.err == 'zbpp: interrupted: this is the best plan by then\n'
    check(formats.from_json(json.dumps(made)), memory_limit=None)
    assert not Path('cache').exists()


def test_an_interrupted_frontier(monkeypatch, zbpp):
    """Ctrl-C in the second of three limits keeps the first, and the best of the second by then."""
    original, limits = plan_requests.planned, []

    def planned(*args: object, **inputs: object):
        found = original(*args, **inputs)
        limits.append(inputs['memory_limit'])
        if len(limits) == 2:
            raise PlanningInterrupted(found[0])
        return found

    monkeypatch.setattr(plan_requests, 'planned', planned)
    case = '--pp 2 --microbatches 4 --frontier 1,2,3 --seconds 0.3'
    made = zbpp(f'plan {case} --json', code=130)
    assert zbpp.err == 'zbpp: interrupted: these are the best plans by then\n'
    assert [each['memory_limit'] for each in made['frontier']] == [1, 2]


def test_an_interrupted_solver(monkeypatch, zbpp):
    """Ctrl-C while the exact solver runs, which would take a minute, ends all at once."""
    pytest.importorskip('ortools')
    original = plans.cp_sat.solve

    def solve(*args: object, **options: object):
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        return original(*args, **options)

    monkeypatch.setattr(plans.cp_sat, 'solve', solve)
    case = f'plan {SHAPE} --vpp 2 --times 10,12,8 --no-cache --memory-limit 2 --seconds 100'
    start = time.monotonic()
    made = zbpp(f'{case} --json', code=130)
    assert time.monotonic() - start < 50
    check(formats.from_json(json.dumps(made)), memory_limit=None)


def test_offload_is_simulated(zbpp):
    """The rows of the page: less on the device, the rest on the host."""
    page = (ROOT / 'docs' / 'does-not-fit.md').read_text()
    found = re.findall(r'^\| `([\w-]+)`.*? \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$', page, re.M)
    assert len(found) == 6
    for name, *expected in found:
        for flags, most in zip(('', '--offload half', '--offload all'), expected, strict=True):
            shape = f'--schedule {name} --pp 8 --microbatches 24'
            facts = zbpp(f'simulate {shape} {flags} --json')
            assert f'{max(facts["peak_activations"]):g}' == most, (name, flags)


def test_attention_as_measured(zbpp):
    """F of 8 + L + L^2 / 8 thousand tokens: at L = 64, 8 / 584 is fixed and 512 / 584 of pairs."""

    def makespan(attention: object, more: str = '') -> float:
        shape = '--schedule zb-h1 --pp 2 --microbatches 2 --slices 4 --json'
        return zbpp(f'simulate {shape} --attention {attention} {more}')['makespan']

    measured = ','.join(f'{k}000={8 + k + k * k / 8}' for k in (8, 16, 32, 64))
    # each slice of the twelve passes on a rank has what is fixed again
    assert 1 < makespan(measured, '--seq-length 64000') / makespan(512 / 584) < 1.1
    two = makespan('8000=16,64000=576', '--seq-length 64000')
    assert two == pytest.approx(makespan(8 / 9))


def test_a_plan_of_as_many_slices_as_pay(zbpp):
    shape = '--pp 4 --vpp 1 --microbatches 2 --seq-length 131072 --times 1,1.9,0.4'
    asked = f'plan {shape} --slices auto --seconds 0.2 --no-cache'
    words = zbpp(f'{asked} --attention 0.6 --least-slice 16384 -o plan.json')
    found = json.loads(Path('plan.json').read_text())
    assert [len(each['sizes']) for each in found['slice_counts']] == [1, 2, 4, 8]
    least = [each['value'] for each in found['slice_counts']]
    assert least == sorted(least, reverse=True) and found['makespan'] <= least[-1]
    assert found['slices'] == 8 and sum(found['slice_sizes']) == 131072
    assert f'in slices: {1 - found["makespan"] / least[0]:.1%} less than the best of whole' in words
    assert sizes_of(load('plan.json').graph) == tuple(found['slice_sizes'])
    assert zbpp('check plan.json --json')['slices'] == 8
    words = zbpp(f'{asked} --attention 0.6 --least-slice 131072')
    assert 'whole sequences: more slices gain less than 1 %' in words
    # what each pass takes by itself eats up what short slices gain
    fixed = '--attention 32768=1.3,65536=1.6,131072=2.2'
    found = zbpp(f'{asked} {fixed} --json --least-slice 16384')
    assert found['slices'] < len(found['slice_counts'][-1]['sizes']) == 8
