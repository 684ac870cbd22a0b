"""Outcomes of stock trainings, kept between tests and between runs of the tests.

A reference by Megatron's own schedules is trained once on a machine, see `stock_key`. Some are
always trained anew and compared with what is kept, since stock trainings run code of ours, too:
the launcher, placement of layers, observation. `--fresh` does so with all.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from ranks import Ranks
from stock_key import FOLDER, UnknownError, contents, key_of

FRESH = False  # `--fresh`
TRIED = 16  # one training of so many is always made anew, beside the first of each harness
LIMIT = 2 << 30  # bytes that are kept; entries that have not been read for longest go
counted: Counter[str] = Counter()
_seen: set[str] = set()  # harnesses and keys with a training in this session
_saved: dict[Path, tuple[str, object]] = {}  # by folder: the training that left it, its files


class StaleError(AssertionError):
    """A stock training differs from the kept one."""


@dataclass(frozen=True)
class Entry:
    """Outcome of a training: results by rank, and files that it saved, by name."""

    results: list[Any]
    files: dict[str, bytes]

    @classmethod
    def read(cls, path: Path) -> Entry | None:
        """Return a kept outcome; None: there is none, or its file is damaged."""
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        digest, value = content[:32], content[32:]
        return pickle.loads(value) if hashlib.sha256(value).digest() == digest else None

    def write(self, path: Path) -> None:
        """Write it whole or not at all: others may write the same at the same time."""
        path.parent.mkdir(parents=True, exist_ok=True)
        value = pickle.dumps(self)
        part = path.with_name(f'.{path.name}.{os.getpid()}')
        part.write_bytes(hashlib.sha256(value).digest() + value)
        part.replace(path)


def folder() -> Path | None:
    """Return where outcomes are kept; None: nowhere, all is trained."""
    given = os.environ.get(FOLDER)
    if given == 'off' or torch.cuda.is_available() or 'MEGATRON_LM' in os.environ:
        return None  # sums differ by the run on a GPU; a checkout may be edited
    cache = os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache'
    return Path(given) if given else Path(cache, 'megatron_zbpp', 'stock')


def trained(
    ranks: Ranks,
    function: Callable,
    *args: Any,
    kept: bool = True,
    data: Path | None = None,
    **options: Any,
) -> list[Any]:
    """Return results of `ranks.run(function, *args)`, of a training by stock those that are kept.

    Results must hold what is compared, and no times. Tests of what a training prints, measures or
    leaves in its ranks call `ranks.run`, which has the other `options`, too. The function is of a
    module of the tests; `--save`, whose checkpoint is kept, `--load` and `--data-path` count in
    lists of words; `data` is a folder of weights among the arguments. Raises StaleError where a
    training was made anew, and its results differ from the kept ones.
    """
    if not kept:
        return ranks.run(function, *args, **options)
    cache = folder()
    words = [word for each in args if isinstance(each, list) for word in each]
    saves = _after('--save', words)
    try:
        known = [place for place in (data, _after('--data-path', words)) if place]
        places = {str(place): contents(place) for place in known}
        for name, place in {'saves': saves, 'loads': _after('--load', words)}.items():
            places |= {str(place): f'{name} {_provenance(place)}'} if place else {}
        key = cache and key_of(ranks.size, ranks.pool.prepared, function, args, places)
    except UnknownError:
        key = None
    if cache is None or key is None:
        counted['not kept'] += 1
        return ranks.run(function, *args, **options)
    path = cache / key[:2] / key
    entry, due = Entry.read(path), _due(key, function)
    if entry is None or due:
        results = ranks.run(function, *args, **options)
        if entry is None:
            files = _files(saves) if saves else ()
            content = {str(each.relative_to(saves)): each.read_bytes() for each in files}
            Entry(results, content).write(path)
        elif not same(entry.results, results):
            raise StaleError(
                f'{function.__qualname__} on {ranks.size} ranks with {args}: this stock training '
                f'differs from the one kept in {path}; mend the change that reaches stock '
                'trainings, or remove that file if the change is intended'
            )
        counted['trained' if entry is None else 'trained anew'] += 1
    else:
        results = entry.results
        _serve(path, entry, saves)
        counted['served'] += 1
    if saves:
        _saved[saves.resolve()] = key, _files(saves)
    return results


def _after(flag: str, words: list[str]) -> Path | None:
    return Path(words[words.index(flag) + 1]) if flag in words[:-1] else None


def _due(key: str, function: Callable) -> bool:
    """Return whether a training is made anew, though it be kept."""
    harness = f'{function.__module__}.{function.__qualname__}'
    due = FRESH or harness not in _seen or int(key[:8], 16) % TRIED == 0
    again = key in _seen
    _seen.update((harness, key))
    return due and not again


def _provenance(place: Path) -> str:
    """Return the training that left a folder of checkpoints, or 'nothing'."""
    files = _files(place)
    key, left = _saved.get(place.resolve(), ('nothing', {}))
    if files != left:
        raise UnknownError(f'{place} is not as a stock training left it')
    return key


def _files(place: Path) -> dict[Path, tuple[int, int]]:
    stats = {path: path.stat() for path in place.rglob('*') if path.is_file()}
    return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}


def _serve(path: Path, entry: Entry, saves: Path | None) -> None:
    """Restore a checkpoint, and note that the entry was read."""
    if saves:
        saves.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(saves)
        saves.mkdir()
        for name, content in entry.files.items():
            place = saves / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
    with contextlib.suppress(FileNotFoundError):  # another run has evicted it
        os.utime(path)


def same(one: Any, other: Any) -> bool:
    """Return whether values are equal to the bit; a NaN equals a NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape
        parts = (each.detach().contiguous().reshape(-1) for each in (one, other))
        return alike and torch.equal(*(part.view(torch.uint8) for part in parts))
    if is_dataclass(one):
        return all(same(getattr(one, each.name), getattr(other, each.name)) for each in fields(one))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or (one != one and other != other)


def prune() -> None:
    """Evict entries that have not been read for longest, beyond `LIMIT` bytes."""
    cache = folder()
    entries = []
    for path in cache.glob('??/*') if cache else ():
        with contextlib.suppress(FileNotFoundError):  # another run has evicted it
            entries.append((path.stat().st_mtime_ns, path.stat().st_size, path))
    total = 0
    for _, size, path in sorted(entries, reverse=True):
        total += size
        if total > LIMIT:
            path.unlink(missing_ok=True)


def summary() -> str:
    return ', '.join(f'{number} {how}' for how, number in sorted(counted.items()))
