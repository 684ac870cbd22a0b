"""Patches as values, and the one mechanism that puts them in place and takes them out again."""

from __future__ import annotations

import functools
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pkgutil import resolve_name
from types import ModuleType
from typing import Any, NamedTuple

from megatron_zbpp.runtime.import_hook import after_import

_ABSENT = object()
# they have most of all names that there are, and none of Megatron's
_WITHOUT_MEGATRON = {'torch', 'triton', 'numpy', 'sympy', 'mpmath', 'networkx', '_pytest'}


@dataclass(frozen=True)
class Patch:
    """Something that is replaced while the plugin is enabled."""

    owner: str  # the module that has it; for a method, `module:Class`
    name: str  # what it is called there
    # makes it from the original; None: its user replaces it for a time
    replacement: Callable[[Any], Any] | None
    # the functions (`module:function`) that must find it by that name in their module when they run
    looked_up_by: tuple[str, ...] = ()
    everywhere: bool = False  # whether modules that imported it by name get it, too
    late: bool = False  # whether it waits until somebody imports the module

    @property
    def target(self) -> str:
        """The full name, of module and attribute."""
        return f'{self.owner}.{self.name}'.replace(':', '.')

    @property
    def module(self) -> str:
        """The name of the module."""
        return self.owner.partition(':')[0]

    @property
    def waits(self) -> bool:
        """True while the module that it patches is not imported."""
        return self.late and self.module not in sys.modules

    def find_owner(self) -> Any:
        """Return the module or class; import the module."""
        return resolve_name(self.owner if ':' in self.owner else f'{self.owner}:')

    def problem(self) -> str:
        """Return the reason why it has no effect in the installed release; empty: it has one."""
        try:
            original = getattr(self.find_owner(), self.name)
            users = {path: inspect.unwrap(resolve_name(path)) for path in self.looked_up_by}
        except (ImportError, AttributeError) as error:
            return str(error)
        for path, user in users.items():
            found = user.__globals__.get(self.name) if self.name in user.__code__.co_names else None
            if found is not original:
                return f'{path.replace(":", ".")} does not use {self.name} in this release'
        return ''


def around(function: Callable[..., Any], *bound: Any) -> Callable[[Callable], Callable]:
    """Return a replacement, a function, that calls `function(*bound, original, ...)` instead."""

    def replacement(original: Callable) -> Callable:
        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return function(*bound, original, *args, **kwargs)

        return replaced

    return replacement


@contextmanager
def replaced(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Let `owner` have `replacement` by that name while this lasts."""
    own = vars(owner).get(name, _ABSENT)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if own is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


class Place(NamedTuple):
    """An attribute of a module or class, and what belongs there."""

    owner: Any
    name: str
    value: Any


class Registry:
    """Installs patches, all or none, asserts that each takes effect, and undoes them."""

    def __init__(self) -> None:
        self._places: list[Place] = []
        self._functions: list[tuple[Any, Any]] = []  # original and ours: wherever ours is found
        self._forget_imports: Callable[[], None] | None = None

    @property
    def installed(self) -> bool:
        """True while anything is replaced."""
        return bool(self._places or self._functions)

    def places(self) -> list[Place]:
        """Return the places of all replaced attributes, with the originals."""
        return [*self._places, *_everywhere((ours, original) for original, ours in self._functions)]

    def install(self, patches: Iterable[Patch]) -> None:
        """Put patches in place, or later, when their module is imported.

        Raise RuntimeError, and replace nothing, if one would have no effect.
        """
        here, later = [], defaultdict(list)
        for patch in patches:
            (later[patch.module] if patch.waits else here).append(patch)
        self._put(here)
        self._forget_imports = after_import(
            {name: lambda _, waiting=waiting: self._put(waiting) for name, waiting in later.items()}
        )

    def _put(self, patches: list[Patch]) -> None:
        for patch in patches:
            if problem := patch.problem():
                raise RuntimeError(f'{problem}: the patch would have no effect; please report it')
        functions, attributes = [], []
        latest: dict[tuple[int, str], Any] = {}  # what several replace, one after another
        for patch in patches:
            if patch.replacement is None:
                continue
            owner = patch.find_owner()
            place = id(owner), patch.name
            original = latest.get(place, getattr(owner, patch.name))
            ours = latest[place] = patch.replacement(original)
            if patch.everywhere:
                functions.append((original, ours))
            else:
                attributes.append(Place(owner, patch.name, ours))
                self._places.append(Place(owner, patch.name, original))
        self._functions += functions
        for owner, name, ours in [*attributes, *_everywhere(functions)]:
            setattr(owner, name, ours)

    def undo(self) -> None:
        """Take everything out again, also where it was imported meanwhile."""
        if self._forget_imports is not None:
            self._forget_imports()
            self._forget_imports = None
        for owner, name, original in reversed(self.places()):
            setattr(owner, name, original)
        self._places.clear()
        self._functions.clear()


def _everywhere(pairs: Iterable[tuple[Any, Any]]) -> Iterator[Place]:
    """Yield every module that has the first of a pair, by whatever name; with the second."""
    wanted = {id(one): (one, other) for one, other in pairs}
    if not wanted:
        return
    for path, module in list(sys.modules.items()):
        if path.partition('.')[0] in _WITHOUT_MEGATRON or not isinstance(module, ModuleType):
            continue
        if wanted.keys().isdisjoint(map(id, vars(module).values())):
            continue  # as nearly all do, of thousands
        for name, value in list(vars(module).items()):
            one, other = wanted.get(id(value), (None, None))
            if one is not None and one is value:
                yield Place(module, name, other)
