"""The figures of the house stay under their ceilings, and those who count them can count."""

from __future__ import annotations

import importlib.util
import re
import sys

import pytest
from commands import run
from paths import ROOT

from scripts import house


@pytest.mark.parametrize('figure', house.FIGURES, ids=lambda figure: figure.name)
def test_figures_stay_under_their_ceilings(figure):
    if figure.count is house.imported_lines and importlib.util.find_spec('megatron') is None:
        pytest.skip('megatron-core is not installed')
    assert 0 <= figure.count() <= figure.ceiling


def test_the_page_has_the_ceilings():
    """And the command that counts prints a line for each figure."""
    page = (ROOT / 'docs' / 'architecture.md').read_text()
    rows = re.findall(r'^\| .+ \| [\d,]+ \| ([\d,]+) \| [\d,]+ \|$', page, re.M)
    assert rows == [f'{figure.ceiling:,}' for figure in house.FIGURES]
    printed = run([sys.executable, 'scripts/house.py'], cwd=ROOT).stdout.splitlines()
    assert [line.split('  ')[0] for line in printed[1:]] == [each.name for each in house.FIGURES]


def test_what_is_counted(monkeypatch, tmp_path):
    """In code, not in comments and strings; a technique's own folder does not count."""
    monkeypatch.setattr(house, 'PACKAGE', tmp_path)
    (tmp_path / 'techniques').mkdir()
    (tmp_path / 'ir').mkdir()
    reader = '"""What it is."""\nname = placement.first_route\n'
    (tmp_path / 'one.py').write_text('offloaded = 1\n' + reader)
    (tmp_path / 'two.py').write_text('# offload\ntext = "recompute"\n')
    (tmp_path / 'techniques' / 'offload.py').write_text('def offload():\n    "Whether so."\n')
    (tmp_path / 'ir' / 'placement.py').write_text(reader)
    assert house.package_lines() == 3 + 2 + 2 + 2
    assert house.technique_files() == 1
    assert house.first_route_readers() == 1
    assert house.riddles() == 2, 'a string behind code is none'
