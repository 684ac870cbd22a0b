"""Scripts name tests that exist: a file that has moved is not left out without a word."""

from __future__ import annotations

import re

import pytest
from commands import run
from paths import ROOT

FILES = ['.ci/run', *(str(each.relative_to(ROOT)) for each in (ROOT / 'scripts').glob('*.sh'))]


@pytest.mark.parametrize('file', FILES)
def test_tests_that_are_named_exist(file):
    for named in re.findall(r'tests/[\w/{},.]+', (ROOT / file).read_text()):
        for path in run(['bash', '-c', f'echo {named}'], cwd=ROOT).stdout.split():
            assert (ROOT / path).exists(), f'{file}: {path}'


def test_files_of_tests_have_names_of_their_own():
    """Else `./scripts/test.sh` without arguments collects nothing of the second."""
    names = [file.name for file in (ROOT / 'tests').rglob('test_*.py')]
    assert sorted(names) == sorted({*names})
