"""The page of what is supported: no claim outlives its test, and it is what the records give."""

import csv
import re
import sys

import pytest
import supported
from forked import run
from paths import ROOT

from scripts import support_page

pytest_plugins = ['pytester']


def test_page_is_what_the_records_give():
    assert (ROOT / 'docs' / 'support.md').read_text() == support_page.page(), (
        'run python scripts/support_page.py > docs/support.md'
    )
    records = supported.read()
    assert records == sorted(set(records)), 'so that what two branches add merges'


def test_a_summary_counts_each_feature_once():
    """Of each release, and links to the table that has it."""
    rows = [
        support_page.Record(feature, 'zb-v', release, te, outcome, 'tests/test_a.py::test_a')
        for release in ('0.16.1', '0.19.2')
        for te in ('', '2.8.0')
        for feature, outcome in (
            ('GPT, experts', supported.BITS),
            ('GPT, tensor parallel', supported.WAITS),
            ('experts', supported.ABSENT if release == '0.16.1' else supported.BITS),
        )
    ]
    matrix, details = support_page._matrix(rows), support_page._details(rows)
    assert matrix[2] == '| [Mixture of experts](#mixture-of-experts) | = 1, — 1 | = 2 |'
    (parallel,) = [line for line in matrix if 'waits' in line]
    assert parallel.endswith('| waits 1 | waits 1 |')
    folded = '<details id="mixture-of-experts" markdown="1">'
    assert f'{folded}<summary>Mixture of experts: 2 features</summary>' in details


@pytest.mark.timeout(900)
def test_no_claim_outlives_its_test():
    pytest.importorskip('megatron.core')
    tests = (ROOT / 'tests').rglob('test_*.py')
    named = sorted(f for f in tests if re.search(r'support|= trains\(', f.read_text()))
    command = [sys.executable, '-m', 'pytest', '--list-support', '-q', '-p', 'no:cacheprovider']
    found = run([*command, *named], cwd=ROOT, timeout=800).stdout
    shown = {tuple(row) for row in csv.reader(found.splitlines()) if len(row) == 4}
    orphans = [record for record in supported.read() if supported.key(record) not in shown]
    assert shown and not orphans, 'run those tests again with --record-support, then the page'


def test_a_claim_fills_its_parameters_in():
    outcome = supported.refuses('{setting}', 'why', 'zb-v').mark.args
    assert outcome == ('{setting}', 'zb-v', 'refused: why')


def test_what_a_release_lacks_is_recorded(pytester, monkeypatch):
    """Until it has it: a test that is skipped for another reason, or refuses, says nothing."""
    pytest.importorskip('megatron.core')
    for module in (supported, support_page):
        monkeypatch.setattr(module, 'RECORDS', pytester.path / 'support.csv')
    monkeypatch.setattr(sys, 'dont_write_bytecode', True)
    tests = """
        import pytest
        from supported import absent, refuses, supports

        @supports('a', 'zb-v')
        def test_a():
            {a}

        @supports('b', 'zb-v')
        def test_b():
            pytest.skip('no data')

        @refuses('c', 'why')
        def test_c():
            absent('from 0.99 on')
    """
    for body, outcome, sign in (
        ("absent('from 0.99 on')", support_page.ABSENT, '—'),
        ('pass', supported.BITS, '='),
    ):
        pytester.makepyfile(test_it=tests.format(a=body))
        pytester.inline_run(plugins=[supported.Recorder()])
        assert [(record.feature, record.outcome) for record in supported.read()] == [('a', outcome)]
        assert f'| {sign} | a (VW) |' in support_page.page()


def test_a_cell_says_on_whose_layers():
    def record(te, outcome=supported.BITS):
        return support_page.Record('a', 'zb-v', '0.19.2', te, outcome, 'tests/test_a.py::test_a')

    assert support_page.cell([record('')]) == '='
    assert support_page.cell([record(''), record('2.20.2'), record('2.8.0')]) == '=mab'
    assert support_page.cell([record('2.8.0'), record('', support_page.ABSENT)]) == '=a'
    assert support_page.cell([record('2.8.0', support_page.ABSENT)]) == '—'
    assert {record.te for record in supported.read()} <= {*support_page.ENGINES}


def test_what_was_trained_alike_shares_a_line():
    """Variants of a feature, and kinds of schedules; each word of the records is on the page."""
    rows = [
        support_page.Record(feature, schedule, '0.19.2', '', outcome, 'tests/test_a.py::test_a')
        for schedule in ('1f1b', 'zb-v', 'zb-v+post-validation')
        for feature, outcome in (
            ('offload: GPT', supported.BITS),
            ('offload: dropout', supported.BITS),
            ('offload: fp16', supported.WAITS if '+' in schedule else supported.BITS),
        )
    ]
    table = support_page._features(sorted(rows), support_page._heads(rows))
    assert table[2:] == [
        '| = | **offload**: GPT; dropout (1, VW, VW+); fp16 (1, VW) |',
        '| waits | **offload**: fp16 (VW+) |',
    ]
    page, limits = support_page.page(), support_page.LIMITS.read_text()
    for record in supported.read():
        why = record.outcome.removeprefix('refused: ')
        if record.refused and why in limits:
            continue
        assert support_page.shown(record.feature).rpartition(': ')[2] in page, record
        assert why in support_page.SIGNS or why in page
