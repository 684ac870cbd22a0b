from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_zbpp.analysis.checker import check
from megatron_zbpp.ir import KINDS, Pass, Placement, Schedule, chain, files, formats
from megatron_zbpp.ir.formats import DIALECTS, from_torch_csv, load, to_torch_csv
from megatron_zbpp.schedules import build, names
from megatron_zbpp.techniques.recompute.graph import recompute

PLACEMENTS = [
    Placement.loop(1),
    Placement.loop(3),
    Placement.loop(2, 3),
    Placement.v(3),
    Placement.wave(2, 4),
    Placement.v(2).reversed(),
    Placement.loop(3).reversed(),
    Placement((0, 0, 1, 1, 2)),
]


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
def test_csv_round_trip(schedule: Schedule, dialect: str) -> None:
    assert from_torch_csv(to_torch_csv(schedule, dialect), dialect=dialect) == schedule


@given(schedule=orders())
def test_json_round_trip(schedule: Schedule) -> None:
    assert Schedule.from_json(schedule.to_json()) == schedule


@pytest.mark.parametrize('dialect', DIALECTS)
@pytest.mark.parametrize('name', names(plain=True))
def test_dialect_is_told_by_the_contents(name: str, dialect: str, tmp_path: Path) -> None:
    schedule = build(name, 4, 8)
    file = tmp_path / f'{schedule.name}.csv'
    file.write_text(to_torch_csv(schedule, dialect))
    assert load(file) == schedule
    check(load(file))


def test_a_file_of_torch_goes_back_in_order(tmp_path: Path) -> None:
    """As it is loaded, not as it is read: what was written is read back to the same."""
    text = '0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0\n'
    file = tmp_path / 'bfs.csv'
    file.write_text(text)
    with pytest.warns(UserWarning, match='bfs: backwards begin with microbatch 1'):
        loaded = load(file)
    check(loaded)
    assert loaded.passes == build('gpipe', 2, 2).passes
    assert to_torch_csv(from_torch_csv(text)) == text


def test_kinds_of_the_dialects() -> None:
    def kinds(text: str, dialect: str | None = None) -> list[str]:
        return [p.kind for p in from_torch_csv(text, dialect=dialect).passes[0]]

    assert kinds('0F0,0I0,0W0,0F1,0B1') == ['F', 'B', 'W', 'F', 'BW']
    assert kinds('0F0,0B0,0W0,0F1,0BW1') == ['F', 'B', 'W', 'F', 'BW']
    assert kinds('0F0,0B0,0W0') == ['F', 'B', 'W']
    assert kinds('0F0,0B0') == ['F', 'BW']
    assert kinds('0F0,0B0', 'old') == ['F', 'B']
    assert kinds('0F0,0B0', 'new') == ['F', 'BW']


def test_bubbles_spaces_overlap_and_blank_lines() -> None:
    text = ' 0F0 ,,0F1,,\n,1F0,(1F1;1B0)OVERLAP_F_B,1B1\n\n'
    schedule = from_torch_csv(text)
    assert [list(map(str, row)) for row in schedule.passes] == [
        ['0F0', '0F1'],
        ['1F0', '1F1', '1BW0', '1BW1'],
    ]
    assert list(map(str, schedule.order(1))) == ['1F0', '(1F1&1BW0)', '1BW1']
    assert to_torch_csv(schedule) == '0F0,0F1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1\n'
    assert Schedule.from_json(schedule.to_json()) == schedule


def test_what_torch_has_no_name_for_is_refused() -> None:
    graph = recompute(chain(1), (0,))
    orders = [[Pass('F', 0, 0), Pass('R', 0, 0), Pass('BW', 0, 0)]]
    with pytest.raises(ValueError, match='0R0: the CSV of torch has F, B and W of whole'):
        to_torch_csv(Schedule.of('again', Placement.loop(1), 1, orders, graph))


def test_lowered_actions_are_dropped_with_a_note() -> None:
    text = '0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD\n1RECV_F0,1F0,1B0,1SEND_B0\n'
    with pytest.warns(UserWarning, match='dropped 6 sends'):
        assert from_torch_csv(text) == from_torch_csv('0F0,0B0\n1F0,1B0')


@pytest.mark.parametrize(
    ('text', 'said'),
    [
        ('', 'not a schedule'),
        ('\n,,\n', 'not a schedule'),
        ('hello', "row 0, column 0: 'hello' is not an action"),
        ('0F0,0B0\n1F0,1X0', "row 1, column 1: '1X0'"),
        ('0F0\n\n1F0', 'row 1 has no passes'),
        ('0F0,1F0\n1F0', 'row 1 has 1F0, but row 0 has passes of stage 1'),
        ('0F0\n2F0', 'stage 1 has no passes'),
        ('0F0,99999999999F0', 'stage 1 has no passes'),
        ('0F0,0I0,0W0,0BW1', "'I' and 'BW'"),
        ('[1, 2]', 'not a schedule'),
        (
            '{"F": [1], "B": [1], "W": [1]}',
            'not a schedule: no "format": "megatron_zbpp.schedule/2" in it: it is ',
        ),
        ('{"format": 1}', 'format 1 is not one of megatron_zbpp.schedule/1'),
        ('{"format"', 'Expecting'),
        ('\x00\xff', 'is not an action'),
        ('{"schedule": ' * 9999, 'nested'),
        (
            build('1f1b', 2, 2).to_json().replace('[\n   0,\n   1\n  ]', '[0, 999999999999]'),
            'give each rank',
        ),
    ],
)
def test_bad_files_name_the_place(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / 'bad.csv'
    file.write_text(text, encoding='utf-8')
    with pytest.raises(ValueError, match=said) as caught:
        load(file)
    assert str(file) in str(caught.value)
    assert '\n' not in str(caught.value)


def test_binary_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / 'model.pt'
    file.write_bytes(bytes(range(256)) * 100)
    with pytest.raises(ValueError, match=r'model\.pt'):
        load(file)


def test_forced_dialect_refuses_the_other_ones_kinds() -> None:
    with pytest.raises(ValueError, match=r"'BW'.*'new'"):
        from_torch_csv('0F0,0BW0', dialect='new')
    with pytest.raises(ValueError, match="dialect 'newer' is not known"):
        to_torch_csv(build('1f1b', 2, 2), 'newer')


def test_a_plan_is_a_schedule_file(tmp_path: Path) -> None:
    schedule = build('zb-v', 2, 4)
    file = tmp_path / 'plan.json'
    file.write_text(json.dumps({'makespan': 1.0, 'schedule': json.loads(schedule.to_json())}))
    assert load(file) == schedule


def test_byte_order_mark_and_windows_lines(tmp_path: Path) -> None:
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
