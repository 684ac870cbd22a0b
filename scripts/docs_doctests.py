"""Shows docstrings as they are when a program reads them: an extension of griffe.

griffe, the reader of mkdocstrings, reads sources: examples are fenced here, and `enable` gets the
arguments that are made from the fields of `Settings`.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import griffe

sys.path.insert(0, str(Path(__file__).parent))

from docs_gallery import fenced

from megatron_zbpp import enable


class FencedExamples(griffe.Extension):
    """Fences the examples of every docstring that is read."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.path == f'{enable.__module__}.{enable.__qualname__}':
            obj.docstring.value = inspect.getdoc(enable)
            made = inspect.signature(enable).parameters.values()
            obj.parameters = griffe.Parameters(*map(_parameter, made))
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)


def _parameter(found: inspect.Parameter) -> griffe.Parameter:
    return griffe.Parameter(
        found.name,
        annotation=found.annotation,
        kind=griffe.ParameterKind(found.kind.description),
        default=repr(found.default),
    )
