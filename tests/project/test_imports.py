"""What is imported when: what a training does not ask for is not loaded."""

from __future__ import annotations

import sys

import pytest
from commands import run
from paths import ROOT

import megatron_zbpp

# Prints which modules of ours a fresh process has once it has run the line.
LOADED = """
import sys
{}
print(*(name for name in sys.modules if name.startswith('megatron_zbpp.')))
"""


def loaded(line: str) -> set[str]:
    """Return the modules of the package that a fresh process imports for a line, without `ours.`"""
    done = run([sys.executable, '-W', 'ignore', '-c', LOADED.format(line)], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return {name.removeprefix('megatron_zbpp.') for name in done.stdout.splitlines()[-1].split()}


def rooms(modules: set[str]) -> set[str]:
    """Return the rooms that modules lie in."""
    return {name.partition('.')[0] for name in modules}


def test_the_package_alone_imports_next_to_nothing():
    assert rooms(loaded('import megatron_zbpp')) == {'mcore', 'version'}


def test_names_are_imported_when_they_are_read():
    assert 'planner.plans' in loaded('from megatron_zbpp import plan')
    assert 'simulate' in dir(megatron_zbpp)
    with pytest.raises(AttributeError, match="'megatron_zbpp' has no attribute 'simulated'"):
        getattr(megatron_zbpp, 'simulated')  # noqa: B009
