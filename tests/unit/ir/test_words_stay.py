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
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest

from megatron_zbpp.analysis.checker import check
from megatron_zbpp.ir import Pass, Placement, Schedule, chain, formats, strict_json
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.layout import layers_per_stage
from megatron_zbpp.ir.techniques import applied
from megatron_zbpp.planner.actions import plan_within
from megatron_zbpp.planner.limits import Bytes, Candidate
from megatron_zbpp.planner.plans import plan
from megatron_zbpp.schedules import build, find, registry
from megatron_zbpp.schedules.construct.phases import phases
from megatron_zbpp.techniques.amounts import chunks_of
from megatron_zbpp.techniques.base import with_copies
from megatron_zbpp.techniques.offload.graph import offload
from megatron_zbpp.techniques.offload.place import offloaded
from megatron_zbpp.techniques.recompute.graph import recompute
from megatron_zbpp.techniques.recompute.place import recomputed
from megatron_zbpp.techniques.slices.graph import sliced
from megatron_zbpp.techniques.updates.graph import updating
from megatron_zbpp.techniques.vocabulary.graph import split_vocabulary

FILE = Path(__file__).with_name('words.json')
LOOP = Placement.loop(2)
ONES = (1.0, 1.0)


def costs(**others: object) -> Costs:
    """Two stages."""
    return Costs.of(**{'forward': ONES, 'backward': ONES, 'weight': ONES, **others})


def of(*orders: str, placement: Placement = LOOP, m: int = 1, limit: float | None = None) -> None:
    """Check a schedule of these orders."""
    passes = [[Pass.parse(word) for word in order.split()] for order in orders]
    check(Schedule.of('mine', placement, m, passes), memory_limit=limit)


def read(content: bytes) -> None:
    """Read a file of this content."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / 'mine'
        file.write_bytes(content)
        try:
            formats.load(file)
        except ValueError as error:
            raise ValueError(str(error).replace(folder, 'FOLDER')) from error


def within(candidates: list[Candidate], **others: object) -> None:
    """Plan with actions under a limit that one microbatch does not keep."""
    plan_within(candidates, 4, **{'actions': ('offload',), 'memory_limit': 0.1, **others})


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
    'recompute: twice': lambda: recompute(recompute(chain(2), [0]), [0]),
    'recompute: stage': lambda: recompute(chain(2), [2]),
    'offload: to': lambda: offload(chain(2), [0], 'disk'),
    'sliced: none': lambda: sliced(chain(2), 0),
    'sliced: twice': lambda: sliced(sliced(chain(2), 2), 2),
    'vocabulary: barriers': lambda: split_vocabulary(chain(2), 2, 3),
    'updating: never': lambda: updating(chain(2), 0),
    'technique: name': lambda: applied(2, [('fold', ())]),
    'technique: arguments': lambda: applied(2, [('sliced', (1, 2, 3))]),
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
    'offloaded: amount': lambda: chunks_of('some', 2, 'offload', ('auto',)),
    'offloaded: chunks': lambda: chunks_of(3, 2, 'offload'),
    'offloaded: ratio': lambda: with_copies(costs(), 0),
    'recomputed: twice': lambda: recomputed(recomputed(build('1f1b', 2, 4), 1), 1),
    # files that are read
    'read: no text': lambda: read(b'\xff\xfe\x00'),
    'read: nested': lambda: read(b'[' * 100_000),
    'read: no schedule': lambda: read(b'one,two'),
    'read: a layout': lambda: read(b'{"layout": 3, "schedule": 1}'),
    'read: two rows': lambda: formats.from_torch_csv('0F0,0B0\n0F1,0B1\n'),
    'read: a gap': lambda: formats.from_torch_csv('0F0,0B0\n2F0,2B0\n'),
    'read: the dialect': lambda: formats.from_torch_csv('0F0,0I0,0W0', 'mine', 'old'),
    'written: a kind': lambda: formats.to_torch_csv(recomputed(build('1f1b', 2, 4), 1)),
    'json: no object': lambda: strict_json.require([1], {'a': strict_json.text}),
    'json: near': lambda: strict_json.require({'nam': 1}, {'name': strict_json.text}),
    'json: missing': lambda: strict_json.require({}, {'name': strict_json.text}),
    'json: integer': lambda: strict_json.require({'m': True}, {'m': strict_json.integer}),
    'json: number': lambda: strict_json.require({'t': '1'}, {'t': strict_json.number}),
    'json: text': lambda: strict_json.require({'t': 'a\n'}, {'t': strict_json.text}),
    'json: string': lambda: strict_json.require({'t': 1}, {'t': strict_json.string}),
    'json: one of': lambda: strict_json.require({'t': 1}, {'t': strict_json.one_of('a', True)}),
    'json: list': lambda: strict_json.require(
        {'t': ['a'] * 99}, {'t': strict_json.list_of(strict_json.number, 'times')}
    ),
    'json: as long as is shown': lambda: strict_json.require('a' * 58, {}),
    'json: longer': lambda: strict_json.require('a' * 59, {}),
    'json: control': lambda: strict_json.loads('{"a\\u0007": 1}'),
    'json: given twice': lambda: strict_json.loads('{"a": 1, "a": 2}'),
    'json: digits': lambda: strict_json.loads('1' * 999),
    'json: infinite': lambda: strict_json.loads('1e999'),
    'json: not finite': lambda: strict_json.loads('NaN'),
    'json: no json': lambda: strict_json.loads('{"a": }'),
    'costs: together': lambda: costs(together=0.0),
    'costs: selective': lambda: Costs.from_json('{"F": [1], "B": [1], "W": [1]}', selective=True),
    'technique: type': lambda: Schedule.from_json(
        build('1f1b', 1, 1)
        .to_json()
        .replace('"techniques": []', '"techniques": [["sliced", ["a"]]]')
    ),
    # what a generator made, and of what
    'build: together': lambda: build('1f1b', 2, 4, together=True),
    'phases: no pass': lambda: phases([0, 2], 2, [(1, 'F2', 'go')]),
    'phases: two ways': lambda: phases(
        [0, 2], 2, [(4, 'F', 'go'), (4, 'B W', 'end'), (1, 'W0', 'more')]
    ),
    'phases: too few': lambda: phases([0, 2], 2, [(3, 'F', 'go')]),
    'memory: too small': lambda: build('zb-2p', 3, 6, memory_limit=0.25),
    # plans
    'plan: nowhere': lambda: plan([], 4),
    'plan: objective': lambda: plan([(LOOP, costs())], 4, objective='speed'),
    'plan: limit': lambda: plan([(LOOP, costs())], 4, memory_limit=0.5),
    'plan: limit in bytes': lambda: plan([(LOOP, costs())], 4, memory_limit=Bytes(0.5)),
    'plan: limit of a rank': lambda: plan(
        [(LOOP, costs(parameters=(2.0, 0.0)))], 4, memory_limit=1.5
    ),
    'plan: limits': lambda: plan([(LOOP, costs())], 4, memory_limit=(2, 2, 2)),
    'plan: no limit': lambda: plan([(LOOP, costs())], 4, memory_limit=-1),
    'actions: nowhere': lambda: within([]),
    'actions: objective': lambda: within([(LOOP, costs())], objective='speed'),
    'actions: unknown': lambda: within([(LOOP, costs())], actions=('compress',)),
    'actions: times': lambda: within([(LOOP, costs())]),
    'actions: no time': lambda: within([(LOOP, costs(times={'O': ONES, 'L': (0.0, 1.0)}))]),
    'actions: input': lambda: within([(LOOP, costs(times={'R': ONES}))], actions=('recompute',)),
    'actions: limit': lambda: within([(LOOP, costs(times={'O': ONES, 'L': ONES}))]),
}


def words(case: str) -> str:
    """Return what is said where nobody has registered a schedule of one's own."""
    ours = {name: family for name, family in registry._FAMILIES.items() if ':' not in name}
    with (
        patch.dict(registry._FAMILIES, ours, clear=True),
        pytest.raises(ValueError) as raised,
    ):
        CASES[case]()
    return str(raised.value)


@pytest.mark.parametrize('case', CASES)
def test_words_stay(case):
    assert words(case) == json.loads(FILE.read_text())[case]


if __name__ == '__main__':
    FILE.write_text(json.dumps({case: words(case) for case in CASES}, indent=1) + '\n')
