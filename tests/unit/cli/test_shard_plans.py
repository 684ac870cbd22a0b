"""`zbpp plan --vocab-parallel`: never worse than what is named; it says the gain, and why."""

import json
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_zbpp import Schedule
from megatron_zbpp.cli import printing
from megatron_zbpp.mcore.settings import Settings
from megatron_zbpp.planner.cases import CaseRequest
from megatron_zbpp.techniques.composition import SLICED, VOCABULARY, techniques_of

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


@pytest.mark.parametrize('instance', INSTANCES)
def test_plans_are_never_worse_than_what_is_named(zbpp, instance):
    sizes, share, least, cut, sharded = INSTANCES[instance]
    line = f'plan {sizes} {SLICES} {least} --vocab-parallel {share} --seconds 0.2 -o plan.json'
    made = zbpp(f'{line} --json')
    objective = made['objective']
    ways = {(way['slices'], way['output_layer']): way[objective] for way in made['ways']}
    assert made[objective] <= 1.01 * min(ways.values())
    assert made[objective] <= made['best_named'][objective] + 1e-9
    assert made[objective] >= made['lower_bound'] - 1e-9
    both = {'on all ranks', 'whole'} if share.startswith('auto') else {'on all ranks'}
    assert {layer for _, layer in ways} == both
    assert max(ways)[0] == 4096 // least
    schedule = Schedule.from_object(json.loads(Path('plan.json').read_text())['schedule'])
    assert techniques_of(schedule) == cut | ({VOCABULARY} if sharded else set())
    assert Settings(schedule).vocab_parallel == ('output' if sharded else None)
    assert sum(made['slice_sizes']) == (4096 if cut else 0)
    zbpp('check plan.json')


def test_what_is_gained_is_said(zbpp):
    shape = 'plan --pp 4 --microbatches 4 --vpp 1 --seconds 0.1 --memory-limit 5'
    said = ' '.join(zbpp(f'{shape} {SLICES} 2048 --vocab-parallel auto:0.5').split())
    assert 'in 2 slices, output layer on all ranks: ' in said
    whole = 'less than whole, and whole sequences; a whole layer keeps its rank busy 2.00 times'
    assert whole in said
    said = ' '.join(zbpp(f'{shape} --vocab-parallel auto:0').split())
    assert 'output layer whole: slices or shards gain less than 1%' in said


def test_without_a_share_the_usual_one_is_taken_and_said(zbpp):
    line = 'plan --pp 4 --microbatches 4 --vpp 1 --seconds 0.1 --vocab-parallel auto'
    given = zbpp(f'{line}:0.2 --json')
    assert zbpp(f'{line} --json') == given and given['share'] == 0.2
    said = ' '.join(zbpp(line).split())
    assert 'share of a shard: 0.2, the usual one; of a GPT it is words /' in said
    assert 'the usual one' not in zbpp(f'{line}:0.2')
    shards = {'S': [0, 0, 2, 2], 'T': [0, 0, 1, 1]}
    times = {**{kind: [1.0, 1.0] for kind in 'FBW'}, 'times': shards}
    Path('times.json').write_text(json.dumps(times))
    line = 'plan --pp 2 --microbatches 4 --vpp 1 --times times.json --seconds 0.1 --vocab-parallel'
    given = zbpp(f'{line} auto:file --json')
    assert zbpp(f'{line} auto --json') == given and given['share'] == 'file'
    assert 'the usual one' not in zbpp(f'{line} auto')
    times['times'].pop('T')
    Path('times.json').write_text(json.dumps(times))
    assert 'costs have no times of T' in zbpp.refused(f'{line} auto')


def test_search_beats_every_host(zbpp):
    """V-Half in slices is ordered badly by its rule; a search with S and T is at the bound."""
    shape = '--pp 4 --microbatches 4 --vpp 2 --slices 2 --memory-limit 2'
    made = zbpp(f'plan {shape} --vocab-parallel 0.3 --seconds 1 --json')
    assert made['makespan'] < made['best_named']['makespan'] - 0.1
    assert max(made['peak_activations']) <= 2


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


def test_the_clock_gives_each_way_a_share(zbpp, ticks, built):
    """Those with the smallest bubbles come first; what the clock ends, it says."""
    ticks(0.2)
    made = zbpp(f'{LARGE} --json')
    assert [way['output_layer'] for way in made['ways']] == ['on all ranks', 'whole']
    assert built[0] == 'zb-v' == built[built.index('zb-v', 1)] and len(built) < 18
    assert not made['repeats'] and made['best_named']['name'].startswith('zb-v')
    zbpp(LARGE)
    assert 'the clock ended planning' in zbpp.err
    assert 'give more --seconds, or fewer' in zbpp.err


def test_without_any_time_one_schedule_is_built(zbpp, ticks, built):
    ticks(100.0)
    ways = zbpp(f'{LARGE} --json')['ways']
    assert len(built) == len(ways) == 1


def test_small_questions_are_not_cut(zbpp, ticks, built):
    ticks(100.0)
    made = zbpp('plan --pp 2 --microbatches 2 --vpp 1,2 --vocab-parallel auto:0.3 --json')
    assert len(built) == 2 * 9 and len(made['ways']) == 2
    assert not zbpp.err


def test_progress_is_shown(monkeypatch, zbpp, ticks):
    """On a terminal, from the first schedules on."""
    shares = []

    @contextmanager
    def progress(text, unit, total):
        yield lambda share: shares.append((text, share))

    ticks(0.5)
    monkeypatch.setattr(printing, 'progress', progress)
    zbpp(LARGE)
    named = [share for text, share in shares if text == 'named schedules']
    assert len(named) > 5 and named == sorted(named) and 0 < named[0] < 0.3 and named[-1] <= 1
    assert any(text == 'planning' for text, _ in shares)
