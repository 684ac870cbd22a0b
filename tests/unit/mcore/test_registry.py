"""Patches go in, all or none, wherever they were imported; and come out again everywhere."""

import functools
import importlib
import sys

import pytest

from megatron_zbpp.mcore.patches.registry import Patch, Registry

THEIRS = """
class Owner:
    def method(self):
        return 'method'

def answer():
    return 'answer'

def asks():
    return answer()

def deaf():
    return 'nothing'
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Modules `theirs`, and `importing` and `wave`, which take a function of it by name."""
    (tmp_path / 'theirs.py').write_text(THEIRS)
    for name in ('importing', 'wave'):
        (tmp_path / f'{name}.py').write_text('from theirs import answer as renamed\n')
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ('theirs', 'importing', 'wave'):
        sys.modules.pop(name, None)


def ours(original):
    @functools.wraps(original)
    def replacement(*args):
        return f'ours for {original(*args)}'

    return replacement


def test_in_and_out(folder):
    """Each wraps what the one before it made; all come out again."""
    import theirs

    def others(original):
        return lambda *args: f'theirs around {original(*args)}'

    method, registry = theirs.Owner.method, Registry()
    registry.install([Patch('theirs:Owner', 'method', each) for each in (ours, others)])
    assert theirs.Owner().method() == 'theirs around ours for method'
    registry.undo()
    assert theirs.Owner.method is method
    answer, deaf = Patch('theirs', 'answer', ours, ('theirs:asks',)), Patch('theirs', 'deaf', None)
    registry.install([answer, Patch('theirs:Owner', 'method', ours), deaf])
    assert theirs.asks() == 'ours for answer' and theirs.Owner().method() == 'ours for method'
    assert theirs.deaf() == 'nothing' and registry.installed
    assert [place.name for place in registry.places()] == ['answer', 'method']
    registry.undo()
    assert theirs.asks() == 'answer' and theirs.Owner().method() == 'method'
    assert not registry.installed


@pytest.mark.parametrize('name', ['importing', 'wave'])
def test_everywhere(folder, name):
    """Also where it was imported before, and where ours was imported meanwhile; by a module that
    has a name of Python's library, too."""
    import theirs

    importing, registry = importlib.import_module(name), Registry()
    registry.install([Patch('theirs', 'answer', ours, everywhere=True)])
    assert importing.renamed() == theirs.answer() == 'ours for answer'
    del sys.modules[name]
    again = importlib.import_module(name)
    assert again.renamed() == 'ours for answer'
    registry.undo()
    assert again.renamed() == theirs.answer() == 'answer'


@pytest.mark.parametrize('imported', [False, True])
def test_late(folder, imported):
    """When somebody imports the module, and not if we are gone by then."""
    registry, patch = Registry(), Patch('theirs', 'answer', ours, ('theirs:asks',), late=True)
    assert patch.waits
    registry.install([patch])
    assert 'theirs' not in sys.modules
    if imported:
        theirs = importlib.import_module('theirs')
        assert theirs.asks() == 'ours for answer'
    registry.undo()
    assert importlib.import_module('theirs').asks() == 'answer'


@pytest.mark.parametrize(
    ('patch', 'said'),
    [
        (Patch('theirs', 'answer', ours, ('theirs:deaf',)), 'theirs.deaf does not use answer'),
        (Patch('theirs', 'gone', ours), "has no attribute 'gone'"),
        (Patch('theirs:Gone', 'method', ours), "has no attribute 'Gone'"),
        (Patch('theirs_gone', 'answer', ours), "No module named 'theirs_gone'"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.target,
)
def test_all_or_none(folder, patch, said):
    import theirs

    assert said in patch.problem()
    registry = Registry()
    with pytest.raises(RuntimeError, match='the patch would have no effect') as error:
        registry.install([Patch('theirs:Owner', 'method', ours), patch])
    assert said in str(error.value)
    assert theirs.Owner().method() == 'method' and not registry.installed
