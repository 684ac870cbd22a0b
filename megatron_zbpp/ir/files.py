"""The reader of all files that people name: JSON, YAML (through PyYAML, an extra), or text."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

from megatron_zbpp.ir.strict_json import is_list, printable

_Found = TypeVar('_Found')
_YAML = ('.yaml', '.yml')
MOST_BYTES = 2**28  # of a file of ours: 64 for each of the passes that can be checked
_MOST_VALUES = 2**22  # of a file of YAML, its aliases written out
_GZIP = b'\x1f\x8b'


def read(path: str | Path, parse: Callable[[str], _Found], wanted: str) -> _Found:
    """Read a file and return the value that `parse` makes of its text; of YAML, of it as JSON.

    `wanted` says what to give, for errors, which name the path and the cure.
    """
    try:
        text = text_of(content_of(path, MOST_BYTES))
        if Path(path).suffix.lower() in _YAML:
            text = _json_of(text, str(path))
        return parse(text)
    except OSError as error:
        raise OSError(error.errno, f'{error.strerror}: give {wanted}', str(path)) from error
    except UnicodeDecodeError as error:
        raise ValueError(f'{path}: not text: give {wanted}') from error
    except (RecursionError, ValueError) as error:
        raise ValueError(f'{path}: {printable(str(error))}') from error


def content_of(path: str | Path, most: int) -> bytes:
    """Return the bytes of a file, unpacked if gzip packed them."""
    with Path(path).open('rb') as file:
        content = file.read(most + 1)  # /dev/zero has no end
    if content.startswith(_GZIP):
        try:
            content = gzip.GzipFile(fileobj=BytesIO(content)).read(most + 1)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(f'a damaged gzip file ({error}): copy it again') from error
    if len(content) > most:
        raise ValueError(f'more than {most} bytes: give a shorter file')
    return content


def text_of(content: bytes) -> str:
    """Return the text that `content` is, without a byte order mark."""
    return content.decode('utf-8-sig')


def _json_of(text: str, path: str) -> str:
    try:
        yaml: Any = import_module('yaml')
    except ImportError as error:
        raise ImportError(f'{path}: YAML needs PyYAML: pip install pyyaml, or give JSON') from error
    # PyYAML raises the others for values that are none of their tags, such as !!int ''
    wrong = yaml.YAMLError, TypeError, RecursionError, LookupError, AttributeError
    try:
        _require_few(yaml.compose(text, Loader=yaml.SafeLoader), {})
        return json.dumps(yaml.safe_load(text), check_circular=False)
    except wrong as error:
        said = ' '.join(str(error).split())
        raise ValueError(f'no YAML of lists, numbers and names ({said})') from error


def _require_few(node: Any, known: dict[int, int]) -> int:
    """Return the number of values in a node, aliases written out."""
    if id(node) not in known:
        known[id(node)] = 1
        value: Any = getattr(node, 'value', None)
        entries = value if is_list(value) else []
        seen = set[str]()
        for entry in entries:
            key, *rest = (None, entry) if hasattr(entry, 'tag') else entry  # of a list, or a pair
            if key is not None and key.value in seen:
                raise ValueError(f'key {key.value!r} stands twice: leave one out')
            seen |= {key.value} if key is not None else set()
            known[id(node)] += sum(_require_few(each, known) for each in rest)
    if known[id(node)] > _MOST_VALUES:
        raise ValueError(f'more than {_MOST_VALUES} values with aliases: leave aliases out')
    return known[id(node)]
