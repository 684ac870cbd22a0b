"""Plans on disk, found again by everything that decided them.

A plan's file is named after a digest of all inputs, of the source of the planner and the schedules,
and of the exact solver's version: what any of these would plan otherwise is not found. A plan that
the clock cut short (`Plan.repeats` is False) is kept too: it is valid, and its time is paid.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from math import isclose
from pathlib import Path
from typing import Any

from megatron_zbpp.analysis.checker import check
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import Schedule, strict_json
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.schedule import ScheduleError
from megatron_zbpp.planner.actions import plan_within
from megatron_zbpp.planner.plans import Candidate, Plan

_PAIR = strict_json.tuple_of(strict_json.text, strict_json.number)
_PLAIN = {  # fields that are JSON as they are
    'objective': strict_json.one_of('makespan', 'window'),
    'value': strict_json.number,
    'lower_bound': strict_json.number,
    'repeats': strict_json.one_of(False, True),
}
_FIELDS = {
    **_PLAIN,
    'schedule': strict_json.string,
    'costs': strict_json.anything,
    'best_named': strict_json.check(
        lambda value: value is None or _PAIR(value) is None, 'a name and a number, or null'
    ),
}


def default_folder() -> Path | None:
    """Return where plans are kept: the user's cache folder (XDG base directory specification).

    None where the user has none: no HOME, and no name in this machine's list of users.
    """
    try:
        home = os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache'
    except RuntimeError:
        return None
    return Path(home) / 'megatron_zbpp' / 'plans'


def planned(
    folder: Path | None,
    candidates: Sequence[Candidate],
    num_microbatches: int,
    *,
    progress: Callable[[float], None] | None = None,
    **inputs: Any,
) -> tuple[Plan, bool]:
    """Return the result of `plan_within`, and True where it was on disk.

    A damaged file is replaced, a folder that cannot be written to is done without; both with a
    warning. Without a folder it plans anew and keeps nothing. Further arguments are those of
    `plan_within`, none that can be read only once.
    """
    if folder is None:
        return plan_within(candidates, num_microbatches, progress=progress, **inputs), False
    asked = repr((_code(), candidates, num_microbatches, sorted(inputs.items())))
    file = folder / f'{_digest(asked)}.plan'
    found = _load(file)
    if found is not None:
        wrong = _wrong(found, candidates, num_microbatches)
        if wrong is None:
            return found, True
        warnings.warn(f'{file} is damaged ({wrong}): planning anew', stacklevel=2)
    made = plan_within(candidates, num_microbatches, progress=progress, **inputs)
    _store(file, made)
    return made, False


@cache
def _code() -> str:
    root = Path(__file__).parents[1]
    rooms = ('ir', 'schedules', 'analysis', 'techniques', 'planner')
    files = [file for room in rooms for file in root.joinpath(room).rglob('*.py')]
    assert all(any(room in file.parts for file in files) for room in rooms), 'a room has moved'
    try:
        solver = version('ortools')
    except PackageNotFoundError:
        solver = ''
    return _digest(solver + ''.join(file.read_text(encoding='utf-8') for file in sorted(files)))


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def _load(file: Path) -> Plan | None:
    """Return the plan in `file`; None if there is none, or not as it was written."""
    if not file.exists():
        return None
    if not file.is_file():  # a pipe of that name would be waited for
        warnings.warn(f'{file} is no regular file: planning anew', stacklevel=3)
        return None
    try:
        digest, _, body = file.read_text(encoding='utf-8').partition('\n')
    except (OSError, UnicodeDecodeError) as error:
        warnings.warn(f'{file} cannot be read ({error}): planning anew', stacklevel=3)
        return None
    if _digest(body) != digest:
        warnings.warn(f'{file} is damaged: planning anew', stacklevel=3)
        return None
    try:
        data: Any = strict_json.loads(body)
        strict_json.require(data, _FIELDS)
        return Plan(
            schedule=Schedule.from_json(data['schedule']),
            costs=Costs.from_fields(data['costs']),
            best_named=data['best_named'] and tuple(data['best_named']),
            **{name: data[name] for name in _PLAIN},
        )
    except ValueError as error:
        warnings.warn(f'{file} is damaged ({error!r}): planning anew', stacklevel=3)
        return None


def _wrong(found: Plan, candidates: Sequence[Candidate], num_microbatches: int) -> str | None:
    schedule, costs = found.schedule, found.costs
    known = (schedule.placement, costs) in candidates
    if schedule.num_microbatches != num_microbatches or not known:
        return 'it is of another question'
    try:
        check(schedule)
    except ScheduleError as error:
        return error.what
    value = simulate(schedule, costs).value(found.objective)
    return None if isclose(value, found.value, rel_tol=1e-9) else f'it takes {value}'


def _store(file: Path, made: Plan) -> None:
    """Write a file that holds all of the plan at any time that it is there."""
    data = {
        'schedule': made.schedule.to_json(),
        'costs': asdict(made.costs),
        'best_named': made.best_named,
        **{name: getattr(made, name) for name in _PLAIN},
    }
    body = json.dumps(data)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, path = tempfile.mkstemp(dir=file.parent, prefix=file.stem)
        try:
            with open(handle, 'w', encoding='utf-8') as stream:
                stream.write(f'{_digest(body)}\n{body}')
            os.replace(path, file)
        except BaseException:
            os.unlink(path)
            raise
    except OSError as error:
        warnings.warn(f'the plan is not kept: {file}: {error.strerror}', stacklevel=3)
