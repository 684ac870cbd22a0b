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
