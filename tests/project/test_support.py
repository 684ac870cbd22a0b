"""The pages of what is supported and what is proven how: each names tests that are there."""

import csv
import re
import sys
from fnmatch import fnmatch

import pytest
import supported
from forked import run
from paths import ROOT

from scripts import claims_page, support_page

pytest_plugins = ['pytester']


def record(feature='a', schedule='zb-v', release='0.19.2', te='', outcome=supported.BITS):
    return support_page.Record(feature, schedule, release, te, outcome, 'tests/test_a.py::test_a')


def test_page_is_what_the_records_give():
    assert (ROOT / 'docs' / 'support.md').read_text() == support_page.page(), (
        'run python scripts/support_page.py > docs/support.md'
    )
    records = supported.read()
    assert records == sorted(set(records)), 'so that what two branches add merges'


def test_a_summary_counts_each_feature_once():
    """Of each release, and links to the table that has it."""
    rows = [
        record(feature, 'zb-v', release, te, outcome)
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
        assert [(each.feature, each.outcome) for each in supported.read()] == [('a', outcome)]
        assert f'| {sign} | a (VW) |' in support_page.page()


def test_a_cell_says_on_whose_layers():
    own, oldest, newest = (record(te=te) for te in ('', '2.8.0', '2.20.2'))
    absent = record(outcome=support_page.ABSENT)
    for records, said in (
        ([own], '='),
        ([own, newest, oldest], '=mab'),
        ([oldest, absent], '=a'),
        ([absent._replace(te='2.8.0')], '—'),
    ):
        assert support_page.cell(records) == said
    assert {each.te for each in supported.read()} <= {*support_page.ENGINES}


def test_what_was_trained_alike_shares_a_line():
    """Variants of a feature, and kinds of schedules; each word of the records is on the page."""
    rows = [
        record(feature, schedule, outcome=outcome)
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
    for each in supported.read():
        why = each.outcome.removeprefix('refused: ')
        if each.refused and why in limits:
            continue
        assert support_page.shown(each.feature).rpartition(': ')[2] in page, each
        assert why in support_page.SIGNS or why in page


# ---- What is proven how: each row names what proves it.


PAGE = ROOT / 'docs' / 'results' / 'README.md'
RESULT = re.compile(r'\]\(([\w.-]+\.md)\)')  # of a GPU, beside the page
PROOF = re.compile(r'`((?:tests|scripts)/[\w/.]+\.(?:py|sh))`')


def rows():
    """The cells of each row of the page's first table: a capability, and three columns."""
    table = PAGE.read_text().partition('\n|---|---|---|---|\n')[2].partition('\n\n')[0]
    return [[cell.strip() for cell in line.strip('|').split('|')] for line in table.splitlines()]


@pytest.mark.parametrize('row', rows(), ids=lambda row: row[0][:40])
def test_each_row_names_its_proof(row):
    capability, *columns = row
    assert len(columns) == 3, row
    assert PROOF.search(' '.join(columns[:2])) or 'none yet' in columns[2], capability
    for column in columns:
        named = [ROOT / path for path in PROOF.findall(column)]
        named += [PAGE.parent / path for path in RESULT.findall(column)]
        assert named or not column or column.startswith('none yet'), column
        for path in named:
            assert path.is_file(), path


def test_gpu_column(request):
    """Nothing is said to be proven on a GPU while there are no results of one."""
    measured = list(PAGE.parent.glob('*.tests.txt'))
    for _, _, _, gpu in rows():
        assert measured or not gpu or gpu.startswith('none yet'), gpu
    assert len(rows()) > 20
    # pytest leaves out folders of some names by itself, such as `dist`
    folders = {file.parent.name for file in (ROOT / 'tests').rglob('test_*.py')}
    left_out = request.config.getini('norecursedirs')
    assert {name for name in folders for pattern in left_out if fnmatch(name, pattern)} == set()


# Sentences that are true of the results so far: look at them anew where a result is added.
OPEN = {
    'No GPU has trained with slices yet': 'a layer and attention kernels were timed, no training',
    'a GPU, where no hybrid model of ours has run yet': 'no Mamba layer was run',
    'no report of a GPU has been read yet': 'profilers of one were not run',
    "masks of flash's and cuDNN's kernels have not met a GPU here": 'both refused the inputs',
    'No GPU has trained with it': 'shards were timed, no training',
    'none of that has met a GPU yet': 'the tests of layers since then',
    '"none yet" stands there until its results': 'the head of the table',
}
DENIED = re.compile(r'\b(yet|not met|nothing has|no \w+ has)\b', re.IGNORECASE)


def denials(text):
    sentences = re.split(r'(?<=[.!?:|])\s', ' '.join(text.split()))
    return [each for each in sentences if re.search(r'\bGPUs?\b', each) and DENIED.search(each)]


def written_pages():
    pages = [ROOT / 'README.md', *sorted((ROOT / 'docs').rglob('*.md'))]
    return [page for page in pages if not re.match(r'\d{4}-', page.name)]


def test_no_page_denies_what_a_result_shows():
    found = {sentence: page for page in written_pages() for sentence in denials(page.read_text())}
    for sentence, page in found.items():
        assert any(known in sentence for known in OPEN), f'{page}: {sentence}'
    for known in OPEN:
        assert any(known in sentence for sentence in found), f'no page says {known!r} any more'
    assert denials(f'A page. {" ".join(DENIALS)} Another one.') == [*DENIALS]
    assert not any(known in sentence for known in OPEN for sentence in DENIALS)


DENIALS = ('Nothing has run on a GPU yet.', 'It has not met a GPU.', 'No copy has been on a GPU.')


def test_the_page_of_exactness_tells_the_size_of_the_grid():
    """Iterations and numbers of microbatches are those that the tests train."""

    def constant(name, file):
        source = (ROOT / 'tests' / 'megatron' / file).read_text()
        return re.search(rf'{name}(?: = |\', )(.+?)[,\n)]', source)[1]

    page = ' '.join((ROOT / 'docs' / 'exactness.md').read_text().split())
    grid, short = (
        constant('ITERATIONS', 'test_identity.py'),
        constant('SHORT', 'test_identity.py'),
    )
    assert f'Tests compare {grid} iterations of `1f1b`, `zb-h1` and `zb-v`' in page
    assert f'every other schedule trains {short} iterations' in page


def test_pages_are_printed_from_the_claims(capsys):
    assert claims_page.main(['--check']) == 0, capsys.readouterr().out
    assert len(claims_page.claims()) == len(rows())


def test_a_page_that_differs_is_named(monkeypatch, tmp_path, capsys):
    page, table = tmp_path / 'page.md', tmp_path / 'claims.csv'
    page.write_text('Head.\n\n<!-- claims: limits -->\nold\n<!-- end of claims -->\n\nFoot.\n')
    table.write_text('claim,cpu,emulated,gpu,limit\nIt runs,`a`,,none yet,Not on Sundays.\n')
    monkeypatch.setattr(claims_page, 'PARTS', {'limits': (page, claims_page.limits)})
    monkeypatch.setattr(claims_page, 'CLAIMS', table)
    assert claims_page.main(['--check']) == 1 and 'page.md: differs' in capsys.readouterr().out
    assert claims_page.main([]) == 0
    assert '\n\n- Not on Sundays.\n\n<!-- end' in page.read_text()
    assert page.read_text().startswith('Head.') and page.read_text().endswith('Foot.\n')
    assert claims_page.main(['--check']) == 0
    assert claims_page.evidence(claims_page.claims(table)).endswith(
        '| It runs | `a` | | none yet |'
    )
    page.write_text('Head.\n')
    with pytest.raises(ValueError, match='has no lines between'):
        claims_page.main([])


@pytest.mark.parametrize('row', ['A claim,x', ',,,,', 'a,b,c,d,e,f'])
def test_a_wrong_row_is_named(tmp_path, row):
    table = tmp_path / 'claims.csv'
    table.write_text(f'claim,cpu,emulated,gpu,limit\n{row}\n')
    with pytest.raises(ValueError, match=r'row 2 of .* give a claim and its 4 cells'):
        claims_page.claims(table)


# ---- Scripts name tests that exist: a file that has moved is not left out without a word.


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
