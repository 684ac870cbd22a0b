"""Whatever stands in a file: it is read as it is meant, or refused in words that a terminal shows.

Each reader of JSON gets what it wrote itself with one thing changed.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from hashlib import sha256

import pytest
from documents import ODD, changed, places
from hypothesis import given
from hypothesis import strategies as st
from instances import NODES
from instances import P1 as LAYERS

from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.cli import main
from megatron_zbpp.ir import Schedule, formats, strict_json
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.partitioning.devices import Devices
from megatron_zbpp.partitioning.layers import Layers
from megatron_zbpp.planner import cache
from megatron_zbpp.runtime.measure import Measurement
from megatron_zbpp.schedules import build

SCHEDULE = build('zb-v', 2, 2)
COSTS = Costs.uniform(SCHEDULE.placement)
TIMELINE = simulate(SCHEDULE, COSTS)
FIELDS = json.loads(json.dumps(asdict(COSTS.with_times(R=[1.0] * 4)) | {'edges': [[0, 1, 0.5]]}))
FILE = {kind: FIELDS['times'][kind] for kind in 'FBW'}


# by reader: the function, a document that it reads, and how to write what was read
READERS = {
    'schedule': (Schedule.from_json, SCHEDULE.to_json(), Schedule.to_json),
    'plan or schedule': (formats.from_json, SCHEDULE.to_json(), Schedule.to_json),
    'costs': (Costs.from_json, json.dumps(FILE), None),
    'costs of a plan': (
        lambda text: Costs.from_fields(strict_json.loads(text)),
        json.dumps(FIELDS),
        lambda costs: json.dumps(asdict(costs)),
    ),
    'layers': (Layers.from_json, LAYERS.to_json(), None),
    'devices': (Devices.from_json, NODES.to_json(), None),
    'measurement': (
        Measurement.from_json,
        Measurement(TIMELINE, (1.0, 2.0)).to_json(),
        Measurement.to_json,
    ),
}


def filled_in(document, written):
    """A document with what it leaves out and `written` has."""
    if not isinstance(document, dict) or not isinstance(written, dict):
        return document
    inside = {k: filled_in(v, written[k]) if k in written else v for k, v in document.items()}
    return written | inside


@pytest.mark.parametrize('reader', READERS)
@given(st.data())
def test_one_thing_is_changed(reader, data):
    read, text, write = READERS[reader]
    original = json.loads(text)
    path = data.draw(st.sampled_from([*places(original)]))
    how = data.draw(st.sampled_from(['replaced', 'gone', 'added']))
    document = changed(original, path, how, data.draw(ODD))
    try:
        found = read(json.dumps(document))
    except ValueError as error:
        assert all(c.isprintable() or c == '\n' for c in str(error)), repr(str(error))
        return
    if write is not None:
        written = json.loads(write(found))
        # 1, 1.0 and true have different texts
        filled = json.dumps(filled_in(document, written), sort_keys=True)
        assert json.dumps(written, sort_keys=True) == filled


@pytest.mark.parametrize(
    'text', ['{"a": 1, "a": 2}', '{"a\\u001b": 1}', '[1e999]', f'[1{"0" * 18}]']
)
def test_json_itself(text):
    for read, _, _ in READERS.values():
        with pytest.raises(ValueError) as error:
            read(text)
        assert str(error.value).isprintable()


def test_a_plan_of_another_type_is_planned_anew(tmp_path):
    """Though its digest is right."""
    plan = {'schedule': SCHEDULE.to_json(), 'costs': FIELDS, 'best_named': None}
    plan |= {'objective': 'makespan', 'value': True, 'lower_bound': 0, 'repeats': False}
    body = json.dumps(plan)
    file = tmp_path / 'a.plan'
    file.write_text(f'{sha256(body.encode()).hexdigest()}\n{body}')
    with pytest.warns(UserWarning, match="'value': true is not a number"):
        assert cache._load(file) is None


@pytest.mark.parametrize('text', ['0F0,0B0\n', 'no schedule'])
def test_control_characters_of_a_file_name(tmp_path, capsys, text):
    """As in what a shell makes of `*.csv`."""
    file = tmp_path / 'evil\x1b[2J\x07.csv'
    file.write_text(text)
    main(['check', str(file)])
    main(['show', '--file', str(file)])
    shown = ''.join(capsys.readouterr())
    assert 'evil' in shown
    assert all(c.isprintable() or c == '\n' for c in shown)
