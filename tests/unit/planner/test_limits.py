"""What a rank may hold: its parameters count, and a limit may be in bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_zbpp.analysis.checker import ScheduleError, check
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.cli import main
from megatron_zbpp.ir import Placement
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.partitioning.shapes import Shape, layers_of
from megatron_zbpp.planner import budget
from megatron_zbpp.planner.limits import Bytes
from megatron_zbpp.planner.plans import plan
from megatron_zbpp.schedules import build

GIB = 2**30
PLACEMENT = Placement.v(2)
COSTS = replace(Costs.uniform(PLACEMENT, 3, 4, 2), parameters=(1.0, 3.0, 2.0, 2.0))
FILE = """{"F": [1, 1.1], "B": [1, 1.2], "W": [0.8, 0.9], "activation": [6e9, 6e9]%s}"""


def test_parameters_take_their_part_of_the_limit(monkeypatch):
    """On a V rank 0 has stages 0 and 3, rank 1 has 1 and 2. Steps end the search, not the clock."""
    monkeypatch.setattr(budget, '_STEPS_PER_SECOND', 5_000)
    assert COSTS.static(PLACEMENT) == (3, 5)
    under = plan([(PLACEMENT, COSTS)], 4, memory_limit=[5, 6.5], seconds=30)
    held = peak(under.schedule, COSTS)
    assert held[0] <= 2 and held[1] <= 1.5
    bare = plan([(PLACEMENT, replace(COSTS, parameters=()))], 4, memory_limit=[2, 1.5], seconds=30)
    assert (bare.schedule, bare.value) == (under.schedule, under.value)


def test_a_limit_that_parameters_exceed():
    with pytest.raises(ValueError, match=r'4.5 of rank 1 is below 5 of weights.*give at least 6,'):
        plan([(PLACEMENT, COSTS)], 4, memory_limit=4.5)
    with pytest.raises(ValueError, match=r'of rank 1 is below 5 of .* beside 1 of one microbatch'):
        plan([(PLACEMENT, COSTS)], 4, memory_limit=5.5)
    large = replace(Costs.uniform(PLACEMENT), parameters=(20.0 * GIB,) * 4)
    with pytest.raises(ValueError, match='30 GiB of rank 0 is below 40 GiB of weights'):
        plan([(PLACEMENT, large)], 4, memory_limit=Bytes(30 * GIB))


def test_the_checker_counts_them():
    schedule = build('zb-v', 2, 4)
    held = peak(schedule, COSTS)
    check(schedule, memory_limit=max(held[0] + 3, held[1] + 5), costs=COSTS)
    with pytest.raises(ScheduleError, match=r'beside parameters of 5 at .*above the limit of'):
        check(schedule, memory_limit=held[1] + 4.5, costs=COSTS)


def test_bytes_on_the_command_line(tmp_path, capsys):
    costs, layers = tmp_path / 'bytes.json', tmp_path / 'layers.json'
    case = ['plan', '--pp', '2', '--microbatches', '4', '--seconds', '0.1', '--no-cache', '--times']

    def said(*argv: object) -> str:
        main(list(map(str, argv)))
        printed = capsys.readouterr()
        return printed.err or printed.out

    costs.write_text(FILE % ', "parameters": [34e9, 30e9]')
    assert 'peak memory 11.176 GiB' in said(*case, costs, '--memory-limit', '47GB')
    assert 'is below 31.67 GiB of weights' in said(*case, costs, '--memory-limit', '30GiB')
    costs.write_text(FILE % '')
    assert 'says nothing of parameters' in said(*case, costs, '--memory-limit', '60GiB')
    frontier = said(*case, '1,1,1', '--frontier', '60GiB,70GiB')
    assert 'says nothing of activation and parameters' in frontier

    shape = Shape('gpt', 4, 1024, 16, 8192, 1024, 100.0)
    layers.write_text(layers_of(shape).to_json())
    whole = sum(layer.parameters for layer in layers_of(shape)) / GIB
    case = ['partition', layers, '--pp', '2', '--microbatches', '4', '--seconds', '0.1']
    assert 'layout' in said(*case, '--memory-limit', f'{whole:.3f}GiB')
    assert 'no partition holds' in said(*case, '--memory-limit', f'{whole / 2:.3f}GiB')
    assert 'all limits in bytes' in said(*case, '--memory-limit', '60GiB,4')


@pytest.mark.parametrize('text', ['60XB', '1.2.3GiB', '-1GiB', 'GiB', 'much'])
def test_what_is_no_amount(text, capsys):
    with pytest.raises(SystemExit):
        main(['plan', '--pp', '2', '--microbatches', '4', f'--memory-limit={text}'])
    assert 'number from 0 up' in capsys.readouterr().err
