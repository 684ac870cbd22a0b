"""The page that says what is proven how: each row names what proves it, and that is there."""

import re
from fnmatch import fnmatch

import pytest
from commands import run
from paths import ROOT

from scripts import claims_page

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
