"""`megatron_zbpp.plan` and `frontier`: the same schedules and figures as `zbpp plan` gives."""

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import megatron_zbpp
from megatron_zbpp import Costs, Layer, Layers, Placement, compare
from megatron_zbpp.planner.plan_requests import PlanAnswer
from megatron_zbpp.schedules import names

# options of the command, and arguments that say the same
OPTIONS = json.loads(Path(__file__).with_name('options.json').read_text())
LAYERS = Layers((Layer('E', 0.1, 0, 0.1), *[Layer('t', 1, 1, 1)] * 6, Layer('L', 0.5, 0.5, 0.5)))


@pytest.fixture
def command(zbpp):
    """Runs `zbpp plan`, for a tenth of a second if nothing else is said."""

    def run(line: str) -> dict[str, Any]:
        seconds = '' if '--seconds' in line else ' --seconds 0.1'
        cache = '' if '--cache' in line else ' --no-cache'
        return zbpp(f'plan --pp 2 --microbatches 3 {line}{seconds}{cache} --json')

    return run


def in_python(**options: Any) -> dict[str, Any]:
    found = megatron_zbpp.plan(2, 3, **{'seconds': 0.1, **options})
    assert isinstance(found, PlanAnswer)
    return json.loads(json.dumps(found.facts()))


@pytest.mark.parametrize('option', OPTIONS['asked'])
def test_each_option_is_an_argument(command, option):
    line, options = OPTIONS['asked'][option]
    if 'attention' in options and isinstance(options['attention'], dict):
        options['attention'] = {int(k): time for k, time in options['attention'].items()}
    assert in_python(**options) == command(line)


def test_no_option_is_left_out(zbpp):
    """But for output, and options that other tests here have."""
    known = set(re.findall(r'--[a-z-]+', zbpp('plan --help').partition('Search')[0]))
    asked = OPTIONS['asked'].values()
    tried = {w for line, _ in asked for w in line.split() if w.startswith('--')}
    output = {'--json', '--table', '--output', '--title', '--against'}
    others = {'--pp', '--microbatches', '--layers-file', '--frontier', '--cache', '--no-cache'}
    assert len(known) > 20 and known - output - others == tried


@pytest.mark.parametrize('name', OPTIONS['files'])
def test_costs_of_a_file_are_its_path_or_its_value(command, tmp_path, name):
    line, fields, options = OPTIONS['files'][name]
    file = tmp_path / 'times.json'
    file.write_text(json.dumps(fields))
    expected = command(f'{line} --times {file}')
    assert in_python(costs=file, num_chunks=1, **options) == expected
    if name != 'selective':  # which only a file has beside the others
        value = Costs.from_json(file.read_text())
        assert in_python(costs=value, num_chunks=1, **options) == expected


def test_layers(command, tmp_path):
    file = tmp_path / 'layers.json'
    file.write_text(LAYERS.to_json())
    expected = command(f'--layers-file {file}')
    assert in_python(costs=LAYERS) == expected and '|' in expected['layout']


def test_a_frontier(command):
    expected = command('--vpp 1,2 --frontier 2,1')['frontier']
    found = megatron_zbpp.frontier(2, 3, [2, 1], num_chunks=[1, 2], seconds=0.1)
    made = [{'memory_limit': limit, **plan.facts()} for limit, plan in found]
    assert json.loads(json.dumps(made)) == expected
    assert [limit for limit, _ in found] == [1, 2] and found[0][1].value >= found[1][1].value


def test_earlier_plans_are_found_by_either(command, tmp_path):
    first = in_python(cache=tmp_path)
    assert not first['cached']
    assert command(f'--cache {tmp_path}') == {**first, 'cached': True}
    assert megatron_zbpp.plan(2, 3, seconds=0.1, cache=str(tmp_path)).cached
    found = megatron_zbpp.plan(2, 3, seconds=0.1)
    assert json.loads(json.dumps(found.facts('gpipe'))) == command('--against gpipe')


def test_progress_is_reported():
    shares: list[float] = []
    megatron_zbpp.plan(3, 12, seconds=2.0, memory_limit=2.5, progress=shares.append)
    assert shares == sorted(shares) and all(0 <= share <= 1 for share in shares)
    placement = Placement.loop(2)
    found = megatron_zbpp.plan([(placement, Costs.uniform(placement))], 3, seconds=0.1)
    asked = megatron_zbpp.plan(2, 3, num_chunks=1, placements=['loop'], seconds=0.1)
    for field in fields(found):
        assert getattr(found, field.name) == getattr(asked, field.name)


# ---- Schedules beside each other, in Python: the numbers of `zbpp compare`.


NAMES = ['1f1b', 'zb-h1', 'zb-v', 'interleaved']


def test_rows_are_those_of_zbpp(zbpp):
    found = zbpp('compare --pp 4 --microbatches 8 --json')
    printed = {row['name']: row for row in found['schedules']}
    assert {*printed, *(each['name'] for each in found['skipped'])} == {*names()}
    spans = [row['makespan'] for row in found['schedules']]
    assert spans == sorted(spans)
    rows = compare(4, 8)
    assert {row.name for row in rows} <= {*printed} and len(rows) > 25
    for row in rows:
        told = printed[row.name]
        assert row.makespan == told['makespan'] and row.gain == told['gain']
        assert row.idle == told['idle_all_ranks'] and row.bubble == told['bubble']
        assert row.peak == max(told['peak_activations'])
    assert [row.makespan for row in rows] == sorted(row.makespan for row in rows)


def test_costs_of_a_model_are_joined_and_cut():
    uneven = Costs.of([1.0] * 7 + [2.0], [1.0] * 8, [1.0] * 8)
    rows = {row.name: row for row in compare(4, 8, NAMES, uneven)}
    assert rows['1f1b'].gain == 0 and rows['zb-h1'].gain > 0
    plain = {row.name: row for row in compare(4, 8, NAMES)}
    assert rows['1f1b'].makespan > 2 * plain['1f1b'].makespan - 8
    against = {row.name: row.gain for row in compare(4, 8, NAMES, uneven, against='zb-v')}
    assert against['zb-v'] == 0 and against['1f1b'] < 0
