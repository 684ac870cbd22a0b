"""What `megatron_zbpp` exports: all of it there, documented, and enough for the examples."""

from __future__ import annotations

import ast
import inspect

import pytest
from paths import ROOT

import megatron_zbpp

pytestmark = pytest.mark.each_release

EXAMPLES = sorted((ROOT / 'examples' / 'gpt').glob('*.py'))


@pytest.mark.parametrize('name', megatron_zbpp.__all__)
def test_each_name_is_documented(name):
    value = getattr(megatron_zbpp, name)
    if callable(value):
        assert inspect.getdoc(value), name
        annotated = inspect.signature(value).return_annotation is not inspect.Signature.empty
        assert inspect.isclass(value) or annotated, name


def test_a_name_of_ours_is_public_or_private():
    own = {
        name
        for name, value in vars(megatron_zbpp).items()
        if inspect.getmodule(value) is megatron_zbpp and not name.startswith('_')
    }
    assert own <= set(megatron_zbpp.__all__)


@pytest.mark.parametrize('file', EXAMPLES, ids=lambda file: file.name)
def test_examples_need_nothing_else(file):
    """But for the types of what they are given."""
    tree = ast.parse(file.read_text())
    modules = [n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    modules += [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
    assert {m for m in modules if m and m.startswith('megatron_zbpp')} <= {'megatron_zbpp'}
    used = {
        n.attr
        for n in ast.walk(tree)
        if isinstance(n, ast.Attribute)
        and isinstance(n.value, ast.Name)
        and n.value.id == 'megatron_zbpp'
    }
    assert used <= set(megatron_zbpp.__all__)


def test_the_small_example_stays_small():
    assert len((ROOT / 'examples/gpt/minimal.py').read_text().splitlines()) <= 120
