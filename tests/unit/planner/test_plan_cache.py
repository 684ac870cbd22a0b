"""Plans on disk: found by all that decided them and by nothing else; damage is noticed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from megatron_zbpp.ir import Placement
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.planner import budget, cache
from megatron_zbpp.planner.plans import plan

PLACEMENT = Placement.v(2)
CANDIDATES = [(PLACEMENT, Costs.uniform(PLACEMENT, 1, 1.2, 0.8))]
INPUTS = {'memory_limit': 1.5, 'seconds': 9.0, 'seed': 1}


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps end every search, however busy the machine is, and never the clock."""
    monkeypatch.setattr(budget, '_STEPS_PER_SECOND', 2_000)


def test_what_was_planned_is_found(tmp_path: Path) -> None:
    folder = tmp_path / 'new' / 'folder'
    made, cached = cache.planned(folder, CANDIDATES, 3, **INPUTS)
    assert not cached and made == plan(CANDIDATES, 3, **INPUTS)
    assert cache.planned(folder, CANDIDATES, 3, **INPUTS) == (made, True)
    assert [file.suffix for file in folder.iterdir()] == ['.plan']  # nothing temporary is left


def test_every_input_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cached(candidates=CANDIDATES, m=3, **changed) -> bool:
        return cache.planned(tmp_path, candidates, m, **{**INPUTS, **changed})[1]

    loop = Placement.loop(2, 2)
    changes = [
        {},
        {'candidates': [(PLACEMENT, Costs.uniform(PLACEMENT, 1, 1.2, 0.8, comm=0.1))]},
        {'candidates': [(loop, CANDIDATES[0][1])]},
        {'m': 4},
        {'memory_limit': 2.0},
        {'memory_limit': [1.5, 2.0]},
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
def test_what_another_version_planned_is_not_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: str
) -> None:
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


@pytest.mark.parametrize('harm', ['cut', 'changed', 'binary', 'empty'])
def test_a_damaged_file_is_replaced(tmp_path: Path, harm: str) -> None:
    made, _ = cache.planned(tmp_path, CANDIDATES, 3, **INPUTS)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    file.write_bytes(
        {
            'cut': whole[:-9],
            'changed': whole.replace(b'"value": ', b'"value": 1'),
            'binary': b'\xff' + whole,
            'empty': b'',
        }[harm]
    )
    with pytest.warns(UserWarning, match=f'{file.name} .*planning anew'):
        assert cache.planned(tmp_path, CANDIDATES, 3, **INPUTS) == (made, False)
    assert file.read_bytes() == whole


def rewritten(file: Path, change) -> None:
    """Writes the plan with `change` made to it, and the digest that it then has."""
    data = json.loads(file.read_text().partition('\n')[2])
    change(data)
    body = json.dumps(data)
    file.write_text(f'{cache._digest(body)}\n{body}')


@pytest.mark.parametrize(
    'change',
    [
        lambda data: data.update(schedule=data['schedule'].replace('0F0', '9F9')),
        lambda data: data.update(schedule=plan(CANDIDATES, 4, **INPUTS).schedule.to_json()),
        lambda data: data.update(value=data['value'] * 0.9),
        lambda data: data['costs']['times'].update(F=[9.0] * 4),
        lambda data: data.pop('costs'),
        lambda data: data.update(costs=[1, 2]),
    ],
    ids=['invalid', 'another m', 'better than it is', 'other costs', 'no costs', 'a wrong type'],
)
def test_a_file_that_lies_is_replaced(tmp_path: Path, change) -> None:
    """Though its digest is right: nothing but what `plan` would say is served."""
    made, _ = cache.planned(tmp_path, CANDIDATES, 3, **INPUTS)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    rewritten(file, change)
    with pytest.warns(UserWarning, match=r'is damaged \(.*planning anew'):
        assert cache.planned(tmp_path, CANDIDATES, 3, **INPUTS) == (made, False)
    assert file.read_bytes() == whole


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    made, _ = cache.planned(tmp_path, CANDIDATES, 3, **INPUTS)
    (file,) = tmp_path.iterdir()
    file.unlink()
    os.mkfifo(file)
    with pytest.warns(UserWarning, match='is no regular file: planning anew'):
        assert cache.planned(tmp_path, CANDIDATES, 3, **INPUTS) == (made, False)


def test_without_a_folder_to_write_to(tmp_path: Path) -> None:
    taken = tmp_path / 'file'
    taken.touch()
    with pytest.warns(UserWarning) as said:
        made, cached = cache.planned(taken, CANDIDATES, 3, **INPUTS)
    assert not cached and made.value >= made.lower_bound
    assert any('not kept' in str(warning.message) for warning in said)
    assert cache.planned(None, CANDIDATES, 3, **INPUTS) == (made, False)


def test_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    assert cache.default_folder() == tmp_path / 'megatron_zbpp' / 'plans'
    monkeypatch.delenv('XDG_CACHE_HOME')
    monkeypatch.setenv('HOME', str(tmp_path))
    assert cache.default_folder() == tmp_path / '.cache' / 'megatron_zbpp' / 'plans'


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in containers with any user number: nothing is kept."""
    monkeypatch.delenv('XDG_CACHE_HOME', raising=False)

    def nowhere() -> Path:
        raise RuntimeError('Could not determine home directory.')

    monkeypatch.setattr(Path, 'home', nowhere)
    assert cache.default_folder() is None
