import json
from dataclasses import asdict
from pathlib import Path

import pytest
from documents import ODD, changed, places
from hypothesis import given
from hypothesis import strategies as st
from orders import texts

from megatron_zbpp import (
    Costs,
    Pass,
    Placement,
    Schedule,
    build,
    check,
    load,
    simulate,
)
from megatron_zbpp.cli import main
from megatron_zbpp.ir import KINDS, files, formats, strict_json
from megatron_zbpp.ir.formats import DIALECTS, from_torch_csv, to_torch_csv
from megatron_zbpp.planner import cache
from megatron_zbpp.runtime.measure import Measurement
from megatron_zbpp.schedules import names, own_families

PLACEMENTS = [
    Placement.loop(1), Placement.loop(3), Placement.loop(2, 3), Placement.v(3),
    Placement.wave(2, 4), Placement.v(2).reversed(), Placement.loop(3).reversed(),
    Placement((0, 0, 1, 1, 2)),
]  # fmt: skip


@st.composite
def orders(draw: st.DrawFn) -> Schedule:
    """Any passes in any order, each stage at least once and the last microbatch too."""
    placement = draw(st.sampled_from(PLACEMENTS))
    m = draw(st.integers(1, 12))
    drawn = st.builds(Pass, st.sampled_from(KINDS), st.just(0), st.integers(0, m - 1), st.just(0))
    passes = []
    for rank in range(placement.num_ranks):
        held = placement.stages(rank)
        more = [p._replace(stage=draw(st.sampled_from(held))) for p in draw(st.lists(drawn))]
        passes.append(draw(st.permutations([Pass('F', s, m - 1) for s in held] + more)))
    return Schedule.of('torch-csv', placement, m, passes)


@given(schedule=orders(), dialect=st.sampled_from(DIALECTS))
def test_csv_and_json_round_trip(schedule, dialect):
    assert from_torch_csv(to_torch_csv(schedule, dialect), dialect=dialect) == schedule
    assert Schedule.from_json(schedule.to_json()) == schedule


@pytest.mark.parametrize('family', own_families(every=True), ids=lambda family: family.name)
def test_every_family_is_read_as_it_is_written(family):
    schedule = build(family.name, 4, 7)
    assert Schedule.from_json(schedule.to_json()) == schedule


@pytest.mark.parametrize('dialect', DIALECTS)
@pytest.mark.parametrize('name', names(plain=True))
def test_dialect_is_told_by_the_contents(name, dialect, tmp_path):
    schedule = build(name, 4, 8)
    file = tmp_path / f'{schedule.name}.csv'
    file.write_text(to_torch_csv(schedule, dialect))
    assert load(file) == schedule
    check(load(file))


def test_a_file_of_torch_goes_back_in_order(tmp_path):
    """As it is loaded, not as it is read: what was written is read back to the same."""
    text = '0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0\n'
    file = tmp_path / 'bfs.csv'
    file.write_text(text)
    with pytest.warns(UserWarning, match='bfs: backwards begin with microbatch 1'):
        loaded = load(file)
    check(loaded)
    assert loaded.passes == build('gpipe', 2, 2).passes
    assert to_torch_csv(from_torch_csv(text)) == text


def test_kinds_of_the_dialects():
    def kinds(text: str, dialect: str | None = None) -> list[str]:
        return [p.kind for p in from_torch_csv(text, dialect=dialect).passes[0]]

    assert kinds('0F0,0I0,0W0,0F1,0B1') == ['F', 'B', 'W', 'F', 'BW']
    assert kinds('0F0,0B0,0W0,0F1,0BW1') == ['F', 'B', 'W', 'F', 'BW']
    assert kinds('0F0,0B0,0W0') == ['F', 'B', 'W']
    assert kinds('0F0,0B0') == ['F', 'BW']
    assert kinds('0F0,0B0', 'old') == ['F', 'B']
    assert kinds('0F0,0B0', 'new') == ['F', 'BW']
    text = ' 0F0 ,,0F1,,\n,1F0,(1F1;1B0)OVERLAP_F_B,1B1\n\n'
    schedule = from_torch_csv(text)
    assert texts(schedule) == ['0F0 0F1', '1F0 1F1 1BW0 1BW1']
    assert list(map(str, schedule.order(1))) == ['1F0', '(1F1&1BW0)', '1BW1']
    assert to_torch_csv(schedule) == '0F0,0F1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1\n'
    assert Schedule.from_json(schedule.to_json()) == schedule


def test_what_is_no_plain_file_of_a_schedule(tmp_path):
    text = '0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD\n1RECV_F0,1F0,1B0,1SEND_B0\n'
    with pytest.warns(UserWarning, match='dropped 6 sends'):
        assert from_torch_csv(text) == from_torch_csv('0F0,0B0\n1F0,1B0')
    schedule = build('zb-v', 2, 4)
    file = tmp_path / 'plan.json'
    file.write_text(json.dumps({'makespan': 1.0, 'schedule': json.loads(schedule.to_json())}))
    assert load(file) == schedule
    file = tmp_path / '1f1b.csv'
    text = to_torch_csv(build('1f1b', 2, 2)).replace('\n', '\r\n')
    file.write_bytes(b'\xef\xbb\xbf' + text.encode())
    assert load(file) == build('1f1b', 2, 2)


@pytest.mark.parametrize('write', [Schedule.to_json, to_torch_csv])
def test_a_file_of_too_many_passes_is_refused_before_they_are_made(tmp_path, monkeypatch, write):
    schedule = build('zb-h1', 3, 40)
    file = tmp_path / 'large'
    file.write_text(write(schedule))
    monkeypatch.setattr(formats, 'MOST_PASSES', 360)
    assert formats.load(file).passes == schedule.passes
    monkeypatch.setattr(formats, 'MOST_PASSES', 359)
    with pytest.raises(ValueError, match='360 passes: at most 359 can be checked; give fewer'):
        formats.load(file)
    monkeypatch.setattr(files, 'MOST_BYTES', 640)
    with pytest.raises(ValueError, match=r'large: more than 640 bytes: give a shorter file'):
        formats.load(file)


# ---- Whatever stands in a file: it is read as it is meant, or refused in printable words.


SCHEDULE = build('zb-v', 2, 2)
COSTS = Costs.uniform(SCHEDULE.placement)
MEASURED = Measurement(simulate(SCHEDULE, COSTS), (1.0, 2.0))
FIELDS = json.loads(json.dumps(asdict(COSTS.with_times(R=[1.0] * 4)) | {'edges': [[0, 1, 0.5]]}))

# by reader: the function, a document that it reads, and how to write what was read; files of users
# are read in cli/test_any_file.py, too
READERS = {
    'schedule': (Schedule.from_json, SCHEDULE.to_json(), Schedule.to_json),
    'costs of a plan': (
        lambda text: Costs.from_fields(strict_json.loads(text)),
        json.dumps(FIELDS),
        lambda costs: json.dumps(asdict(costs)),
    ),
    'measurement': (Measurement.from_json, MEASURED.to_json(), Measurement.to_json),
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
    written = json.loads(write(found))
    # 1, 1.0 and true have different texts
    filled = json.dumps(filled_in(document, written), sort_keys=True)
    assert json.dumps(written, sort_keys=True) == filled


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


# ---- Files that were written when F, B and W were fields of costs are read to the same values.


WRITTEN = Path(__file__).with_name('written')
OLD_COSTS = Costs(
    {'F': (1.0, 2.0), 'B': (1.5, 2.5), 'W': (0.5, 0.75), 'R': (1.0, 2.0), 'O': (0.5, 0.5)},
    {'activation': (1.0, 2.0), 'retained': (0.5, 1.5), 'input': (0.1, 0.2)},
    0.25,
    0.125,
    parameters=(3.0, 4.0),
    edges=((0, 1, 0.5),),
    speeds=(1.0, 0.5),
    together=0.9,
)
APART = {  # as users write it
    **{kind: OLD_COSTS.times[kind] for kind in 'FBW'},
    **{name: OLD_COSTS.amounts[name] for name in ('activation', 'retained')},
    'times': {kind: OLD_COSTS.times[kind] for kind in 'RO'},
    'amounts': {'input': OLD_COSTS.amounts['input']},
    **{name: getattr(OLD_COSTS, name) for name in 'comm message parameters together'.split()},
    **{name: getattr(OLD_COSTS, name) for name in ('edges', 'speeds')},
}


def text(name: str) -> str:
    return (WRITTEN / name).read_text()


def test_files_of_before():
    assert Costs.from_fields(strict_json.loads(text('costs.json'))) == OLD_COSTS
    assert Costs.from_fields(strict_json.loads(json.dumps(asdict(OLD_COSTS)))) == OLD_COSTS
    assert Costs.from_json(json.dumps(APART)) == OLD_COSTS
    assert Costs.from_json(json.dumps(asdict(OLD_COSTS))) == OLD_COSTS
    apart = {**APART, 'selective': {'B': [2.0, 3.0], 'activation': [0.5, 1.0]}}
    inside = {'times': {'B': [2.0, 3.0]}, 'amounts': {'activation': [0.5, 1.0]}}
    found = Costs.from_json(json.dumps(apart), selective=True)
    assert found == Costs.from_json(json.dumps({**asdict(OLD_COSTS), 'selective': inside}), True)
    assert found == OLD_COSTS.with_times(B=(2.0, 3.0), O=(0.25, 0.25)).with_amounts(
        activation=(0.5, 1.0)
    )
    found = cache._load(WRITTEN / 'old.plan')
    assert found is not None and found.costs == OLD_COSTS
    assert found.schedule == Schedule.from_json(text('schedule.json'))


CHECKS = {
    'integer': (strict_json.integer, [0, -3], [True, 1.0, '1', None], 'an integer'),
    'number': (strict_json.number, [0, 2.5], [True, '1', None], 'a number'),
    'text': (strict_json.text, ['', 'a'], ['a\x1b', 1], 'text without control characters'),
    'string': (strict_json.string, ['a\x1b'], [1, None], 'text'),
    'one of': (strict_json.one_of('a', 1), ['a', 1], ['b', True, 1.0], 'one of "a", 1'),
}


@pytest.mark.parametrize('name', CHECKS)
def test_values(name):
    check, good, bad, said = CHECKS[name]
    assert [check(value) for value in good] == [None] * len(good)
    assert [check(value) for value in bad] == [said] * len(bad)


def test_an_object_that_fits():
    """Also at the most depth of what may recurse."""
    strict_json.require({'m': 1}, {'m': strict_json.integer}, {'n': strict_json.number})
    assert strict_json.loads('[' * 32 + ']' * 32)
