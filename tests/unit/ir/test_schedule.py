"""The schedule as a value."""

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_zbpp.ir import KINDS, Pass, Placement, Schedule
from megatron_zbpp.schedules import build

passes = st.builds(
    Pass, st.sampled_from(KINDS), st.integers(0, 99), st.integers(0, 999), st.integers(0, 9)
)


@given(passes)
def test_pass_text_and_back(p):
    assert Pass.parse(str(p)) == p


@pytest.mark.parametrize('text', ['', 'F', '3f1', '3F', 'F1', '-1F0', '3F1 4B2'])
def test_pass_of_another_form(text):
    with pytest.raises(ValueError, match='is not a pass'):
        Pass.parse(text)


def test_placements():
    assert Placement.loop(3, 2).only_route == (0, 1, 2, 0, 1, 2)
    assert Placement.v(3).only_route == (0, 1, 2, 2, 1, 0)
    assert Placement.wave(2, 4).only_route == (0, 1, 1, 0, 0, 1, 1, 0)
    named = Placement.loop(3, 2), Placement.v(3), Placement.wave(3, 2), Placement.wave(2, 4)
    assert [placement.name for placement in named] == ['loop', 'v', 'v', 'wave']
    vee = Placement.v(3)
    assert [vee.stages(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert vee.chunks == (0, 0, 0, 1, 1, 1) and vee.num_chunks == 2
    assert vee.reversed().only_route == (2, 1, 0, 0, 1, 2) and vee.reversed().reversed() == vee
    assert vee.reversed().name == vee.name


def test_two_routes_have_no_only_one():
    two = Placement.two_way(2)
    assert two.routes == ((0, 1), (1, 0)) and not two.is_one_way
    with pytest.raises(ValueError, match=r"'two-way' has two routes.*: take a schedule with one"):
        two.only_route  # noqa: B018


@pytest.mark.parametrize('ranks', [(), (1,), (0, 2), (-1, 0)])
def test_placement_with_an_empty_rank(ranks):
    with pytest.raises(ValueError, match='is not valid'):
        Placement(ranks)


@pytest.mark.parametrize('name', ['1f1b', 'zb-h1', 'zb-v'])
def test_json_and_back(name):
    schedule = build(name, 3, 5)
    assert Schedule.from_json(schedule.to_json()) == schedule


@pytest.mark.parametrize('text', ['{}', '[]', '{"format": "megatron_zbpp.schedule/1"}', 'x'])
def test_json_of_something_else(text):
    with pytest.raises(ValueError):
        Schedule.from_json(text)


@pytest.mark.parametrize(
    ('old', 'new', 'said'),
    [
        (
            '"num_microbatches": 2',
            '"num_microbatches": 2.7',
            '2.7 is not an integer',
        ),
        ('"num_microbatches": 2', '"num_microbatches": true', 'true is not an integer'),
        ('"num_microbatches": 2', '"num_microbatches": 1e999', '1e999 is not a finite number'),
        ('"num_microbatches": 2', '"num_microbatches": NaN', 'NaN is not a finite number'),
        ('"num_microbatches": 2', '"num_microbatches": 2, "m": 2', "field 'm' is not known"),
        ('"num_microbatches"', '"num_microbatchs"', "did you mean 'num_microbatches'"),
        ('"num_microbatches": 2,', '', "field 'num_microbatches' is missing"),
        ('"format"', '"name": "a", "format"', "field 'name' is given twice"),
        ('"name": "1f1b"', '"name": ["1f1b"]', '"1f1b"] is not text without control'),
        ('"name": "1f1b"', '"name": null', 'null is not text'),
        ('"name": "1f1b"', '"name": "a\\u001b[2J"', 'is not text without control characters'),
        ('"ranks": [0, 1]', '"ranks": [0.0, 1.0]', 'is not a list of integers'),
        ('"ranks": [0, 1]', '"ranks": [false, true]', 'is not a list of integers'),
        ('0F0', '0F\u0660', 'is not a pass'),
        ('schedule/2', 'schedule/9', 'is the file of a newer release?'),
    ],
)
def test_fields_have_the_types_that_they_ask_for(old, new, said):
    text = json.dumps(json.loads(build('1f1b', 2, 2).to_json()), ensure_ascii=False)
    assert old in text
    with pytest.raises(ValueError, match=re.escape(said)):
        Schedule.from_json(text.replace(old, new, 1))


def test_reversed_and_forward_only():
    schedule = build('zb-v', 2, 3)
    assert schedule.reversed().reversed() == schedule
    assert schedule.reversed().passes == schedule.passes[::-1]
    cells = replace(schedule, together=frozenset({(0, 2), (1, 3)}))
    assert cells.reversed().together == {(1, 2), (0, 3)}
    forward = schedule.forward_only()
    assert sum(map(len, forward.passes)) == 4 * 3
    assert all(p.kind == 'F' for _, p in forward)


def test_placements_are_equal_by_their_ranks():
    """A plan's placement has no name, and a model that was laid out for a V fits it."""
    v = Placement.v(4)
    assert Placement(v.only_route) == v and hash(Placement(v.only_route)) == hash(v)
    assert Placement(v.only_route) != v.reversed()
