"""Families of a user's own module: registered by a decorator, found by `package.module:name`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_zbpp.mcore.settings import Settings
from megatron_zbpp.schedules import FAMILIES, build, find, names
from megatron_zbpp.schedules.registry import ANY, ONE, Family, family

OWN = '''
"""A schedule of one's own."""

from pathlib import Path

from megatron_zbpp.ir import Placement, Schedule
from megatron_zbpp.schedules import family
from megatron_zbpp.schedules.construct.phases import phases

with Path(__file__).with_name('imports').open('a') as log:
    log.write('x')


@family('Eager_Up', aliases=('up',))
def eager(num_ranks, num_microbatches, num_chunks=3):
    """All forwards, then all backwards."""
    placement = Placement.loop(num_ranks, num_chunks)
    every = num_chunks * num_microbatches
    table = [(every, 'F', 'up'), (every, 'BW', 'down')]
    return Schedule.of('eager', placement, num_microbatches, (
        phases(placement.stages(rank), num_microbatches, table) for rank in range(num_ranks)
    ))


@family('wrong-size')
def wrong(num_ranks, num_microbatches):
    """Makes a schedule of another size."""
    return eager(num_ranks, num_microbatches + 1)


@family('nothing')
def nothing(num_ranks, num_microbatches):
    """Forgets to return it."""


def plain(num_ranks, num_microbatches):
    return eager(num_ranks, num_microbatches)
'''


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """On sys.path, with modules of somebody's own."""
    folder = tmp_path_factory.mktemp('own')
    (folder / 'ownzb').mkdir()
    (folder / 'ownzb' / 'orders.py').write_text(OWN)
    (folder / 'ownzb' / 'broken.py').write_text('1 / 0\n')
    (folder / 'ownzb' / 'lacking.py').write_text('import no_such_module_at_all\n')
    (folder / 'ownzb' / 'thief.py').write_text(
        'from megatron_zbpp.schedules import family\n\n\n'
        "@family('a')\ndef b(num_ranks, num_microbatches):\n    pass\n\n\n"
        "@family('b')\ndef c(num_ranks, num_microbatches):\n    pass\n"
    )
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture
def own(folder: Path) -> Family:
    return find('ownzb.orders:eager-up')


def test_it_is_found_by_its_address(own: Family, folder: Path):
    """By the name that it registers, in any spelling, by an alias, and by that of the function."""
    assert own.name == 'ownzb.orders:Eager_Up'
    assert own.summary == 'All forwards, then all backwards.' and own.source == 'ownzb.orders'
    assert (own.default_chunks, own.chunks, own.options) == (3, ANY, ('num_chunks',))
    for name in ('ownzb.orders:EAGERUP', ' ownzb.orders:eager', 'ownzb.orders:Up'):
        assert find(name) is own
    assert find('ownzb.orders:nothing').chunks == ONE
    assert (folder / 'ownzb' / 'imports').read_text() == 'x', 'imported more than once'


def test_it_is_built_and_asked_for_as_those_of_the_library(own: Family):
    schedule = build('ownzb.orders:eager-up', 2, 3)
    assert schedule.placement.num_chunks == 3
    assert build(own.name, 2, 3, num_chunks=3) == schedule
    assert Settings('ownzb.orders:eager_up') == Settings('ownzb.orders:Eager-Up')
    assert Settings('ownzb.orders:eager').schedule == own.name


def test_the_library_stays_what_it_is(own: Family):
    assert own.name not in names() and own not in FAMILIES


@pytest.mark.parametrize(
    ('name', 'says'),
    [
        ('no_such_package.x:up', ["there is no module 'no_such_package'", 'PYTHONPATH']),
        ('ownzb.none:up', ["there is no module 'ownzb.none'", 'install it on every host']),
        ('ownzb.broken:up', ["importing 'ownzb.broken' fails", 'ZeroDivisionError']),
        ('ownzb.lacking:up', ["importing 'ownzb.lacking' fails", 'no_such_module_at_all']),
        ('ownzb.orders:down', ["'ownzb.orders' registers ownzb.orders:Eager_Up", '@family']),
        ('ownzb.orders:plain', ["unknown schedule 'ownzb.orders:plain'", '@family']),
        ('ownzb.orders:', ["unknown schedule 'ownzb.orders:'"]),
        (':up', ["unknown schedule ':up'"]),
        ('up', ["unknown schedule 'up'", 'package.module:name']),
        ('zb-x', ["unknown schedule 'zb-x'", 'package.module:name']),
        ('ownzb.thief:c', ["wants the name 'ownzb.thief:b', which 'ownzb.thief:a' has"]),
    ],
)
def test_refusals_name_the_module_and_the_cure(own: Family, name: str, says: list[str]):
    for ask in (find, Settings):
        with pytest.raises(ValueError) as refusal:
            ask(name)
        assert all(part in str(refusal.value) for part in says), refusal.value


@pytest.mark.parametrize(
    ('name', 'says'),
    [
        ('wrong-size', 'a schedule of 2 ranks and 4 microbatches: return one of the 2 and 3'),
        ('nothing', 'made NoneType: return a Schedule'),
    ],
)
def test_what_it_makes_is_what_was_asked_for(own: Family, name: str, says: str):
    with pytest.raises(ValueError, match=says):
        build(f'ownzb.orders:{name}', 2, 3)


def test_a_module_may_be_loaded_again(own: Family):
    """The family of the same address takes the place of the old one."""
    again = family('Eager_Up')(own.generate)
    assert again is own.generate
    assert find('ownzb.orders:eager').name == own.name


def test_the_command_takes_it(folder: Path):
    """In a process of its own, which imports the module where it is named."""
    command = [sys.executable, '-m', 'megatron_zbpp.cli', 'simulate', '--schedule']
    command += ['ownzb.orders:eager-up', '--pp', '2', '--microbatches', '4', '--json']
    path = os.pathsep.join([str(folder), *sys.path])
    done = subprocess.run(
        command, env={**os.environ, 'PYTHONPATH': path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)['peak_activations'] == [4.0, 4.0]
