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
    """Parse JSON."""
    deep = f'brackets are nested too deep: nest at most {_DEEPEST}'
    try:
        data = json.loads(
            text,
            object_pairs_hook=_once,
            parse_int=_number,
            parse_float=_number,
            parse_constant=_number,  # Infinity, -Infinity and NaN
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
    """Check that `value` is an object of JSON."""
    return isinstance(value, dict)


def require_whole(**values: object) -> None:
    """Raise ValueError unless all values are whole numbers; the message names the argument."""
    for name, value in values.items():
        if integer(value) is not None:
            raise ValueError(f'{name} is {value!r}: give a whole number, such as 4')


def other_kind(data: object, otherwise: str, before: str = '') -> str:
    """Name the kind of a file that was given for another, and the cure.

    `otherwise` is returned where the data is of no known kind; `before` precedes the answer.
    """
    found = set(data) if is_object(data) else set[str]()
    for fields, what in _KINDS:
        if fields <= found:
            return f'{before}it is {what}'
    return otherwise


def is_list(value: object) -> TypeGuard[list[Any]]:
    """Check that `value` is a list."""
    return isinstance(value, list)


def require(
    data: object, fields: Mapping[str, Check], optional: Mapping[str, Check] | None = None
) -> None:
    """Check that `data` is an object of these fields."""
    known = {**fields, **(optional or {})}
    if not is_object(data):
        said = _short(data)
        raise ValueError(f'{said} is not an object with the fields {", ".join(known)}')
    for name, value in data.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f' (did you mean {near[0]!r}?)' if near else ''
            raise ValueError(f'field {name!r} is not known{hint}: there are {", ".join(known)}')
        wanted = known[name](value)
        if wanted is not None:
            said = _short(value)
            raise ValueError(f'{name!r}: {said} is not {wanted}')
    for name in fields:
        if name not in data:
            raise ValueError(f'field {name!r} is missing')


def check(fits: Callable[[Any], bool], what: str) -> Check:
    """Return the check of a value that `fits`; of others it says what they should be."""
    return lambda value: None if fits(value) else what


def one_of(*values: object) -> Check:
    """Return the check of one of some `values`; 1 is not true."""
    return check(
        lambda value: any(type(value) is type(each) and value == each for each in values),
        f'one of {", ".join(map(json.dumps, values))}',
    )


def list_of(entry: Check, entries: str, filled: bool = False) -> Check:
    """Return the check of a list of `entries`, each by `entry`; `filled`: not empty."""
    return check(
        lambda value: (
            is_list(value)
            and bool(value or not filled)
            and all(entry(each) is None for each in value)
        ),
        f'a list of {entries}',
    )


def tuple_of(*entries: Check) -> Check:
    """Return the check of a list of so many entries, each by its own."""
    return check(
        lambda value: (
            is_list(value)
            and len(value) == len(entries)
            and all(entry(each) is None for entry, each in zip(entries, value, strict=True))
        ),
        '',
    )


def object_of(entry: Check, entries: str) -> Check:
    """Return the check of an object of `entries`, each value by `entry`."""
    return check(
        lambda value: is_object(value) and all(entry(each) is None for each in value.values()),
        f'an object of {entries}',
    )


anything = check(lambda value: True, '')  # what is checked elsewhere, or not read
integer = check(lambda x: isinstance(x, int) and not isinstance(x, bool), 'an integer')
number = check(lambda x: isinstance(x, int | float) and not isinstance(x, bool), 'a number')
# that a terminal can show; and of any characters, which is read elsewhere
text = check(lambda x: isinstance(x, str) and x.isprintable(), 'text without control characters')
string = check(lambda x: isinstance(x, str), 'text')


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


def _number(digits: str) -> float:
    """Return an integer of not too many digits, or another finite number."""
    if digits.lstrip('-').isdecimal():
        if len(digits) > _DIGITS:
            shown = f'{digits[:_DIGITS]}… has {len(digits)} digits'
            raise ValueError(f'{shown}: give at most {_DIGITS}')
        return int(digits)
    if not isfinite(value := float(digits)):
        raise ValueError(f'{digits} is not a finite number')
    return value


def _short(value: object) -> str:
    said = json.dumps(value)
    return said if len(said) <= 60 else said[:59] + '…'
