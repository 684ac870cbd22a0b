"""Reads JSON of which every field is known and has exactly the type that it asks for.

>>> loads('{"a": 1, "a": 2}')
Traceback (most recent call last):
ValueError: field 'a' is given twice: leave one out
>>> require({'m': True}, {'m': integer})
Traceback (most recent call last):
ValueError: 'm': true is not an integer
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any, TypeGuard

# Files by fields that no other kind has.
_KINDS = (
    ({'schedule', 'makespan'}, 'a plan, for --file'),
    ({'layers'}, 'a file of layers, for zbpp partition'),
    ({'devices'}, 'a file of devices, for --devices'),
    ({'passes', 'placement'}, 'a schedule, for --file'),
    ({'F', 'B', 'W'}, 'a file of costs, for --times'),
    ({'times', 'amounts'}, 'a file of costs, for --times'),
)
_DIGITS = 18  # of an integer: less than what a float or a machine's integer can hold
_DEEPEST = 32  # lists and objects in each other: files of ours have less than ten
Check = Callable[[object], str | None]  # what a value should be, where it is not


def loads(text: str) -> object:
    """Parse JSON.

    Raises:
        ValueError: it is not JSON, has a field twice or one whose name no terminal can show, a
            number that is not finite, an integer of more than 18 digits, or nests too deep.
    """
    deep = f'brackets are nested too deep: nest at most {_DEEPEST}'
    try:
        data = json.loads(
            text,
            object_pairs_hook=_once,
            parse_int=_moderate,
            parse_float=_finite,
            parse_constant=_not_finite,
        )
    except RecursionError as error:
        raise ValueError(deep) from error
    except json.JSONDecodeError as error:
        what = f'no JSON ({error})' if text.strip() else 'empty'
        raise ValueError(f'it is {what}: give the file that a command wrote') from error
    level = [data]
    for _ in range(_DEEPEST):  # what reads it, and writes it in messages, may recurse
        held = (each.values() if is_object(each) else each for each in level if _holds(each))
        level = [each for values in held for each in values if _holds(each)]
    if level:
        raise ValueError(deep)
    return data


def _holds(value: object) -> bool:
    return isinstance(value, dict | list)


def printable(text: str) -> str:
    """Return `text` as a terminal can show it: control characters as escapes.

    >>> print(printable(f'zb-v{chr(27)}[2J').replace(chr(92), '/'))
    zb-v/x1b[2J
    """
    return ''.join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def is_object(value: object) -> TypeGuard[dict[str, Any]]:
    """Return whether `value` is what JSON calls an object."""
    return isinstance(value, dict)


def require_whole(**values: object) -> None:
    """Raise ValueError unless all values are whole numbers; the message names the argument."""
    for name, value in values.items():
        if integer(value) is not None:
            raise ValueError(f'{name} is {value!r}: give a whole number, such as 4')


def other_kind(data: object, otherwise: str, before: str = '') -> str:
    """Name the kind of a file that was given for another, and the cure.

    Args:
        data: of the file.
        otherwise: to return where it is of no known kind.
        before: that comes before the answer.
    """
    found = set(data) if is_object(data) else set[str]()
    for fields, what in _KINDS:
        if fields <= found:
            return f'{before}it is {what}'
    return otherwise


def is_list(value: object) -> TypeGuard[list[Any]]:
    """Return whether `value` is a list."""
    return isinstance(value, list)


def require(
    data: object, fields: Mapping[str, Check], optional: Mapping[str, Check] | None = None
) -> None:
    """Check that `data` is an object of these fields.

    Args:
        data: as `loads` returned it.
        fields: that must be there, each with the check of its value.
        optional: the same, of those that may be.

    Raises:
        ValueError: one lacks, is not known, or is of another type; the message names it.
    """
    known = {**fields, **(optional or {})}
    if not is_object(data):
        raise ValueError(f'{_short(data)} is not an object with the fields {", ".join(known)}')
    for name, value in data.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f' (did you mean {near[0]!r}?)' if near else ''
            raise ValueError(f'field {name!r} is not known{hint}: there are {", ".join(known)}')
        wanted = known[name](value)
        if wanted is not None:
            raise ValueError(f'{name!r}: {_short(value)} is not {wanted}')
    for name in fields:
        if name not in data:
            raise ValueError(f'field {name!r} is missing')


def anything(value: object) -> None:
    """Check a value that is checked elsewhere, or not read."""


def integer(value: object) -> str | None:
    """Check an int; true and 1.0 are none."""
    return None if isinstance(value, int) and not isinstance(value, bool) else 'an integer'


def number(value: object) -> str | None:
    """Check an int or a float."""
    fits = isinstance(value, int | float) and not isinstance(value, bool)
    return None if fits else 'a number'


def text(value: object) -> str | None:
    """Check text that a terminal can show: no control characters."""
    fits = isinstance(value, str) and value.isprintable()
    return None if fits else 'text without control characters'


def string(value: object) -> str | None:
    """Check text of any characters, which is read elsewhere."""
    return None if isinstance(value, str) else 'text'


def one_of(*values: object) -> Check:
    """Return the check of one of some `values`; 1 is not true."""

    def fits(value: object) -> str | None:
        good = any(type(value) is type(each) and value == each for each in values)
        return None if good else f'one of {", ".join(map(json.dumps, values))}'

    return fits


def list_of(check: Check, entries: str, filled: bool = False) -> Check:
    """Return the check of a list, each entry by `check`; `entries` says what they are.

    Args:
        check: of an entry.
        entries: for the message.
        filled: whether an empty list is refused.
    """

    def fits(value: object) -> str | None:
        good = is_list(value) and all(check(entry) is None for entry in value)
        good = good and (bool(value) or not filled)
        return None if good else f'a list of {entries}'

    return fits


def object_of(check: Check, entries: str) -> Check:
    """Return the check of an object, each value by `check`; `entries` says what they are."""

    def fits(value: object) -> str | None:
        good = is_object(value) and all(check(entry) is None for entry in value.values())
        return None if good else f'an object of {entries}'

    return fits


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return an object of `pairs`, none of which has the name of another."""
    made: dict[str, object] = {}
    for name, value in pairs:
        if not name.isprintable():
            raise ValueError(f'field {name!r} has control characters in its name')
        if name in made:
            raise ValueError(f'field {name!r} is given twice: leave one out')
        made[name] = value
    return made


def _moderate(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ValueError(f'{digits[:_DIGITS]}… has {len(digits)} digits: give at most {_DIGITS}')
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    return value if isfinite(value) else _not_finite(digits)


def _not_finite(digits: str) -> float:
    raise ValueError(f'{digits} is not a finite number')


def _short(value: object) -> str:
    """Return the value as JSON, cut where it is long."""
    said = json.dumps(value)
    return said if len(said) <= 60 else said[:59] + '…'
