"""The page that says what is proven how: each row names what proves it, and that is there."""

from __future__ import annotations

import re
from fnmatch import fnmatch

import pytest
from paths import ROOT

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


def test_gpu_column():
    """Nothing is said to be proven on a GPU while there are no results of one."""
    measured = list(PAGE.parent.glob('*.tests.txt'))
    for _, _, _, gpu in rows():
        assert measured or not gpu or gpu.startswith('none yet'), gpu
    assert len(rows()) > 20


def test_a_run_without_arguments_finds_all(request):
    """Pytest leaves out folders of some names by itself, such as `dist`."""
    folders = {file.parent.name for file in (ROOT / 'tests').rglob('test_*.py')}
    left_out = request.config.getini('norecursedirs')
    assert {name for name in folders for pattern in left_out if fnmatch(name, pattern)} == set()


# Sentences that say what no GPU has done so far, each true of the results: look at it anew where a
# result is added.
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
    """Sentences of a page that say that a GPU has not done something."""
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


@pytest.mark.parametrize(
    'sentence',
    [
        'Nothing has run on a GPU yet: neither NCCL nor kernels.',
        'This project has not met a GPU yet.',
        'No copy has been timed on a GPU here yet.',
    ],
)
def test_denials_are_seen(sentence):
    assert denials(f'A page. {sentence} Another one.')
    assert not any(known in sentence for known in OPEN)


def test_the_page_of_exactness_tells_the_size_of_the_grid():
    """Iterations and numbers of microbatches are those that the tests train."""

    def constant(name, file):
        source = (ROOT / 'tests' / 'megatron' / file).read_text()
        return re.search(rf'{name}(?: = |\', )(.+?)[,\n)]', source)[1]

    page = ' '.join((ROOT / 'docs' / 'exactness.md').read_text().split())
    grid, short = (
        constant('ITERATIONS', 'test_identity.py'),
        constant('train-iters', 'test_families.py'),
    )
    assert f'Tests compare {grid} iterations of `1f1b`, `zb-h1` and `zb-v`' in page
    assert f'every other schedule trains {short} iterations' in page
