"""Plans on disk: found by all that decided them and by nothing else; damage is noticed."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from megatron_zbpp import Costs, Placement
from megatron_zbpp.planner import cache, limits
from megatron_zbpp.planner.plans import plan

PLACEMENT = Placement.v(2)
CANDIDATES = [(PLACEMENT, Costs.uniform(PLACEMENT, 1, 1.2, 0.8))]
INPUTS = {'memory_limit': 1.5, 'seconds': 9.0, 'seed': 1}


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    """Steps end every search, however busy the machine is, and never the clock."""
    monkeypatch.setattr(limits, '_STEPS_PER_SECOND', 2_000)


def test_what_was_planned_is_found(tmp_path):
    folder = tmp_path / 'new' / 'folder'
    made, cached = cache.planned(folder, CANDIDATES, 3, **INPUTS)
    assert not cached and made == plan(CANDIDATES, 3, **INPUTS)
    assert cache.planned(folder, CANDIDATES, 3, **INPUTS) == (made, True)
    assert [file.suffix for file in folder.iterdir()] == ['.plan']  # nothing temporary is left


def test_every_input_counts(tmp_path, monkeypatch):
    def cached(candidates=CANDIDATES, m=3, **changed) -> bool:
        return cache.planned(tmp_path, candidates, m, **{**INPUTS, **changed})[1]

    loop, one = Placement.loop(2, 2), (1.0,) * 4
    copied = [(PLACEMENT, CANDIDATES[0][1].with_times(O=one, L=one))]
    changes = [
        {},
        {'candidates': [(PLACEMENT, Costs.uniform(PLACEMENT, 1, 1.2, 0.8, comm=0.1))]},
        {'candidates': [(loop, CANDIDATES[0][1])]},
        {'m': 4},
        {'memory_limit': 2.0},
        {'memory_limit': [1.5, 2.0]},
        {'candidates': copied},
        {'candidates': copied, 'actions': ('offload',)},
        {'objective': 'window'},
        {'seconds': 9.5},
        {'seed': 2},
        {'starts': (plan(CANDIDATES, 3, seconds=9).schedule,)},
    ]
    assert [cached(**change) for change in changes] == [False] * len(changes)
    assert [cached(**change) for change in changes] == [True] * len(changes)
    monkeypatch.setattr(cache, '_code', lambda: 'another planner')
    assert not cached()


@pytest.mark.parametrize('room', ['ir', 'schedules/construct', 'analysis', 'planner'])
def test_what_another_version_planned_is_not_served(tmp_path, monkeypatch, room):
    """A version is what its files say: one character in one of them makes another."""
    source, copy = Path(cache.__file__).parents[1], tmp_path / 'megatron_zbpp'
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns('__pycache__'))
    monkeypatch.setattr(cache, '__file__', str(copy / 'planner' / 'cache.py'))

    def served() -> bool:
        cache._code.cache_clear()  # as in another process
        return cache.planned(tmp_path / 'plans', CANDIDATES, 3, **INPUTS)[1]

    assert [served(), served()] == [False, True]
    with next((copy / room).glob('*.py')).open('a') as file:
        file.write('#')
    assert [served(), served()] == [False, True]
    monkeypatch.undo()
    cache._code.cache_clear()


def lies(change) -> Callable[[Path, bytes], None]:
    """Write the plan with a change made to it, and the digest that it then has."""

    def write(file: Path, whole: bytes) -> None:
        data = json.loads(whole.decode().partition('\n')[2])
        change(data)
        body = json.dumps(data)
        file.write_text(f'{cache._digest(body)}\n{body}')

    return write


def a_pipe(file: Path, whole: bytes) -> None:
    file.unlink()
    os.mkfifo(file)


# what is no plan, or no longer the one that `plan` would give, though its digest is right
HARMS = {
    'cut': lambda file, whole: file.write_bytes(whole[:-9]),
    'changed': lambda file, whole: file.write_bytes(whole.replace(b'"value": ', b'"value": 1')),
    'binary': lambda file, whole: file.write_bytes(b'\xff' + whole),
    'empty': lambda file, whole: file.write_bytes(b''),
    'a pipe': a_pipe,
    'invalid': lies(lambda data: data.update(schedule=data['schedule'].replace('0F0', '9F9'))),
    'another m': lies(
        lambda data: data.update(schedule=plan(CANDIDATES, 4, **INPUTS).schedule.to_json())
    ),
    'better than it is': lies(lambda data: data.update(value=data['value'] * 0.9)),
    'other costs': lies(lambda data: data['costs']['times'].update(F=[9.0] * 4)),
    'no costs': lies(lambda data: data.pop('costs')),
    'a wrong type': lies(lambda data: data.update(costs=[1, 2])),
    'true for a number': lies(lambda data: data.update(lower_bound=True)),
}


@pytest.mark.parametrize('harm', HARMS)
def test_a_damaged_file_is_replaced(tmp_path, harm):
    """Nothing is waited for, and nothing but what `plan` would say is served."""
    made, _ = cache.planned(tmp_path, CANDIDATES, 3, **INPUTS)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    HARMS[harm](file, whole)
    said = 'is no regular file: planning' if harm == 'a pipe' else rf'{file.name} .*planning anew'
    with pytest.warns(UserWarning, match=said):
        assert cache.planned(tmp_path, CANDIDATES, 3, **INPUTS) == (made, False)
    assert harm == 'a pipe' or file.read_bytes() == whole


def test_without_a_folder_to_write_to(tmp_path, monkeypatch):
    taken = tmp_path / 'file'
    taken.touch()
    with pytest.warns(UserWarning) as said:
        made, cached = cache.planned(taken, CANDIDATES, 3, **INPUTS)
    assert not cached and made.value >= made.lower_bound
    assert any('not kept' in str(warning.message) for warning in said)
    assert cache.planned(None, CANDIDATES, 3, **INPUTS) == (made, False)
    # none for a user without a home, as in containers with any user number: nothing is kept
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    assert cache.default_folder() == tmp_path / 'megatron_zbpp' / 'plans'
    monkeypatch.delenv('XDG_CACHE_HOME')
    monkeypatch.setenv('HOME', str(tmp_path))
    assert cache.default_folder() == tmp_path / '.cache' / 'megatron_zbpp' / 'plans'
    nowhere = mock.Mock(side_effect=RuntimeError('Could not determine home directory.'))
    monkeypatch.setattr(Path, 'home', nowhere)
    assert cache.default_folder() is None
