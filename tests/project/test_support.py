"""The page of what is supported: no claim outlives its test, and it is what the records give."""

from __future__ import annotations

import csv
import sys

import pytest
import supported
from commands import run
from paths import ROOT

from scripts import support_page


def test_page_is_what_the_records_give():
    assert (ROOT / 'docs' / 'support.md').read_text() == support_page.page(), (
        'run python scripts/support_page.py > docs/support.md'
    )


def test_records_are_in_order():
    records = supported.read()
    assert records == sorted(set(records)), 'so that what two branches add merges'


def test_no_claim_outlives_its_test():
    pytest.importorskip('megatron.core')
    command = [sys.executable, '-m', 'pytest', 'tests', '--list-support', '-q']
    found = run([*command, '-p', 'no:cacheprovider'], cwd=ROOT, timeout=200).stdout
    shown = {tuple(row) for row in csv.reader(found.splitlines()) if len(row) == 4}
    orphans = [record for record in supported.read() if supported.key(record) not in shown]
    assert shown and not orphans, 'run those tests again with --record-support, then the page'


def test_a_claim_fills_its_parameters_in():
    outcome = supported.refuses('{setting}', 'why', 'zb-v').mark.args
    assert outcome == ('{setting}', 'zb-v', 'refused: why')
