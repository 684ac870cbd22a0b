"""Answers that change on purpose only: a few digits for each, to be kept in a file."""

import json
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest


def rounded(value: object) -> object:
    """Return it with numbers of nine digits: releases of Python add floats in different ways."""
    if isinstance(value, float):
        return f'{value:.9g}'
    if isinstance(value, dict):
        return rounded(sorted(value.items()))
    if hasattr(value, '__dataclass_fields__'):
        value = [getattr(value, name) for name in value.__dataclass_fields__]
    if isinstance(value, tuple | list):
        return [rounded(each) for each in value]
    return str(value)


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
