"""`zbpp plan --vocab-parallel`: never worse than what is named; it says the gain, and why."""

from __future__ import annotations

import itertools
import json
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from megatron_zbpp.cli import main, planning, printing
from megatron_zbpp.ir import Schedule
from megatron_zbpp.mcore.settings import Settings
from megatron_zbpp.planner import budget, plans
from megatron_zbpp.planner.cases import CaseRequest
from megatron_zbpp.techniques.composition import SLICED, VOCABULARY, techniques_of

INIT = budget.Budget.__init__  # by which the clock counts, as it does not in other tests
SLICES = '--slices auto --seq-length 4096 --least-slice'
INSTANCES = {
    'a large vocabulary': ('--pp 4 --microbatches 3 --vpp 1', 'auto:0.5', 2048, {SLICED}, True),
    'little memory': (
        *('--pp 2 --microbatches 4 --vpp 1,2 --memory-limit 1.9', 'auto:0.3', 2048, {SLICED}, True),
    ),
    'attention': ('--pp 2 --microbatches 2 --vpp 2 --attention 0.5', '0.4', 1024, {SLICED}, True),
    'no vocabulary': ('--pp 2 --microbatches 4 --vpp 2', 'auto:0', 4096, set(), False),
    'windows': ('--pp 3 --microbatches 3 --objective window', 'auto:0.2', 4096, set(), True),
}


def run(capsys, *line: str) -> dict:
    assert main([*' '.join(line).split(), '--json']) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize('instance', INSTANCES)
def test_plans_are_never_worse_than_what_is_named(capsys, tmp_path, instance):
    sizes, share, least, cut, sharded = INSTANCES[instance]
    file = tmp_path / 'plan.json'
    line = f'plan {sizes} {SLICES} {least} --vocab-parallel {share} --seconds 0.2 -o {file}'
    made = run(capsys, line)
    objective = made['objective']
    ways = {(way['slices'], way['output_layer']): way[objective] for way in made['ways']}
    assert made[objective] <= 1.01 * min(ways.values())
    assert made[objective] <= made['best_named'][objective] + 1e-9
    assert made[objective] >= made['lower_bound'] - 1e-9
    both = {'on all ranks', 'whole'} if share.startswith('auto') else {'on all ranks'}
    assert {layer for _, layer in ways} == both
    assert max(ways)[0] == 4096 // least
    schedule = Schedule.from_object(json.loads(file.read_text())['schedule'])
    has = techniques_of(schedule)
    assert has == cut | ({VOCABULARY} if sharded else set())
    assert Settings(schedule).vocab_parallel == ('output' if sharded else None)
    assert sum(made['slice_sizes']) == (4096 if cut else 0)
    assert main(['check', str(file)]) == 0


def test_what_is_gained_is_said(capsys):
    shape = '--pp 4 --microbatches 4 --vpp 1 --seconds 0.1 --memory-limit 5'
    assert main(f'plan {shape} {SLICES} 2048 --vocab-parallel auto:0.5'.split()) == 0
    said = ' '.join(capsys.readouterr().out.split())
    assert 'in 2 slices, output layer on all ranks: ' in said
    assert 'less than whole, and whole sequences; a whole layer keeps its rank busy 2.00 times' in (
        said
    )
    assert main(f'plan {shape} --vocab-parallel auto:0'.split()) == 0
    said = ' '.join(capsys.readouterr().out.split())
    assert 'output layer whole: slices or shards gain less than 1%' in said


def test_without_a_share_the_usual_one_is_taken_and_said(capsys):
    line = 'plan --pp 4 --microbatches 4 --vpp 1 --seconds 0.1 --vocab-parallel auto'
    given = run(capsys, f'{line}:0.2')
    assert run(capsys, line) == given and given['share'] == 0.2
    assert main(line.split()) == 0
    said = ' '.join(capsys.readouterr().out.split())
    assert 'share of a shard: 0.2, the usual one; of a GPT it is words /' in said
    assert main(f'{line}:0.2'.split()) == 0
    assert 'the usual one' not in capsys.readouterr().out


def test_without_a_share_times_of_the_file_are_taken(capsys, tmp_path):
    shards = {'S': [0, 0, 2, 2], 'T': [0, 0, 1, 1]}
    times = {**{kind: [1.0, 1.0] for kind in 'FBW'}, 'times': shards}
    file = tmp_path / 'times.json'
    file.write_text(json.dumps(times))
    line = f'plan --pp 2 --microbatches 4 --vpp 1 --times {file} --seconds 0.1 --vocab-parallel'
    given = run(capsys, line, 'auto:file')
    assert run(capsys, line, 'auto') == given and given['share'] == 'file'
    assert main(f'{line} auto'.split()) == 0
    assert 'the usual one' not in capsys.readouterr().out
    times['times'].pop('T')
    file.write_text(json.dumps(times))
    assert main(f'{line} auto'.split()) == 2
    assert 'costs have no times of T' in capsys.readouterr().err


def test_search_beats_every_host(capsys):
    """V-Half in slices is ordered badly by its rule; a search with S and T is at the bound."""
    shape = '--pp 4 --microbatches 4 --vpp 2 --slices 2 --memory-limit 2'
    made = run(capsys, f'plan {shape} --vocab-parallel 0.3 --seconds 1')
    assert made['makespan'] < made['best_named']['makespan'] - 0.1
    assert max(made['peak_activations']) <= 2


@pytest.fixture
def ticks(monkeypatch):
    """Return what makes each look at the clock take that many seconds; 100 passes are many."""
    monkeypatch.setattr(plans, '_SMALL', 500)
    monkeypatch.setattr(budget.Budget, '__init__', INIT)

    def tick(seconds):
        clock = itertools.count()
        ticking = SimpleNamespace(monotonic=lambda: next(clock) * seconds)
        monkeypatch.setattr(budget, 'time', ticking)

    return tick


@pytest.fixture
def built(monkeypatch):
    """Names of the schedules that shards are put into, or a whole layer, as they are built."""
    names, original = [], CaseRequest.case

    def case(self, family=None):
        names.append(family)
        return original(self, family)

    monkeypatch.setattr(CaseRequest, 'case', case)
    return names


LARGE = 'plan --pp 4 --microbatches 8 --vpp 1,2 --vocab-parallel auto:0.3 --seconds 20'


def test_the_clock_gives_each_way_a_share(capsys, ticks, built):
    """Those with the smallest bubbles come first; what the clock ends, it says."""
    ticks(0.2)
    made = run(capsys, LARGE)
    assert [way['output_layer'] for way in made['ways']] == ['on all ranks', 'whole']
    assert built[0] == 'zb-v' == built[built.index('zb-v', 1)] and len(built) < 18
    assert not made['repeats'] and made['best_named']['name'].startswith('zb-v')
    assert main(LARGE.split()) == 0
    said = capsys.readouterr().err
    assert 'the clock ended planning' in said and 'give more --seconds, or fewer' in said


def test_without_any_time_one_schedule_is_built(capsys, ticks, built):
    ticks(100.0)
    made = run(capsys, LARGE)
    assert len(built) == len(made['ways']) == 1


def test_small_questions_are_not_cut(capsys, ticks, built):
    ticks(100.0)
    made = run(capsys, 'plan --pp 2 --microbatches 2 --vpp 1,2 --vocab-parallel auto:0.3')
    assert len(built) == 2 * 9 and len(made['ways']) == 2
    assert not capsys.readouterr().err


def test_progress_is_shown(monkeypatch, capsys, ticks):
    """On a terminal, from the first schedules on."""
    shares = []

    @contextmanager
    def progress(text, unit, total):
        yield lambda share: shares.append((text, share))

    ticks(0.5)
    for module in (planning, printing):
        monkeypatch.setattr(module, 'progress', progress)
    assert main(LARGE.split()) == 0
    named = [share for text, share in shares if text == 'named schedules']
    assert len(named) > 5 and named == sorted(named) and 0 < named[0] < 0.3 and named[-1] <= 1
    assert any(text == 'planning' for text, _ in shares)


@pytest.mark.parametrize(
    ('asked', 'said'),
    [
        ('--vocab-parallel auto:', "'' is not possible"),
        ('--vocab-parallel auto:x', 'or file, auto, or auto:0.2'),
        ('--vocab-parallel 0.2 --actions offload --memory-limit 2', '--actions with --vocab'),
        ('--vocab-parallel auto:0.2 --slices auto', '--slices auto needs --seq-length'),
        ('--vocab-parallel auto:file', 'costs have no times of S and T'),
        ('--vocab-parallel auto:0.3 --memory-limit 0.1', 'none of 1f1b, zb-h1'),
    ],
)
def test_what_cannot_be_planned(capsys, asked, said):
    with pytest.MonkeyPatch.context():
        try:
            code = main(f'plan --pp 2 --microbatches 2 {asked}'.split())
        except SystemExit as error:
            code = error.code
    assert code == 2
    assert said in ' '.join(capsys.readouterr().err.split())
