"""Answers that change on purpose only: a few digits for each, to be kept in a file."""

import json
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from megatron_zbpp.ir.costs import Costs

# Fields younger than the files: what a value is made of may change where no answer does.
ADDED = 'Kind.of_weights Send.message Receive.message Hand.message Graph.collectives Schedule.costs'


def _as_before(costs: Costs) -> list[object]:
    """Return the fields that `Costs` had when the files began: F, B and W beside `times`."""
    times, amounts = dict(costs.times), dict(costs.amounts)
    plain = [times.pop(kind) for kind in 'FBW']
    held = [amounts.pop(name) for name in ('activation', 'retained')]
    fields = [*plain, costs.comm, costs.message, *held, costs.parameters, times, amounts]
    return [*fields, costs.edges, costs.speeds, costs.together]


def rounded(value: object) -> object:
    """Return it with numbers of nine digits: releases of Python add floats in different ways."""
    if isinstance(value, float):
        return f'{value:.9g}'
    if isinstance(value, dict):
        return rounded(sorted(value.items()))
    if hasattr(value, '_fields'):
        return _fields(value, value._fields)
    if isinstance(value, tuple | list):
        return [rounded(each) for each in value]
    if hasattr(value, '__dataclass_fields__'):
        if isinstance(value, Costs):
            return rounded(_as_before(value))
        return _fields(value, value.__dataclass_fields__)
    return str(value)


def _fields(value: object, names: Iterable[str]) -> list[object]:
    kind = type(value).__name__
    old = (name for name in names if f'{kind}.{name}' not in ADDED.split())
    return [rounded(getattr(value, name)) for name in old]


def digits(answer: object) -> str:
    """Return the first of its hash."""
    return sha256(json.dumps(rounded(answer)).encode()).hexdigest()[:6]


def hashes(question: Callable[[], Iterable[object]]) -> str:
    """Return a few digits for each answer."""
    return ' '.join(map(digits, question()))


def golden(
    module: str,
    file: Path,
    questions: Mapping[str, Any],
    answer: Callable[[Any], str] = hashes,
) -> Callable[[str], None]:
    """Return a test of each answer in a file, which is written where the module is the program."""
    if module == '__main__':
        answers = {name: answer(question) for name, question in questions.items()}
        file.write_text(json.dumps(answers, indent=1, ensure_ascii=False) + '\n')

    @pytest.mark.parametrize('name', questions)
    def test(name: str) -> None:
        assert answer(questions[name]) == json.loads(file.read_text())[name]

    return test
