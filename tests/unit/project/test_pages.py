"""The README and the pages in docs/: their length, their links, what they quote."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pages
import pytest
from paths import ROOT

import megatron_zbpp
from megatron_zbpp.ir import Schedule
from megatron_zbpp.schedules import FAMILIES, build
from scripts import docs_gallery

LINK = re.compile(r'\]\(([^)#\s]+)')


def test_readme_is_short():
    text = pages.README.read_text()
    assert len(text.splitlines()) <= 120
    assert 'no GPU yet' in text.partition('\n## ')[0], 'its status is said at the top'


@pytest.mark.parametrize('page', pages.PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in LINK.findall(page.read_text()):
        made = link == 'schedules.md'  # the gallery, made from the registry
        assert made or link.startswith('https://') or (page.parent / link).exists(), link


def strings(tree: ast.AST):
    """Each string of a module, one of several parts as one with `…` for what is filled in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (p.value if isinstance(p, ast.Constant) else '…' for p in node.values)
            yield ''.join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_messages_are_those_of_the_code():
    """What troubleshooting quotes is said somewhere, or by torch."""
    sources = (ROOT / 'megatron_zbpp').rglob('*.py')
    said = '\n'.join(s for source in sources for s in strings(ast.parse(source.read_text())))
    text = (ROOT / 'docs' / 'troubleshooting.md').read_text()
    quoted = re.findall(r'^### `(.+?)`', text, re.M)
    assert len(quoted) > 20
    parts = [part.strip() for message in quoted for part in message.split('…')]
    torchs = 'Torch not compiled with CUDA enabled'
    assert [part for part in parts if part not in said and part != torchs] == []


def test_the_schedule_of_one_s_own_is_zb_h1(capsys):
    page = ROOT / 'docs' / 'your-own-schedule.md'
    text = pages.files(page)['mine.py']
    assert len([line for line in text.splitlines() if line.strip()]) <= 15
    exec(text, {})
    mine = Schedule.from_json(capsys.readouterr().out)
    assert mine.passes == build('zb-h1', 2, 8).passes


def test_the_gallery_has_every_family():
    page = docs_gallery.gallery()
    for family in FAMILIES:
        assert f'## {family.name} {{ #{family.name} }}' in page
        assert f'| {family.bubble} | {family.memory} | {family.source} |' in page
        assert docs_gallery.picture(family).startswith('<svg')
    assert '| [`1f1b`](#1f1b) | 27.3% | 27.3% | 4 |' in page
    assert '| [`zb-v`](#zb-v) | 0.0% | 5.9% | 4 |' in page


def test_the_api_page_has_all_that_is_public():
    listed = re.findall(r'members: \[(.*)\]', (ROOT / 'docs' / 'api.md').read_text())
    named = [name for members in listed for name in members.split(', ')]
    assert sorted(named) == sorted(set(megatron_zbpp.__all__) - {'__version__'})


def test_every_picture_is_shown():
    shown = {Path(found).name for page in pages.PAGES for found in LINK.findall(page.read_text())}
    pictures = {picture.name for picture in (ROOT / 'docs' / 'pictures').iterdir()}
    assert pictures <= shown
