"""`megatron_zbpp.plan` and `frontier`: the same schedules and figures as `zbpp plan` gives."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import megatron_zbpp
from megatron_zbpp import Costs, Layer, Layers, Placement
from megatron_zbpp.cli import main
from megatron_zbpp.planner.plan_requests import PlanAnswer

SMALL = '--pp 2 --microbatches 3'
LONG = '--slices auto --seq-length 16384 --least-slice 8192'
TIMES = {'F': [1, 1.2], 'B': [1, 1.1], 'W': [1, 0.9], 'activation': [1, 2]}
SELECTIVE = {**TIMES, 'selective': {'B': [1.4, 1.5], 'activation': [0.4, 0.8]}}
SHARDS = {**TIMES, 'times': {'S': [0, 0, 2, 2], 'T': [0, 0, 1, 1]}}
LAYERS = Layers((Layer('E', 0.1, 0, 0.1), *[Layer('t', 1, 1, 1)] * 6, Layer('L', 0.5, 0.5, 0.5)))

# options of the command, and the arguments that say the same
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    '--times': ('--times 1,1.3,0.7', {'costs': (1, 1.3, 0.7)}),
    '--vpp': ('--vpp 1,2', {'num_chunks': [1, 2]}),
    '--placements': ('--placements v,wave', {'placements': ['v', 'wave']}),
    '--num-layers': ('--num-layers 5', {'num_layers': 5}),
    '--comm': ('--comm 0.4', {'comm': 0.4}),
    '--together': ('--together 0.8', {'together': 0.8}),
    '--together of pairs': (
        '--together FB=0.8,FW=0.9',
        {'together': {'FB': 0.8, 'FW': 0.9}},
    ),
    '--memory-limit': ('--memory-limit 1.5', {'memory_limit': 1.5}),
    '--objective': ('--objective window', {'objective': 'window'}),
    '--seed': ('--seed 5 --memory-limit 1.5', {'seed': 5, 'memory_limit': 1.5}),
    '--seconds': ('--seconds 0.3', {'seconds': 0.3}),
    '--slices': ('--vpp 1 --slices 3', {'num_chunks': 1, 'slices': 3}),
    '--slices of sizes': (
        '--vpp 1 --slices 5000,3000',
        {'num_chunks': 1, 'slices': [5000, 3000]},
    ),
    '--slices balanced': (
        '--vpp 1 --slices balanced:2 --seq-length 8192 --attention 0.5',
        {'num_chunks': 1, 'slices': 'balanced:2', 'seq_length': 8192, 'attention': 0.5},
    ),
    '--slices auto': (
        f'--vpp 1 {LONG}',
        {'num_chunks': 1, 'slices': 'auto', 'seq_length': 16384, 'least_slice': 8192},
    ),
    '--attention': (
        f'--vpp 1 {LONG} --attention 4096=3.1,16384=14.9',
        {
            **{'num_chunks': 1, 'slices': 'auto', 'seq_length': 16384, 'least_slice': 8192},
            'attention': {4096: 3.1, 16384: 14.9},
        },
    ),
    '--vocab-parallel': ('--vpp 1 --vocab-parallel 0.4', {'num_chunks': 1, 'vocab_parallel': 0.4}),
    '--vocab-parallel auto': (
        '--vpp 1 --vocab-parallel auto',
        {'num_chunks': 1, 'vocab_parallel': 'auto'},
    ),
    '--vocab-parallel auto:SHARE': (
        f'--vpp 1 {LONG} --vocab-parallel auto:0.4',
        {
            **{'num_chunks': 1, 'slices': 'auto', 'seq_length': 16384, 'least_slice': 8192},
            'vocab_parallel': 'auto:0.4',
        },
    ),
    '--vocab-layers': (
        '--vpp 1 --vocab-parallel 0.4 --vocab-layers input+output',
        {'num_chunks': 1, 'vocab_parallel': 0.4, 'vocab_layers': 'input+output'},
    ),
    '--actions': (
        '--vpp 1 --actions offload --copy-ratio 0.7 --memory-limit 1.2',
        {'num_chunks': 1, 'actions': ['offload'], 'copy_ratio': 0.7, 'memory_limit': 1.2},
    ),
}
FILES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    'times': ('--vpp 1', TIMES, {}),
    'selective': (
        '--vpp 1 --actions evict,selective --memory-limit 1.5',
        SELECTIVE,
        {'actions': ['evict', 'selective'], 'memory_limit': 1.5},
    ),
    'shards': ('--vpp 1 --vocab-parallel file', SHARDS, {'vocab_parallel': 'file'}),
    'shards or not': ('--vpp 1 --vocab-parallel auto', SHARDS, {'vocab_parallel': 'auto'}),
}


def command(capsys: pytest.CaptureFixture[str], line: str) -> dict[str, Any]:
    seconds = '' if '--seconds' in line else ' --seconds 0.1'
    cache = '' if '--cache' in line else ' --no-cache'
    assert main(f'plan {SMALL} {line}{seconds}{cache} --json'.split()) == 0
    return json.loads(capsys.readouterr().out)


def in_python(**options: Any) -> dict[str, Any]:
    found = megatron_zbpp.plan(2, 3, **{'seconds': 0.1, **options})
    assert isinstance(found, PlanAnswer)
    return json.loads(json.dumps(found.facts()))


@pytest.mark.parametrize('option', ASKED)
def test_each_option_is_an_argument(capsys: pytest.CaptureFixture[str], option: str):
    line, options = ASKED[option]
    assert in_python(**options) == command(capsys, line)


def test_no_option_is_left_out(capsys: pytest.CaptureFixture[str]):
    """But for output, and options that other tests here have."""
    with pytest.raises(SystemExit):
        main(['plan', '--help'])
    usage = capsys.readouterr().out.partition('Search')[0]
    known = set(re.findall(r'--[a-z-]+', usage))
    tried = {w for line, _ in ASKED.values() for w in line.split() if w.startswith('--')}
    output = {'--json', '--table', '--output', '--title', '--against'}
    others = {'--pp', '--microbatches', '--layers-file', '--frontier', '--cache', '--no-cache'}
    assert len(known) > 20 and known - output - others == tried


@pytest.mark.parametrize('name', FILES)
def test_costs_of_a_file_are_its_path_or_its_value(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
):
    line, fields, options = FILES[name]
    file = tmp_path / 'times.json'
    file.write_text(json.dumps(fields))
    expected = command(capsys, f'{line} --times {file}')
    assert in_python(costs=file, num_chunks=1, **options) == expected
    if name != 'selective':  # which only a file has beside the others
        value = Costs.from_json(file.read_text())
        assert in_python(costs=value, num_chunks=1, **options) == expected


def test_layers(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    file = tmp_path / 'layers.json'
    file.write_text(LAYERS.to_json())
    expected = command(capsys, f'--layers-file {file}')
    assert in_python(costs=LAYERS) == expected and '|' in expected['layout']


def test_a_frontier(capsys: pytest.CaptureFixture[str]):
    expected = command(capsys, '--vpp 1,2 --frontier 2,1')['frontier']
    found = megatron_zbpp.frontier(2, 3, [2, 1], num_chunks=[1, 2], seconds=0.1)
    made = [{'memory_limit': limit, **plan.facts()} for limit, plan in found]
    assert json.loads(json.dumps(made)) == expected
    assert [limit for limit, _ in found] == [1, 2] and found[0][1].value >= found[1][1].value


def test_earlier_plans_are_found_by_either(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    first = in_python(cache=tmp_path)
    assert not first['cached']
    again = command(capsys, f'--cache {tmp_path}')
    assert again == {**first, 'cached': True}
    assert megatron_zbpp.plan(2, 3, seconds=0.1, cache=str(tmp_path)).cached


def test_gains_are_against_any_schedule(capsys: pytest.CaptureFixture[str]):
    found = megatron_zbpp.plan(2, 3, seconds=0.1)
    expected = command(capsys, '--against gpipe')
    assert json.loads(json.dumps(found.facts('gpipe'))) == expected


@settings(max_examples=15, derandomize=True, suppress_health_check=list(HealthCheck), deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=3, max_size=3),
    st.sampled_from([None, 1.0, 1.5, 3.0]),
    st.sampled_from([None, 0.0, 0.5]),
    st.sampled_from(['makespan', 'window']),
    st.sampled_from([None, 2, 'balanced:2']),
)
def test_any_options(
    capsys: pytest.CaptureFixture[str],
    times: list[int],
    limit: float | None,
    comm: float | None,
    objective: str,
    slices: int | str | None,
):
    line = f'--vpp 1,2 --times {",".join(map(str, times))} --objective {objective}'
    line += '' if limit is None else f' --memory-limit {limit}'
    line += '' if comm is None else f' --comm {comm}'
    line += '' if slices is None else f' --slices {slices} --seq-length 4096'
    options = {'memory_limit': limit, 'comm': comm, 'objective': objective, 'slices': slices}
    found = in_python(
        costs=times, num_chunks=[1, 2], seq_length=4096 if slices else None, **options
    )
    assert found == command(capsys, line)


def test_progress_is_reported():
    shares: list[float] = []
    megatron_zbpp.plan(3, 12, seconds=2.0, memory_limit=2.5, progress=shares.append)
    assert shares == sorted(shares) and all(0 <= share <= 1 for share in shares)


def test_candidates_are_planned_on_as_they_are():
    placement = Placement.loop(2)
    found = megatron_zbpp.plan([(placement, Costs.uniform(placement))], 3, seconds=0.1)
    asked = megatron_zbpp.plan(2, 3, num_chunks=1, placements=['loop'], seconds=0.1)
    for field in fields(found):
        assert getattr(found, field.name) == getattr(asked, field.name)


@pytest.mark.parametrize(
    ('options', 'said'),
    [
        ({'slices': 'auto'}, 'slices auto needs seq_length'),
        ({'slices': [1, 2], 'seq_length': 4}, 'slices of 3 tokens in all, but seq_length is 4'),
        ({'copy_ratio': 0.5}, 'copy_ratio 0.5, but nothing is copied: give actions offload'),
        ({'actions': ['offload']}, 'give memory_limit or frontier'),
        ({'num_layers': 1}, 'num_layers 1 are fewer than 2 stages, of num_ranks 2 and num_chunks'),
        ({'vocab_layers': 'input+output'}, 'vocab_layers input.output needs the cost'),
        ({'vocab_parallel': 'often'}, "vocab_parallel 'often': give a share"),
        ({'placements': ['v'], 'num_chunks': 1}, 'cannot have .1. chunks per rank'),
        ({'costs': LAYERS, 'vocab_parallel': 0.2}, 'vocab_parallel does not go with'),
        ({'placements': ['zigzag']}, "placements: 'zigzag' is unknown: choose of loop, v, wave"),
        ({'actions': ['wait']}, "actions: 'wait' is unknown: choose of offload, recompute"),
        ({'together': {'BB': 0.5}}, "together: 'BB' is unknown: choose of FB, FF, FW"),
        ({'vocab_layers': 'all'}, "vocab_layers: 'all' is unknown: choose of output"),
        ({'vocab_parallel': 0.2, 'memory_limit': [2, 2]}, 'under one memory limit'),
        ({'spent': 1.0}, 'spent: give candidates in place of ranks'),
        ({'memory_limit': 0.1}, 'memory limit 0.1 of rank 0 is below 1, one microbatch'),
    ],
)
def test_what_is_refused_is_named_as_it_was_given(options: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        megatron_zbpp.plan(2, 3, seconds=0.1, **options)


@pytest.mark.parametrize(
    ('sizes', 'said'),
    [((0, 3), 'num_ranks is 0'), ((2, 0), 'num_microbatches is 0'), ((2.0, 3), 'num_ranks is 2.0')],
)
def test_sizes_are_whole_numbers_from_one_up(sizes: tuple[Any, Any], said: str):
    with pytest.raises(ValueError, match=said):
        megatron_zbpp.plan(*sizes, seconds=0.1)


def test_options_of_a_question_do_not_go_with_candidates():
    placement = Placement.loop(2)
    with pytest.raises(ValueError, match='comm, slices: give a number of ranks in place of'):
        megatron_zbpp.plan([(placement, Costs.uniform(placement))], 3, slices=2, comm=0.1)
