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
