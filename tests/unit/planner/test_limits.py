"""What a rank may hold: its parameters count, and a limit may be in bytes."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_zbpp import Costs, Placement, ScheduleError, build, check
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.partitioning.shapes import Shape, layers_of
from megatron_zbpp.planner import limits
from megatron_zbpp.planner.plans import plan

GIB = 2**30
PLACEMENT = Placement.v(2)
COSTS = replace(Costs.uniform(PLACEMENT, 3, 4, 2), parameters=(1.0, 3.0, 2.0, 2.0))
FILE = """{"F": [1, 1.1], "B": [1, 1.2], "W": [0.8, 0.9], "activation": [6e9, 6e9]%s}"""


def test_parameters_take_their_part_of_the_limit(monkeypatch):
    """On a V rank 0 has stages 0 and 3, rank 1 has 1 and 2. Steps end the search, not the clock."""
    monkeypatch.setattr(limits, '_STEPS_PER_SECOND', 5_000)
    assert COSTS.static(PLACEMENT) == (3, 5)
    under = plan([(PLACEMENT, COSTS)], 4, memory_limit=[5, 6.5], seconds=30)
    held = peak(under.schedule, COSTS)
    assert held[0] <= 2 and held[1] <= 1.5
    bare = plan([(PLACEMENT, replace(COSTS, parameters=()))], 4, memory_limit=[2, 1.5], seconds=30)
    assert (bare.schedule, bare.value) == (under.schedule, under.value)
    schedule = build('zb-v', 2, 4)
    held = peak(schedule, COSTS)
    check(schedule, memory_limit=max(held[0] + 3, held[1] + 5), costs=COSTS)
    with pytest.raises(ScheduleError, match=r'beside parameters of 5 at .*above the limit of'):
        check(schedule, memory_limit=held[1] + 4.5, costs=COSTS)


def test_bytes_on_the_command_line(zbpp):
    costs, layers = Path('bytes.json'), Path('layers.json')
    shape = '--pp 2 --microbatches 4 --seconds 0.1'
    case = f'plan {shape} --no-cache --times bytes.json --memory-limit'
    costs.write_text(FILE % ', "parameters": [34e9, 30e9]')
    assert 'peak memory 11.176 GiB' in zbpp(f'{case} 47GB')
    assert 'is below 31.67 GiB of weights' in zbpp.refused(f'{case} 30GiB')
    costs.write_text(FILE % '')
    assert 'says nothing of parameters' in zbpp.refused(f'{case} 60GiB')
    made = layers_of(Shape('gpt', 4, 1024, 16, 8192, 1024, 100.0))
    layers.write_text(made.to_json())
    whole = sum(layer.parameters for layer in made) / GIB
    case = f'partition layers.json {shape} --memory-limit'
    assert 'layout' in zbpp(f'{case} {whole:.3f}GiB')
    assert 'no partition holds' in zbpp.refused(f'{case} {whole / 2:.3f}GiB')
    assert 'all limits in bytes' in zbpp.refused(f'{case} 60GiB,4')
