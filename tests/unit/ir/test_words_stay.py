"""What users read of values that cannot be: the words change on purpose only.

`words.json` beside this file holds them. Where they were changed on purpose, write it anew and read
what differs as a user would, who sees the value that is wrong and the cure:

    python tests/unit/ir/test_words_stay.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from math import nan
from pathlib import Path

import pytest

from megatron_zbpp.analysis.checker import check
from megatron_zbpp.analysis.offloading import chunks_of, offloaded, with_copies
from megatron_zbpp.ir import Pass, Placement, Schedule, chain, formats
from megatron_zbpp.ir import techniques as t
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.layout import layers_per_stage
from megatron_zbpp.schedules import build, find

FILE = Path(__file__).with_name('words.json')
LOOP = Placement.loop(2)
ONES = (1.0, 1.0)


def costs(**others: object) -> Costs:
    """Two stages."""
    return Costs(**{'forward': ONES, 'backward': ONES, 'weight': ONES, **others})


def of(*orders: str, placement: Placement = LOOP, m: int = 1, limit: float | None = None) -> None:
    """Check a schedule of these orders."""
    passes = [[Pass.parse(word) for word in order.split()] for order in orders]
    check(Schedule.of('mine', placement, m, passes), memory_limit=limit)


GOOD = '0F0 0BW0', '1F0 1BW0'
CASES: dict[str, Callable[[], object]] = {
    # costs
    'costs: one entry': lambda: costs(weight=(1.0,)),
    'costs: by kind': lambda: costs(times={'R': (1.0,)}),
    'costs: amounts': lambda: costs(amounts={'input': (1.0,)}),
    'costs: twice': lambda: costs(times={'F': ONES}),
    'costs: speed': lambda: costs(speeds=(1.0, 0.0)),
    'costs: number': lambda: costs(comm=nan),
    'costs: no object': lambda: Costs.from_json('[1]'),
    'costs: field': lambda: Costs.from_json('{"F": [1], "B": [1], "W": [1], "retain": [1]}'),
    'costs: kind': lambda: Costs.from_json('{"F": [1], "B": [1]}'),
    'costs: empty': lambda: Costs.from_json('{"F": [], "B": [], "W": []}'),
    'costs: by name': lambda: Costs.from_json('{"F": [1], "B": [1], "W": [1], "times": [1]}'),
    'costs: memory': lambda: Costs.from_json('{"F": [1], "B": [1], "W": [1], "activation": []}'),
    'costs: edges': lambda: Costs.from_json('{"F": [1], "B": [1], "W": [1], "edges": [[0, 1]]}'),
    'costs: numbers': lambda: Costs.from_json('{"F": 1, "B": [1], "W": [1]}'),
    'costs: stages': lambda: costs().require(Placement.v(2)),
    'costs: speeds': lambda: costs(speeds=(1.0,)).require(LOOP),
    'costs: edge': lambda: costs(edges=((0, 2, 1.0),)).require(LOOP),
    # graphs
    'recompute: twice': lambda: t.recompute(t.recompute(chain(2), [0]), [0]),
    'recompute: stage': lambda: t.recompute(chain(2), [2]),
    'offload: to': lambda: t.offload(chain(2), [0], 'disk'),
    'sliced: none': lambda: t.sliced(chain(2), 0),
    'sliced: twice': lambda: t.sliced(t.sliced(chain(2), 2), 2),
    'vocabulary: barriers': lambda: t.split_vocabulary(chain(2), 2, 3),
    'updating: never': lambda: t.updating(chain(2), 0),
    'technique: name': lambda: t.applied(2, [('fold', ())]),
    'technique: arguments': lambda: t.applied(2, [('sliced', (1, 2, 3))]),
    # placements, passes, layouts
    'placement: ranks': lambda: Placement((0, 2)),
    'placement: routes': lambda: Placement((0, 1), '', (0, 1, 0)),
    'placement: route': lambda: Placement((0, 1), '', (), (2,)),
    'pass': lambda: Pass.parse('F0'),
    'schedule: graph': lambda: Schedule('mine', LOOP, 1, ((), ()), chain(3)),
    'layout': lambda: layers_per_stage(5, Placement.v(4)),
    # files
    'file: format': lambda: Schedule.from_json('{"name": "mine"}'),
    'file: release': lambda: Schedule.from_json('{"format": "megatron_zbpp.schedule/99"}'),
    'file: nothing': lambda: formats.from_torch_csv('a,b\n', 'mine'),
    'file: no action': lambda: formats.from_torch_csv('0F0,0X0,0W0\n', 'mine'),
    'file: two ways': lambda: formats.from_torch_csv('0F0,0I0,0W0\n1F0,1BW0\n', 'mine'),
    'file: empty row': lambda: formats.from_torch_csv('0F0,0B0\n,\n1F0,1B0\n', 'mine'),
    'file: dialect': lambda: formats.to_torch_csv(build('1f1b', 2, 2), 'mine'),
    # families
    'build: ranks': lambda: build('dualpipe-v', 1, 4),
    'build: microbatches': lambda: build('1f1b', 2, 0),
    'build: chunks': lambda: build('zb-v', 2, 4, num_chunks=3),
    'build: chunks of many': lambda: build('interleaved', 2, 4, num_chunks=0),
    'build: costs': lambda: build('zb-1p', 3, 4, costs=costs()),
    'build: limit': lambda: build('1f1b', 2, 4, memory_limit=3),
    'build: limit too small': lambda: build('zb-1p', 2, 4, memory_limit=0.5),
    'build: limit of v': lambda: build('1f1b-pb', 2, 4, memory_limit=0.5),
    'find: near': lambda: find('zb_v1'),
    'find: far': lambda: find('nothing'),
    'find: module': lambda: find('no.such.module:mine'),
    'find: name in it': lambda: find('json:mine'),
    # checks
    'check: none': lambda: of(*GOOD, m=0),
    'check: ranks': lambda: of('0F0 0BW0'),
    'check: foreign': lambda: of('0F0 1F0 0BW0', '1BW0'),
    'check: repeated': lambda: of('0F0 0F0 0BW0', '1F0 1BW0'),
    'check: out of turn': lambda: of('0F1 0F0 0BW0 0BW1', '1F0 1BW0 1F1 1BW1', m=2),
    'check: too early': lambda: of('0F0 0BW0', '1BW0 1F0'),
    'check: missing': lambda: of('0F0', '1F0 1BW0'),
    'check: missing W': lambda: of('0F0 0B0 0W0', '1F0 1B0'),
    'check: deadlock': lambda: of(
        '0F0 2F0 0F1 2BW0 0BW0 2F1 2BW1 0BW1',
        '1F0 3F0 3BW0 1BW0 3F1 1F1 3BW1 1BW1',
        placement=Placement.loop(2, 2),
        m=2,
    ),
    'check: memory': lambda: of('0F0 0F1 0BW0 0BW1', '1F0 1BW0 1F1 1BW1', m=2, limit=1),
    'check: limit': lambda: of(*GOOD, limit=-1),
    'offloaded: twice': lambda: offloaded(offloaded(build('zb-v', 2, 4), 1), 1),
    'offloaded: amount': lambda: chunks_of('some', 2),
    'offloaded: chunks': lambda: chunks_of(3, 2),
    'offloaded: ratio': lambda: with_copies(costs(), 0),
}


def words(case: str) -> str:
    """Return what is said."""
    with pytest.raises(ValueError) as raised:
        CASES[case]()
    return str(raised.value)


@pytest.mark.parametrize('case', CASES)
def test_words_stay(case):
    assert words(case) == json.loads(FILE.read_text())[case]


if __name__ == '__main__':
    FILE.write_text(json.dumps({case: words(case) for case in CASES}, indent=1) + '\n')
