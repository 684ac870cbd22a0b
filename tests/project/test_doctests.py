"""The examples in docstrings are true."""

import doctest
import importlib

import pytest
from paths import ROOT

from megatron_zbpp.ir.schedule import grid

MODULES = [
    '.'.join(path.relative_to(ROOT).with_suffix('').parts).removesuffix('.__init__')
    for path in sorted((ROOT / 'megatron_zbpp').rglob('*.py'))
    if '>>> ' in path.read_text()
]


@pytest.mark.parametrize('name', MODULES)
def test_doctest(name):
    """Drawings of schedules have `grid` at hand."""
    result = doctest.testmod(importlib.import_module(name), extraglobs={'grid': grid})
    assert result.attempted and not result.failed
