"""The package loads the emulated kernels of its own checkout, or says why it cannot."""

from __future__ import annotations

import sys
import types

import pytest

from megatron_zbpp.emulation import te


def test_another_package_of_the_name(monkeypatch, tmp_path):
    """One of the name is on PyPI."""
    other = types.ModuleType('devtools')
    other.__file__ = '/site-packages/devtools/__init__.py'
    monkeypatch.setitem(sys.modules, 'devtools', other)
    (tmp_path / 'transformer_engine').mkdir()
    with pytest.raises(ImportError, match='devtools is imported from /site-packages/devtools/__'):
        te.install(tmp_path)
    assert not te.installed()


def test_no_folder_of_transformer_engine(tmp_path):
    with pytest.raises(ModuleNotFoundError, match=f'no transformer_engine in {tmp_path}: pip inst'):
        te.install(tmp_path)
