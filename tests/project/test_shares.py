"""What runs side by side takes a share of the cases each; together they take all."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest
from grids import Share
from paths import ROOT

FILE = 'tests/megatron/test_bpipe.py'


def collected(*arguments: str) -> set[str]:
    command = [sys.executable, '-m', 'pytest', '--collect-only', '-q', FILE, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:]
    return {line for line in done.stdout.splitlines() if '::' in line}


def test_shares_make_the_whole():
    """Tests of a single case are in each; of others no case is in two."""
    whole, first, second = collected(), collected('--share=1/3'), collected('--share', '2-3/3')
    assert first | second == whole
    of_each = {name.partition('[')[0] for name in whole}
    assert {name.partition('[')[0] for name in first} == of_each
    twice = {name.partition('[')[0] for name in first & second}
    several = {name for name in of_each if sum(each.startswith(f'{name}[') for each in whole) > 1}
    assert len(first) < 0.6 * len(whole) < len(second) < 0.9 * len(whole)
    assert not twice & several


@pytest.mark.parametrize(
    'text', ['', '2', '0/2', '3/2', '1/0', 'a/b', '1/2/3', '-1/2', '3-2/3', '2-4/3', '1-/3']
)
def test_no_share(text):
    with pytest.raises(argparse.ArgumentTypeError, match='give K/N, such as 1/3 or 2-3/3'):
        Share.parse(text)
