"""Plans on disk: found by all that decided them and by nothing else; damage is noticed."""

from __future__ import annotations

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
