"""JSON of known fields: what is refused, and in which words."""

from __future__ import annotations

import re

import pytest

from megatron_zbpp.ir import strict_json


@pytest.mark.parametrize(
    ('text', 'said'),
    [
        ('{"a": 1, "a": 2}', "field 'a' is given twice: leave one out"),
        (r'{"a\u001b": 1}', r"field 'a\x1b' has control characters in its name"),
        ('[NaN]', 'NaN'),
        ('[1e999]', '1e999'),
        ('[1000000000000000000]', 'has 19 digits: give at most 18'),
    ],
)
def test_text_that_is_refused(text, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        strict_json.loads(text)


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


@pytest.mark.parametrize(
    ('data', 'said'),
    [
        ([1], '[1] is not an object with the fields m, n'),
        ({'m': 1, 'o': 2}, "field 'o' is not known: there are m, n"),
        ({'m': 1, 'nn': 2}, "field 'nn' is not known (did you mean 'n'?): there are m, n"),
        ({'m': 1.5}, "'m': 1.5 is not an integer"),
        ({'n': 1}, "field 'm' is missing"),
    ],
)
def test_objects(data, said):
    with pytest.raises(ValueError) as raised:
        strict_json.require(data, {'m': strict_json.integer}, {'n': strict_json.number})
    assert str(raised.value) == said


def test_an_object_that_fits():
    strict_json.require({'m': 1}, {'m': strict_json.integer}, {'n': strict_json.number})


def test_depth():
    """What reads a value may recurse: its depth is limited."""
    assert strict_json.loads('[' * 32 + ']' * 32)
    with pytest.raises(ValueError, match='nested too deep: nest at most 32'):
        strict_json.loads('[' * 33 + ']' * 33)
