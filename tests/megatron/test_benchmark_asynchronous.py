"""The benchmark of asynchronous methods draws and tells what it has trained."""

from __future__ import annotations

import re
import sys

import pytest
from commands import run
from paths import ROOT

from megatron_zbpp.schedules import own_families
from megatron_zbpp.techniques.composition import TRAINED_BY
from scripts.benchmark_asynchronous import METHODS

pytestmark = pytest.mark.one_release

SCRIPT = [sys.executable, ROOT / 'scripts' / 'benchmark_asynchronous.py']


def test_all_methods():
    """All asynchronous schedules but for another order of one of them."""
    others = [each.name for each in own_families(every=True) if each.asynchronous]
    assert {*METHODS} == {*others} - {*TRAINED_BY.values()}


@pytest.mark.full
def test_losses_by_step_and_time(tmp_path):
    small = ['--ranks', 2, '--iterations', 7, '--hidden-size', 8, '--seq-length', 8]
    done = run([*SCRIPT, *small, '--methods', 'paci,wpipe', '--output', tmp_path])
    assert done.returncode == 0, done.stderr
    rows = re.findall(r'^\| `(\S+)` \| (\S+) \| (\S+) \| (\d+) \| (\S+) \|$', done.stdout, re.M)
    times = {'1f1b': '9', 'zb-v': '6.5', 'paci': '6', 'wpipe': '6.5'}
    assert dict(row[:2] for row in rows) == times
    stock, same, paci, wpipe = rows
    assert stock[2] == same[2] != paci[2] == paci[4]
    assert wpipe[2] not in (stock[2], paci[2])
    assert [row[3] for row in rows] == ['4', '6', '7', '6']
    assert (tmp_path / 'losses.png').stat().st_size > 10_000


@pytest.mark.parametrize(
    ('given', 'said'),
    [
        (['--methods', 'zb-v'], '--methods zb-v is not asynchronous'),
        (['--ranks', 1], '--ranks 1 is too small: give at least 2'),
        (['--microbatches', 2], '--microbatches 2 is too small: give 3'),
    ],
)
def test_what_cannot_be_compared(given, said):
    done = run([*SCRIPT, *given])
    assert done.returncode == 2 and said in done.stderr
