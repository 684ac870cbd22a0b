"""Shows the examples in docstrings as code: an extension of griffe, the reader of mkdocstrings."""

from __future__ import annotations

import re

import griffe

_EXAMPLE = re.compile(r'^ *>>> .*(?:\n(?! *$).*)*', re.M)


class FencedExamples(griffe.Extension):
    """Puts a fence around each run of lines that begins with `>>>`."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring:
            fenced = _EXAMPLE.sub(lambda found: f'```pycon\n{found[0]}\n```', obj.docstring.value)
            obj.docstring.value = fenced
