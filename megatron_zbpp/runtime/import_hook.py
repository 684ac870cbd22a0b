"""Runs a function on a module as soon as it is imported, whoever imports it."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec


class _Finder:
    def __init__(self, functions: Mapping[str, Callable[[types.ModuleType], None]]) -> None:
        self._functions = dict(functions)

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        function = self._functions.pop(name, None)
        if function is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            function(module)

        spec.loader.exec_module = exec_module
        return spec


def after_import(functions: Mapping[str, Callable[[types.ModuleType], None]]) -> Callable[[], None]:
    """Call each function with the module of its name when that has been imported, once.

    Modules that are imported already are not looked at. What is returned takes back the others.
    """
    finder = _Finder(functions)
    sys.meta_path.insert(0, finder)
    return lambda: sys.meta_path.remove(finder)
